"""Observed values have to fit the format's range: none too large, few that become 0."""

from __future__ import annotations

from finecast.graph import Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.numbers.rounding import overflow_limit
from finecast.ops import by_name
from finecast.rules.base import ANY, KEEP, Context, Rule, Ruling
from finecast.rules.constants import DIVISORS
from finecast.rules.saturation import absorbing

# If more than half of the nonzero numbers become 0, the relative error of most of the value
# is no longer bounded by the format's epsilon.
_UNDERFLOW_SHARE = 0.5
# Later data may be larger than the calibration data. Formats with fp32's exponent range need
# no headroom: fp32 itself would overflow as early.
_HEADROOM = 2.0


def range_limit(fmt: Format) -> float:
    """The magnitude from which on a value is too large to be stored in ``fmt``."""
    return fmt.max / _HEADROOM if fmt.has_less_range else overflow_limit(fmt)


def divided_by(graph: Graph, value: Value) -> Node | None:
    """An op that divides by ``value``, or by a value that is only moved from it; else None."""
    waiting, seen = [value], {value.id}
    while waiting:
        at = waiting.pop()
        for node in graph.readers(at):
            port = DIVISORS.get(node.op)
            if port is not None and port < len(node.inputs) and node.inputs[port] == at.id:
                return node
            if by_name(node.op).exact and at in graph.following_inputs(node):
                moved = [v for v in graph.following_outputs(node) if v.id not in seen]
                seen.update(v.id for v in moved)
                waiting += moved
    return None


def _judge(node: Node, context: Context) -> Ruling | None:
    graph, low = context.graph, context.low
    harmless: Ruling | None = None
    for value in (*graph.following_inputs(node), *graph.following_outputs(node)):
        facts = context.facts.get(value.id)
        if facts is None:
            continue
        if facts.largest >= range_limit(low):
            absorbs = absorbing(graph, context.facts, value, low)
            evidence = {"largest": facts.largest, "limit": range_limit(low)}
            if absorbs is not None:
                text = (
                    f"{value.name} may overflow in {low.label}: {absorbs.name} saturates first"
                )
                harmless = Ruling(permits=ANY, text=text, evidence=evidence)
                continue
            return Ruling(
                permits=KEEP,
                text=f"{value.name} comes too close to the largest {low.label}",
                evidence=evidence,
            )
        share = facts.flushed_share(low)
        divides = divided_by(graph, value) if share else None
        if divides is not None:
            return Ruling(
                permits=KEEP,
                text=f"some of {value.name} becomes 0 in {low.label}, and {divides.name} "
                "divides by it",
                evidence={"share": share, "limit": low.smallest_subnormal},
            )
        nonzero = facts.count - facts.zeros
        lost = share * facts.count
        if nonzero and lost / nonzero > _UNDERFLOW_SHARE:
            return Ruling(
                permits=KEEP,
                text=f"most of {value.name} vanishes in {low.label}",
                evidence={"share": lost / nonzero, "limit": low.smallest_subnormal},
            )
    return harmless


OBSERVED = Rule(name="observed_range", judge=_judge)
