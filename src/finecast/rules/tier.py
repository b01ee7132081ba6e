"""What is known of an op's numerics before anything is measured: its tier, and long sums."""

from __future__ import annotations

import math

from finecast.graph import Graph, Node
from finecast.ops import OpKind, Tier, by_name
from finecast.rules.base import KEEP, Context, Rule, Ruling
from finecast.rules.constants import DIVISORS, scalars
from finecast.rules.policy import Scope


def _judge_tier(node: Node, context: Context) -> Ruling | None:
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


TIER = Rule(name="tier", judge=_judge_tier)


_REDUCTIONS = frozenset({OpKind.REDUCTION, OpKind.LOSS})


def _judge_depth(node: Node, context: Context) -> Ruling | None:
    """Long sums outside the matmul engine: reduction depth times unit roundoff.

    The matmul engine accumulates in fp32, other reductions may not. Summing n terms in a
    format with unit roundoff u has a relative error of up to n*u (Higham, Accuracy and
    Stability of Numerical Algorithms, section 4.2). From 1 on that guarantees no digit.
    """
    info = by_name(node.op)
    if not info.accumulates or info.kind not in _REDUCTIONS or context.measured:
        return None
    depth = _depth(node, context)
    bound = depth * context.low.unit_roundoff
    if bound < 1:
        return None
    return Ruling(
        permits=KEEP,
        text=f"sums {depth} terms: n*u of {context.low.label} is {bound:.3g}",
        evidence={"depth": depth, "unit_roundoff": context.low.unit_roundoff},
    )


def _depth(node: Node, context: Context) -> int:
    """Number of elements in each sum, from observed or declared shapes; 0 if unknown."""
    sizes: list[int] = []
    for index in (node.inputs[0], node.outputs[0]):
        if index is None:
            return 0
        facts = context.facts.get(index)
        shape = facts.shape if facts else context.graph.values[index].shape
        if shape is None or not all(isinstance(d, int) for d in shape):
            return 0
        sizes.append(math.prod(d for d in shape if isinstance(d, int)))
    return sizes[0] // max(sizes[1], 1)


DEPTH = Rule(name="reduction_depth", judge=_judge_depth)
