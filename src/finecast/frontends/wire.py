"""Protobuf's wire format, to read and write parts of a file without parsing all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_FIXED32: Final = 5


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
