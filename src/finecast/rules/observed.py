"""What was observed on data against the format's range."""

from __future__ import annotations

from finecast.graph import Node
from finecast.rules.base import KEEP, Context, Rule, Verdict

# Where more than half of what is nonzero would become subnormal or zero, the format's
# digits are gone for most of the value: its error is no longer bounded by epsilon.
_UNDERFLOW_SHARE = 0.5


def _judge(node: Node, context: Context) -> Verdict | None:
    graph, low = context.graph, context.low
    for value in (*graph.following_inputs(node), *graph.following_outputs(node)):
        facts = context.facts.get(value.id)
        if facts is None:
            continue
        if facts.overflows(low):
            return Verdict(
                permits=KEEP,
                text=f"{value.name} overflows {low.label}",
                evidence={"largest": facts.largest, "limit": low.max},
            )
        nonzero = facts.count - facts.zeros
        lost = facts.flushed_share(low) * facts.count
        if nonzero and lost / nonzero > _UNDERFLOW_SHARE:
            return Verdict(
                permits=KEEP,
                text=f"most of {value.name} vanishes in {low.label}",
                evidence={"share": lost / nonzero, "limit": low.smallest_subnormal},
            )
    return None


OBSERVED = Rule(name="observed_range", judge=_judge)
