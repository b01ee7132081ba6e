"""Comparisons for equality: both sides have to be rounded alike, so they stay fp32.

The gradient of a maximum is distributed over the elements equal to it: ``x == x.amax()``. If
the maximum were taken from a rounded copy, no element might equal it, and the gradient would
be 0 / 0. So the ops that only select or move what a comparison reads keep fp32, and it reads
numbers as they were stored.
"""

from __future__ import annotations

from typing import Final

from finecast.graph import Graph, Node
from finecast.ops import by_name
from finecast.rules.base import KEEP, Context, Rule, Ruling

_COMPARISONS: Final = frozenset({"equal", "not_equal"})
# Ops whose results are some of their operands' elements (scatter_elements: by its reduction).
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
    """The comparison's id by its own id and by the ids of ops that select for it."""
    found: dict[int, int] = {}
    for comparison in (n for n in graph.float_nodes if n.op in _COMPARISONS):
        found[comparison.id] = comparison.id
        waiting = [comparison]
        while waiting:
            for value in graph.following_inputs(waiting.pop()):
                maker = graph.maker(value)
                if maker is None or maker.format is None or maker.id in found:
                    continue
                if by_name(maker.op).exact or maker.op in _SELECTIONS:
                    found[maker.id] = comparison.id
                    waiting.append(maker)
    return found


EQUALITY = Rule(name="equality", judge=_judge)
