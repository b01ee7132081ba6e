"""Long sums outside the matmul engine: reduction depth times unit roundoff.

The matmul engine accumulates in fp32, other reductions may not. Summing n terms in a format
with unit roundoff u has a relative error of up to n*u (Higham, Accuracy and Stability of
Numerical Algorithms, section 4.2). From 1 on that guarantees no digit.
"""

from __future__ import annotations

import math

from finecast.graph import Node
from finecast.ops import OpKind, by_name
from finecast.rules.base import KEEP, Context, Rule, Ruling

_REDUCTIONS = frozenset({OpKind.REDUCTION, OpKind.LOSS})


def _judge(node: Node, context: Context) -> Ruling | None:
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


DEPTH = Rule(name="reduction_depth", judge=_judge)
