"""Ranks of values, also where onnx's inference lost the shape.

After a Reshape to computed sizes onnx infers no shapes any more, and none for the ops that
follow. The number of dimensions can often be told all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import onnx_ir as ir

from finecast.frontends.onnx.types import every_node, infer
from finecast.ops import OpKind, lookup

# Kinds of ops whose result has the largest of the inputs' ranks.
_BROADCASTING: Final = frozenset({OpKind.ELEMENTWISE, OpKind.TRANSCENDENTAL})
# Ops whose result has the rank of the first input.
_LIKE_FIRST: Final = frozenset(
    {"BatchNormalization", "Cast", "Dropout", "Identity", "LayerNormalization", "LogSoftmax"}
    | {"Slice", "Softmax", "Pad"}
)


def ranks_of(model: ir.Model) -> Mapping[str, int]:
    """The rank of each value of ``model``, by name, where it can be told.

    A copy is inferred: ``model`` is to be written without shapes that its file does not state.
    """
    copy = model.clone()
    infer(copy, shapes=True)
    found: dict[str, int] = {}
    for value in (*copy.graph.inputs, *copy.graph.initializers.values()):
        _note(found, value, None)
    for node in every_node(copy.graph):
        for number, value in enumerate(node.outputs):
            _note(found, value, _rank(node, found) if number == 0 else None)
    return found


def _note(found: dict[str, int], value: ir.Value, rank: int | None) -> None:
    known = rank if value.shape is None else len(value.shape)
    if known is not None and value.name:
        found[value.name] = known


def _rank(node: ir.Node, known: Mapping[str, int]) -> int | None:
    """The rank of the first output, from the node's attributes or the ranks of its inputs."""
    inputs = [v for v in node.inputs if v is not None]
    if node.domain or not inputs:
        return None
    if node.op_type == "Transpose" and "perm" in node.attributes:
        return len(node.attributes["perm"].as_ints())
    if node.op_type == "Reshape":
        target = inputs[1].shape if len(inputs) > 1 else None
        size = target[0] if target is not None and len(target) else None
        return size if isinstance(size, int) else None
    ranks = [known.get(v.name or "") for v in inputs]
    if node.op_type in _LIKE_FIRST:
        return ranks[0]
    if any(r is None for r in ranks):
        return None
    sure = [r for r in ranks if r is not None]
    if node.op_type == "Gather":
        return sum(sure) - 1
    kind = lookup(f"onnx::{node.op_type}").kind
    if kind in _BROADCASTING or (node.op_type == "MatMul" and min(sure) > 1):
        return max(sure)
    return None
