"""Divisions guarded by a tiny constant: ``x / max(norm, 1e-12)``, ``rsqrt(mean + 1e-8)``.

The rule ``constants`` keeps the op with the constant in fp32. But its result would still
become 0 when it is cast for a low division: where the norm is 0, fp32 gives 0 and fp16 NaN.
So the division and all ops between it and the constant keep fp32.
"""

from __future__ import annotations

from finecast.graph import Graph, Node
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.rules.base import KEEP, Context, Rule, Ruling
from finecast.rules.constants import DIVISORS, first_problem


def _judge(node: Node, context: Context) -> Ruling | None:
    guard = context.graph.once(_guarded, context.low).get(node.id)
    if guard is None:
        return None
    return Ruling(
        permits=KEEP,
        text=f"{context.graph.nodes[guard].name} keeps a divisor from 0 by a constant below "
        f"the normal range of {context.low.label}",
        evidence={"limit": context.low.smallest_normal},
    )


def _guarded(graph: Graph, low: Format) -> dict[int, int]:
    """By node id, for guarded divisions and ops in front of them, the constant's node."""
    found: dict[int, int] = {}
    for node in graph.float_nodes:
        port = DIVISORS.get(node.op)
        if port is not None and port < len(node.inputs):
            path, guard = _way_back(graph, node.inputs[port], low)
            if guard is not None:
                found.update(dict.fromkeys((node.id, *path), guard))
    return found


def _way_back(graph: Graph, value: int | None, low: Format) -> tuple[list[int], int | None]:
    """The nodes in front of ``value`` that move numbers or take roots, and the guard's node.

    The guard is None if the way back ends at no op with a tiny constant.
    """
    path: list[int] = []
    while value is not None and (producer := graph.values[value].producer) is not None:
        node = graph.nodes[producer]
        problem = first_problem(graph, node, low)
        if problem is not None and problem[1].what == "smallest":
            return path, node.id
        floats = [v.id for v in graph.following_inputs(node)]
        if not (by_name(node.op).exact or node.op == "sqrt") or len(floats) != 1:
            break
        path.append(node.id)
        value = floats[0]
    return path, None


GUARDED = Rule(name="guarded_division", judge=_judge)
