"""An encoded ONNX model without its weights, cut from the protobuf message.

Names and ports take a few kilobytes, weights up to gigabytes. Parsing the weights would count
as memory that the engine used.
"""

from __future__ import annotations

from collections.abc import Iterator

from finecast.frontends.onnx.wire import GRAPH_INITIALIZER, MODEL_GRAPH
from finecast.frontends.wire import Field, fields, prefix

_GRAPH_SPARSE_INITIALIZER = 15
_TENSOR_NAME = 8


def without_weights(data: memoryview) -> tuple[bytes, frozenset[str]]:
    """The encoded model without initializers, and their names.

    Raises:
        ValueError: If ``data`` is not a whole protobuf message.
    """
    kept: list[bytes | memoryview] = []
    names: set[str] = set()
    for field in fields(data, 0, len(data)):
        if field.number != MODEL_GRAPH:
            kept.append(data[field.start : field.end])
            continue
        graph: list[memoryview] = []
        for part in fields(data, field.content, field.end):
            if part.number == GRAPH_INITIALIZER:
                names.update(_tensor_name(data, part))
            elif part.number != _GRAPH_SPARSE_INITIALIZER:
                graph.append(data[part.start : part.end])
        body = b"".join(graph)
        kept.append(prefix(MODEL_GRAPH, len(body)) + body)
    return b"".join(kept), frozenset(names)


def _tensor_name(data: memoryview, tensor: Field) -> Iterator[str]:
    for field in fields(data, tensor.content, tensor.end):
        if field.number == _TENSOR_NAME:
            yield bytes(data[field.content : field.end]).decode("utf-8", "replace")
