"""Protobuf's wire format, to read and write parts of a file without parsing all of it.

And the text in messages that were parsed: protobuf does not check that of the second version
of its language, in which ONNX's messages are declared, and gives bytes where it is no UTF-8.
"""

from __future__ import annotations

import mmap
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_FIXED32: Final = 5
_MOST_SHOWN: Final = 40


_Parts: TypeAlias = tuple[list[tuple[str, bool]], list[tuple[str, bool]]]


class Field(NamedTuple):
    """One field of a message: its number, and the offsets of its tag, content and end."""

    number: int
    start: int
    content: int
    end: int


def fields(data: memoryview, position: int, end: int) -> Iterator[Field]:
    """The fields of the message in ``data[position:end]``.

    Raises:
        ValueError: If that is not a complete message.
    """
    while position < end:
        start = position
        tag, position = _varint(data, position, end)
        number, kind = tag >> 3, tag & 7
        content = position
        if kind == _VARINT:
            _, position = _varint(data, position, end)
        elif kind == _BYTES:
            length, content = _varint(data, position, end)
            position = content + length
        elif kind in (_FIXED64, _FIXED32):
            position += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind} at byte {start}")
        if position > end or number == 0:
            raise ValueError(f"field {number} at byte {start} runs past the end")
        yield Field(number, start, content, position)


Span: TypeAlias = tuple[int, int]
"""Where a message's content begins and ends."""


@contextmanager
def mapped(path: Path) -> Generator[memoryview]:
    """The bytes of a file, which are not in memory before they are read; none outlive this."""
    with path.open("rb") as file, mmap.mmap(
        file.fileno(), 0, access=mmap.ACCESS_READ
    ) as content, memoryview(content) as data:  # fmt: skip
        yield data


def inside(data: memoryview, span: Span, path: tuple[int, ...]) -> Iterator[Span]:
    """The messages in ``span`` that a path of field numbers leads to."""
    if not path:
        yield span
        return
    for field in fields(data, *span):
        if field.number == path[0]:
            yield from inside(data, (field.content, field.end), path[1:])


def texts(data: memoryview, span: Span, path: tuple[int, ...]) -> list[str]:
    """The text in the fields of ``span`` that a path of field numbers leads to."""
    return [
        bytes(data[start:end]).decode("utf-8", "replace")
        for start, end in inside(data, span, path)
    ]


def undecodable(message: Any) -> str:
    """Where a message has text that is no UTF-8, and its bytes; empty if it has none.

    Messages inside are searched without recursion: a file may nest them without limit.
    """
    waiting, parts = [("", message)], dict[str, _Parts]()
    while waiting:
        place, message = waiting.pop()
        kind = message.DESCRIPTOR
        if kind.full_name not in parts:
            parts[kind.full_name] = _parts(kind)
        texts, messages = parts[kind.full_name]
        for name, repeated in texts:
            try:
                value = getattr(message, name)
                held: list[Any] = value if repeated else [value]
                text = next((text for text in held if isinstance(text, bytes)), None)
            except UnicodeDecodeError as error:  # older releases of protobuf
                text = error.object
            if text is not None:
                return f"{place}{name}, {text[:_MOST_SHOWN]!r},"
        for name, repeated in messages:
            if repeated:
                inner = enumerate(getattr(message, name))
                waiting += [(f"{place}{name}[{i}].", one) for i, one in inner]
            elif message.HasField(name):
                waiting.append((f"{place}{name}.", getattr(message, name)))
    return ""


def _parts(kind: Any) -> _Parts:
    """The fields of a kind of messages that are text, and those that are messages.

    Each with whether it is repeated.
    """
    # Releases of protobuf differ in how a field says that it is repeated.
    fields_of = [(f, f.default_value == []) for f in kind.fields]
    return (
        [(f.name, repeated) for f, repeated in fields_of if f.type == f.TYPE_STRING],
        [(f.name, repeated) for f, repeated in fields_of if f.type == f.TYPE_MESSAGE],
    )


def prefix(number: int, size: int) -> bytes:
    """What precedes ``size`` bytes of content: the tag of field ``number``, and the size."""
    out = bytearray([number << 3 | _BYTES])
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out)


def _varint(data: memoryview, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError("a number runs past the end")
