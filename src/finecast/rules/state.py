"""State that is kept from call to call: parameters, optimizer state, running statistics.

Rounding errors of such values add up over calls. An update of a thousandth of its weight is
below half a unit in the last place of bf16, so that a weight updated in bf16 never changes.
So the ops that lead to a write into one of the graph's inputs keep fp32: an optimizer's
arithmetic, moving averages, running statistics.

If the graph has the forward pass, too, the walk back from the write ends at ops that combine
data and parameters: products, which are not judged, and sums over a batch, which keep fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from finecast.graph import Dim, Graph, Node, Value
from finecast.ops import MOVES, POINTWISE, OpKind, by_name
from finecast.rules.base import KEEP, Context, Rule, Ruling

# Ops whose results have an element for each element of an operand, or for some of them.
_ALONG: Final = (
    POINTWISE | MOVES | {OpKind.CAST, OpKind.CONSTANT, OpKind.COMPARISON, OpKind.CONTROL}
)


def _judge(node: Node, context: Context) -> Ruling | None:
    state = context.graph.once(_leading).get(node.id)
    if state is None:
        return None
    return Ruling(
        permits=KEEP,
        text=f"computes what is written to {context.graph.values[state].name}, which is kept "
        "from call to call: roundings would add up",
    )


def _leading(graph: Graph) -> dict[int, int]:
    """By id of each node that leads to a write, the id of the value that is written."""
    writes = [
        (state, source)
        for node in graph.nodes
        if node.op == "assign"
        for state, source in _pairs(node)
        if state is not None and source is not None and graph.values[state].producer is None
    ]
    states = {state for state, _ in writes}
    shapes = {graph.values[s].shape for s in states}
    mixed = _mixed(graph, states, shapes) if states else frozenset[int]()
    states_by_node: dict[int, int] = {}
    for state, source in writes:
        waiting = [graph.values[source]]
        while waiting:
            value = waiting.pop()
            node = graph.maker(value)
            if (
                node is None
                or node.id in states_by_node
                or _keeps_own_type(graph, node, value)
            ):
                continue
            along = node.id not in mixed or _is_along(graph, node, shapes)
            if along or not by_name(node.op).matmul_engine:
                states_by_node[node.id] = state
            if along:
                waiting += (graph.values[i] for i in node.input_ids)
    return states_by_node


def _pairs(node: Node) -> Iterator[tuple[int | None, int | None]]:
    """The written values of an ``assign``, first half of its inputs, with what is written."""
    half = len(node.inputs) // 2
    return zip(node.inputs[:half], node.inputs[half:], strict=False)


def _keeps_own_type(graph: Graph, node: Node, value: Value) -> bool:
    """Whether the node gives ``value``, such as statistics, in fp32 in any case."""
    follows = any(v.id == value.id for v in graph.following_outputs(node))
    return node.format is not None and value.format is not None and not follows


def _is_along(graph: Graph, node: Node, shapes: set[tuple[Dim, ...] | None]) -> bool:
    """Whether the op works on values of a state's shape: a gradient, a moment, its norm."""
    info = by_name(node.op)
    if info.kind in _ALONG and not info.accumulates:
        return True
    first = graph.read(node, 0)
    return not info.matmul_engine and first is not None and first.shape in shapes


def _mixed(
    graph: Graph, states: set[int], shapes: set[tuple[Dim, ...] | None]
) -> frozenset[int]:
    """Nodes that depend on data: inputs that are no state, no scalar, of no state's shape."""
    data = {
        v.id
        for v in graph.values
        if v.producer is None
        and v.constant is None
        and v.id not in states
        and v.shape not in shapes
        and not _is_scalar(v)
    }
    mixed: set[int] = set()
    for node in graph.nodes:
        if any(i in data for i in node.inputs):
            mixed.add(node.id)
            data.update(node.output_ids)
    return frozenset(mixed)


def _is_scalar(value: Value) -> bool:
    shape = value.shape
    if shape is None:
        return False
    sizes = [d for d in shape if isinstance(d, int)]
    return len(sizes) == len(shape) and math.prod(sizes) == 1


STATE = Rule(name="state", judge=_judge)
