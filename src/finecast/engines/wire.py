"""An ONNX file without its weights, straight from the protobuf encoding.

Names and ports are a few kilobytes of a file whose weights can be gigabytes; parsing them
too would show as memory that the engine never used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

_MODEL_GRAPH = 7
_GRAPH_INITIALIZER = 5
_GRAPH_SPARSE_INITIALIZER = 15
_TENSOR_NAME = 8
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _Field(NamedTuple):
    number: int
    start: int
    content: int
    end: int


def without_weights(data: memoryview) -> tuple[bytes, frozenset[str]]:
    """The encoded model without initializers, and their names.

    Raises:
        ValueError: If ``data`` is not a whole protobuf message.
    """
    kept: list[bytes | memoryview] = []
    names: set[str] = set()
    for field in _fields(data, 0, len(data)):
        if field.number != _MODEL_GRAPH:
            kept.append(data[field.start : field.end])
            continue
        graph: list[memoryview] = []
        for part in _fields(data, field.content, field.end):
            if part.number == _GRAPH_INITIALIZER:
                names.update(_tensor_name(data, part))
            elif part.number != _GRAPH_SPARSE_INITIALIZER:
                graph.append(data[part.start : part.end])
        body = b"".join(graph)
        kept.append(bytes([_MODEL_GRAPH << 3 | _BYTES]) + _encoded(len(body)) + body)
    return b"".join(kept), frozenset(names)


def _tensor_name(data: memoryview, tensor: _Field) -> Iterator[str]:
    for field in _fields(data, tensor.content, tensor.end):
        if field.number == _TENSOR_NAME:
            yield bytes(data[field.content : field.end]).decode("utf-8", "replace")


def _fields(data: memoryview, position: int, end: int) -> Iterator[_Field]:
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
        yield _Field(number, start, content, position)


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


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
