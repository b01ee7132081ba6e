"""Convolutions on integers whose scale OpenVINO applies to their result more than once.

OpenVINO multiplies the sum of a convolution's codes by the scales for each op that
reads the result. Where the shape is open and the convolution has no bias it then fuses all of
these multiplications into the convolution, one after the other: with two readers the result is
multiplied by the scale's square. With a bias, or fixed shapes, it does not. Ops that change
nothing, such as Identity, Dropout or a Pad by zeros, it removes before.
"""

from __future__ import annotations

from collections.abc import Mapping

from finecast.graph import Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.ops import OpKind, by_name
from finecast.planning.scalable import CONVOLUTIONS
from finecast.rules.folded import may_be_zeros, settled

_SCALES = frozenset({"mul", "div", "neg"})
_SHIFTS = frozenset({"add", "sub"})
# Ops that may change nothing, by their attributes and constants; the others of a single value.
_KEEP_VALUES = frozenset({OpKind.MOVEMENT, OpKind.RELAYOUT, OpKind.CAST, OpKind.REDUCTION})
_KEEP_ONE_VALUE = frozenset({"dropout", "sum", "mean", "max", "min"})


def scaled_twice(graph: Graph, low: Format) -> Mapping[int, str]:
    """Convolutions that would be scaled twice, with the reason."""
    text = (
        f"openvino scales a convolution in {low.label} twice where its shape is open, it has"
        " no bias, and several ops read it"
    )
    return {
        node.id: text
        for node in graph.nodes
        if node.op in CONVOLUTIONS
        and not _has_bias(graph, node)
        and _is_read_twice(graph, node)
    }


def _is_read_twice(graph: Graph, node: Node) -> bool:
    """Whether several inputs of ops read the result, or what a constant makes of it."""
    (result,) = node.outputs[:1]
    while result is not None:
        value = graph.values[result]
        if value.fixed_shape is not None:
            return False
        ports = [n for n in value.uses for i in graph.nodes[n].inputs if i == result]
        if len(ports) != 1:
            return len(ports) > 1
        reader = graph.nodes[ports[0]]
        if not _is_merged(graph, value, reader):
            return False
        result = reader.outputs[0]
    return False


def _is_merged(graph: Graph, value: Value, reader: Node) -> bool:
    """Whether the op that reads ``value`` becomes part of the scale, or may change nothing."""
    given = [graph.values[i] for i in reader.inputs if i is not None and i != value.id]
    known = graph.once(settled)
    if any(v.id not in known for v in given):
        return False
    if reader.op in _SCALES:
        return True
    if reader.op in _SHIFTS:
        return any(may_be_zeros(graph, v) for v in given)
    kept = reader.op in _KEEP_ONE_VALUE and (not given or reader.op == "dropout")
    if not kept and by_name(reader.op).kind not in _KEEP_VALUES:
        return False
    after = None if reader.outputs[0] is None else graph.values[reader.outputs[0]]
    return after is not None and _may_be_equal(value, after)


def _may_be_equal(value: Value, other: Value) -> bool:
    """Whether both may have the same shape: sizes that are not known may be equal."""
    if value.shape is None or other.shape is None:
        return True
    pairs = zip(value.shape, other.shape, strict=False)
    known = [p for p in pairs if all(isinstance(size, int) for size in p)]
    return len(value.shape) == len(other.shape) and all(a == b for a, b in known)


def _has_bias(graph: Graph, node: Node) -> bool:
    """Whether it adds other numbers than zeros, in its own op."""
    index = node.inputs[2] if len(node.inputs) > 2 else None
    if index is None:
        return False
    bias = graph.values[index]
    return index not in graph.once(settled) or not may_be_zeros(graph, bias)
