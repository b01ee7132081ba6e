"""Which operands of an op are stored in a format with parameters, and by which range.

What an engine runs on integers: products by constant weights, which have a scale for each
channel of the result, and the addition that joins a convolution's result with another value
in the convolution's own kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from finecast.graph import ROUNDS, Graph, Node, Value
from finecast.ops import OpKind, by_name
from finecast.rules.constants import scalars

# Of an operand, by its index, the axis along which it has a scale for each channel, or None.
Axes = Mapping[int, int | None]

_PLACES: Final = frozenset({OpKind.RELAYOUT, OpKind.MOVEMENT, OpKind.POOL})


def scaled_operands(graph: Graph, node: Node) -> Axes:
    """The operands of ``node`` that are stored as codes; all others stay as they are.

    Raises:
        ValueError: If the op does not run on integers; says why.
    """
    find = _OPERANDS.get(node.op)
    if find is None:
        raise ValueError(f"no engine here runs {node.op} on integers")
    return find(graph, node)


def origin(graph: Graph, value: Value) -> Value:
    """The value that ``value`` is only moved from: all of a rounding class have one.

    Ops that place numbers, and nothing besides but zeros, stand between.
    """
    while value.producer is not None:
        node = graph.nodes[value.producer]
        before = moved_by(graph, node)
        if before is None:
            return value
        value = before
    return value


def moved_by(graph: Graph, node: Node) -> Value | None:
    """The one value whose numbers ``node`` places, beside zeros; None if there is no such."""
    info = by_name(node.op)
    if not info.exact or info.kind not in _PLACES or any(scalars(node)):
        return None
    reads = [*graph.following_inputs(node)]
    moved = [v for v in reads if v.constant is None]
    zeros = all(v.constant.largest == 0 for v in reads if v.constant is not None)
    return moved[0] if len(moved) == 1 and zeros else None


def _weighted(channels: int) -> Callable[[Graph, Node], Axes]:
    return lambda graph, node: _product(graph, node, channels)


def _product(graph: Graph, node: Node, channels: int) -> Axes:
    value, weights = (_operand(graph, node, index) for index in (0, 1))
    if value is None or value.constant is not None:
        raise ValueError("its first operand is no value that is computed")
    if weights is not None and _is_stored(graph, weights):
        return {0: None}
    if weights is None or weights.constant is None:
        raise ValueError("its weights are no constant")
    rank = len(weights.shape or ())
    return {0: None, 1: channels % rank if rank > 1 else None}


def _is_stored(graph: Graph, value: Value) -> bool:
    """Whether an earlier conversion stored the value, a constant, as codes."""
    return value.producer is not None and ROUNDS in graph.nodes[value.producer].attributes


def _gemm(graph: Graph, node: Node) -> Axes:
    return _product(graph, node, 0 if node.attributes.get("transB") else 1)


def _addition(graph: Graph, node: Node) -> Axes:
    values = [_operand(graph, node, index) for index in (0, 1)]
    if any(v is None or v.constant is not None for v in values):
        raise ValueError("it adds a constant, in the kernel of what makes the other operand")
    if not any(v is not None and _joins(graph, v) for v in values):
        raise ValueError("it does not run in the kernel of a convolution")
    return {0: None, 1: None}


def _joins(graph: Graph, value: Value) -> bool:
    """Whether the value is the result of a convolution that nothing else reads."""
    made = value.producer
    only = len(value.uses) == 1 and not value.is_output
    return only and made is not None and graph.nodes[made].op == "conv"


def _operand(graph: Graph, node: Node, index: int) -> Value | None:
    """The value at an input that has the op's own format."""
    if index >= len(node.inputs) or not node.follows_in[index]:
        return None
    source = node.inputs[index]
    return None if source is None else graph.values[source]


_OPERANDS: Final[Mapping[str, Callable[[Graph, Node], Axes]]] = {
    "conv": _weighted(0),
    "linear": _weighted(0),
    "matmul": _weighted(-1),
    "gemm": _gemm,
    "add": _addition,
}
