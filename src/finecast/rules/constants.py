"""Constants that the low format cannot hold: -3.4e38 masks, 1e-12 epsilons, huge scales.

A value that becomes infinite, or that vanishes, changes what the op computes; such an op
keeps fp32 rather than a clamped constant (clamping a mask to -1e4 changes predictions).
"""

from __future__ import annotations

from finecast.graph import Node
from finecast.rounding import overflow_limit
from finecast.rules.base import KEEP, Context, Rule, Verdict

# A weight matrix may hold a few tiny elements that vanish without harm; a scalar may not.
_FEW = 16


def _judge(node: Node, context: Context) -> Verdict | None:
    low = context.low
    for value in context.graph.following_inputs(node):
        constant = value.constant
        if constant is None or constant.size == 0:
            continue
        if constant.largest >= overflow_limit(low):
            return Verdict(
                permits=KEEP,
                text=f"constant {value.name} is beyond the largest {low.label}",
                evidence={"largest": constant.largest, "limit": low.max},
            )
        small = constant.smallest_nonzero if constant.size <= _FEW else 0.0
        if 0 < small < low.smallest_normal:
            return Verdict(
                permits=KEEP,
                text=f"constant {value.name} is below the normal range of {low.label}",
                evidence={"smallest": small, "limit": low.smallest_normal},
            )
    return None


CONSTANTS = Rule(name="constants", judge=_judge)
