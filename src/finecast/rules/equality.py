"""What is compared for equality is rounded alike on both sides: selections of it stay fp32.

The gradient of a maximum goes where a value equals it, divided by how often: ``x ==
x.amax()``. Were the maximum taken of a rounded copy, no value might equal it, and the gradient
be 0 / 0. So the ops that only select or move what an equality reads keep fp32; it reads what
was stored.
"""

from __future__ import annotations

from typing import Final

from finecast.graph import Graph, Node
from finecast.ops import by_name
from finecast.rules.base import KEEP, Context, Rule, Ruling

_COMPARISONS: Final = frozenset({"equal", "not_equal"})
# They select where their reduction does; whether it does is the frontend's to know.
_SELECTIONS: Final = frozenset({"reduce_max", "reduce_min", "scatter_elements"})


def _judge(node: Node, context: Context) -> Ruling | None:
    comparison = context.graph.once(_compared).get(node.id)
    if comparison is None:
        return None
    name = context.graph.nodes[comparison].name
    return Ruling(
        permits=KEEP,
        text=f"{name} compares what it selects for equality: rounded, no value need be equal",
    )


def _compared(graph: Graph) -> dict[int, int]:
    """By the id of each comparison, and of what selects for one, the comparison's id."""
    found: dict[int, int] = {}
    for node in graph.float_nodes:
        if node.op in _COMPARISONS:
            found[node.id] = node.id
            _go_back(graph, node, found)
    return found


def _go_back(graph: Graph, comparison: Node, found: dict[int, int]) -> None:
    waiting = [comparison]
    while waiting:
        for value in graph.following_inputs(waiting.pop()):
            maker = None if value.producer is None else graph.nodes[value.producer]
            if maker is None or maker.format is None or maker.id in found:
                continue
            if by_name(maker.op).exact or maker.op in _SELECTIONS:
                found[maker.id] = comparison.id
                waiting.append(maker)


EQUALITY = Rule(name="equality", judge=_judge)
