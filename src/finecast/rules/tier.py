"""The op's tier: what is known of its numerics before anything is measured."""

from __future__ import annotations

from finecast.graph import Graph, Node
from finecast.ops import Tier, by_name
from finecast.rules.base import KEEP, Context, Rule, Ruling
from finecast.rules.constants import DIVISORS, scalars
from finecast.rules.policy import Scope


def _judge(node: Node, context: Context) -> Ruling | None:
    info = by_name(node.op)
    if info.tier is Tier.NEVER:
        what = "an op that is not known here" if info.name == "unknown" else f"{info.name}"
        return Ruling(permits=KEEP, text=f"{what} keeps its type")
    if info.tier is not Tier.SENSITIVE or context.policy.scope is not Scope.AUTO:
        return None
    if context.measured:
        return None  # the op's error on real data decides
    if divides_by_constant(context.graph, node):
        return None  # as well-behaved as a multiplication by the reciprocal
    return Ruling(
        permits=KEEP, text=f"{info.name} loses digits or range, and nothing was measured"
    )


def divides_by_constant(graph: Graph, node: Node) -> bool:
    """Whether ``node`` is a division whose divisor is a constant: ``scores / 8``."""
    if node.op != "div":
        return False
    port = DIVISORS[node.op]
    if port >= len(node.inputs):
        return bool(scalars(node))
    divisor = node.inputs[port]
    return divisor is not None and graph.values[divisor].constant is not None


TIER = Rule(name="tier", judge=_judge)
