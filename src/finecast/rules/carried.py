"""Values that contain a constant beyond the low format's range, such as a masked tensor.

An op that adds or selects -3.4e38 keeps fp32 because of its constant. Its result contains that
number: stored in fp16 it is -Inf, and a softmax over a row of nothing else gives NaN, where
fp32 gives equal shares. So the readers of such a value keep fp32 as well, up to the first op
that does not pass large magnitudes on.
"""

from __future__ import annotations

from typing import Final

from finecast.graph import Graph, Node
from finecast.numbers.formats import Format
from finecast.numbers.rounding import overflow_limit
from finecast.ops import OpKind, by_name
from finecast.rules.base import KEEP, Context, Rule, Ruling
from finecast.rules.constants import scalars

_KINDS: Final = frozenset({OpKind.MOVEMENT, OpKind.RELAYOUT, OpKind.CONSTANT})
_OPS: Final = frozenset({"add", "sub", "mul", "sum", "neg", "abs", "where", "cast", "phi"})


def _judge(node: Node, context: Context) -> Ruling | None:
    carrying = context.graph.once(_carrying, context.low)
    if not carrying:
        return None
    for value in context.graph.following_inputs(node):
        if value.id in carrying and value.id not in context.facts:
            return Ruling(
                permits=KEEP,
                text=f"{value.name} carries a constant beyond the largest {context.low.label}",
                evidence={"limit": context.low.max},
            )
    return None


def _carrying(graph: Graph, low: Format) -> frozenset[int]:
    """Ids of the values, without the constants themselves, that such a constant reaches."""
    limit = overflow_limit(low)
    sources = {
        v.id
        for v in graph.values
        if v.format is Format.FP32 and v.constant is not None and v.constant.largest >= limit
    }
    # Results of ops that have such a number as a scalar attribute.
    brought = {
        v.id
        for node in graph.float_nodes
        if any(abs(number) >= limit for number in scalars(node))
        for v in graph.following_outputs(node)
        if _hands_on(node)
    }
    if not sources and not brought:
        return frozenset()
    reached = sources | brought
    waiting = [n for i in reached for n in graph.values[i].uses]
    while waiting:
        node = graph.nodes[waiting.pop()]
        if not _hands_on(node):
            continue
        if not any(v.id in reached for v in graph.following_inputs(node)):
            continue
        for value in graph.following_outputs(node):
            if value.id not in reached:
                reached.add(value.id)
                waiting.extend(value.uses)
    return frozenset(reached - sources)


def _hands_on(node: Node) -> bool:
    return by_name(node.op).kind in _KINDS or node.op in _OPS


CARRIED = Rule(name="carried_constants", judge=_judge)
