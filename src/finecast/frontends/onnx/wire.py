"""Protobuf's encoding, field by field: what is read of a file without parsing all of it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import onnx

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
MODEL_GRAPH: Final = 7
GRAPH_INITIALIZER: Final = 5
# From here on reading twice shows beside the 200 MB that the libraries take.
WHOLE_BELOW_BYTES: Final = 16 << 20


class Field(NamedTuple):
    """One field of a message: its number, and where it, its content and its end are."""

    number: int
    start: int
    content: int
    end: int


def parse_model(path: Path, *, whole_below: int = WHOLE_BELOW_BYTES) -> onnx.ModelProto:
    """The message in a file; large tensors are read one by one, so that none is there twice.

    Args:
        path: The file.
        whole_below: Bytes of a file that is read at once, and of such a tensor.

    Raises:
        DecodeError, ValueError: If it is no whole message.
        OSError: If the file cannot be read.
    """
    if path.stat().st_size < whole_below:
        return onnx.ModelProto.FromString(path.read_bytes())
    model = onnx.ModelProto()
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # unmapped with its last view; closing it here would fail while an error holds one
        data = memoryview(mapped)
        for field in fields(data, 0, len(data)):
            if field.number != MODEL_GRAPH:
                model.MergeFromString(bytes(data[field.start : field.end]))
                continue
            rest = field.content  # where what is not merged yet begins
            for part in fields(data, field.content, field.end):
                if part.number == GRAPH_INITIALIZER and part.end - part.start >= whole_below:
                    model.graph.MergeFromString(bytes(data[rest : part.start]))
                    file.seek(part.content)  # pages of the mapping would stay in memory
                    content = file.read(part.end - part.content)
                    model.graph.initializer.add().ParseFromString(content)
                    rest = part.end
            model.graph.MergeFromString(bytes(data[rest : field.end]))
    return model


def fields(data: memoryview, position: int, end: int) -> Iterator[Field]:
    """The fields of the message that ``data`` has from ``position`` to ``end``.

    Raises:
        ValueError: If it is no whole message.
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
