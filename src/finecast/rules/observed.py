"""What was observed on data against the format's range."""

from __future__ import annotations

from finecast.formats import Format
from finecast.graph import Node
from finecast.rounding import overflow_limit
from finecast.rules.base import KEEP, Context, Rule, Verdict

# Where more than half of what is nonzero would become subnormal or zero, the format's
# digits are gone for most of the value: its error is no longer bounded by epsilon.
_UNDERFLOW_SHARE = 0.5
# Data seen later may be larger than the calibration data. Formats with fp32's exponent
# range need no room: fp32 itself has none more.
_HEADROOM = 2.0


def range_limit(fmt: Format) -> float:
    """Largest magnitude that may be observed of a value stored in ``fmt``."""
    if fmt.exponent_bits == Format.FP32.exponent_bits:
        return overflow_limit(fmt)
    return fmt.max / _HEADROOM


def _judge(node: Node, context: Context) -> Verdict | None:
    graph, low = context.graph, context.low
    for value in (*graph.following_inputs(node), *graph.following_outputs(node)):
        facts = context.facts.get(value.id)
        if facts is None:
            continue
        if facts.largest >= range_limit(low):
            return Verdict(
                permits=KEEP,
                text=f"{value.name} comes too close to the largest {low.label}",
                evidence={"largest": facts.largest, "limit": range_limit(low)},
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
