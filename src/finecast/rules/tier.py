"""What is known of an op's numerics before anything is measured: its tier, and long sums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

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
# Norms and pools that sum powers, and the axes of those whose results have the size of their
# operands, by default. Other norms keep their statistics in fp32 by definition, or in the
# kernels that engines have for them.
_POWER_SUMS: Mapping[str, tuple[int, ...]] = {
    "lp_norm": (-1,),
    "lp_pool": (),
    "global_lp_pool": (),
}


def _judge_depth(node: Node, context: Context) -> Ruling | None:
    """Long sums outside the matmul engine: reduction depth times unit roundoff.

    The matmul engine accumulates in fp32, other reductions may not. Summing n terms in a
    format with unit roundoff u has a relative error of up to n*u (Higham, Accuracy and
    Stability of Numerical Algorithms, section 4.2). From 1 on that guarantees no digit.
    """
    info = by_name(node.op)
    sums = info.kind in _REDUCTIONS or node.op in _POWER_SUMS
    if not info.accumulates or not sums or context.measured:
        return None
    depth = max(_depth(node, context), _normalized(node, context))
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


def _normalized(node: Node, context: Context) -> int:
    """Number of elements that each number of a norm's result depends on; 0 for other ops."""
    of, source = _POWER_SUMS.get(node.op, ()), node.inputs[0]
    facts = None if source is None else context.facts.get(source)
    value = None if source is None else context.graph.values[source]
    shape = (facts.shape if facts else value.shape if value else None) or ()
    axes: Any = node.attributes.get("axes", node.attributes.get("axis", of))
    if len(node.inputs) > 1 and node.inputs[1] is not None:  # OpenVINO's norms read them
        constant = context.graph.values[node.inputs[1]].constant
        axes = () if constant is None else constant.read().reshape(-1).tolist()
    axes = (axes,) if isinstance(axes, int) else axes
    sizes = [shape[a] for a in axes if of and -len(shape) <= a < len(shape)]
    return math.prod(s for s in sizes if isinstance(s, int)) if sizes else 0


DEPTH = Rule(name="reduction_depth", judge=_judge_depth)
