"""What is known of the op's numerics before anything is measured."""

from __future__ import annotations

from finecast.graph import Node
from finecast.ops import Tier, by_name
from finecast.rules.base import KEEP, Context, Rule, Ruling
from finecast.rules.policy import Scope


def _judge(node: Node, context: Context) -> Ruling | None:
    info = by_name(node.op)
    if info.tier is Tier.NEVER:
        what = "an op that is not known here" if info.name == "unknown" else f"{info.name}"
        return Ruling(permits=KEEP, text=f"{what} keeps its type")
    if info.tier is not Tier.SENSITIVE or context.policy.scope is not Scope.AUTO:
        return None
    if context.measured:
        return None  # the op's error on real data decides, not its reputation
    return Ruling(
        permits=KEEP, text=f"{info.name} loses digits or range, and nothing was measured"
    )


TIER = Rule(name="tier", judge=_judge)
