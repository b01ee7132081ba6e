"""Which plans to evaluate on all data, and in which order.

Candidates that another one beats in both time and predicted error are not tried. What is
left is a chain: faster means less accurate. The fastest is evaluated first; if it misses
the criterion, bisection finds the fastest one that meets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from finecast.planning.plan import Plan

# Of plans within this ratio of one another the most accurate is taken.
SAME_TIME: Final = 1.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan, its predicted squared output error, and its measured latency."""

    name: str
    plan: Plan
    error: float
    latency_s: float
    casts: int


def chain(candidates: Sequence[Candidate], baseline_s: float) -> list[Candidate]:
    """Candidates faster than the baseline that no other one beats, fastest first."""
    kept: list[Candidate] = []
    since = 0.0  # latency of the first candidate that the last one kept stands for
    for one in sorted(candidates, key=lambda c: (c.latency_s, c.error)):
        if one.latency_s * SAME_TIME >= baseline_s:
            continue
        if kept and one.error >= kept[-1].error:
            continue
        # As fast as the one before and more accurate: the one before has nothing to offer.
        if kept and one.latency_s <= since * SAME_TIME:
            kept[-1] = one
            continue
        since = one.latency_s
        kept.append(one)
    return kept


def fastest_passing(
    chained: Sequence[Candidate], passes: Callable[[Candidate], bool]
) -> Candidate | None:
    """The fastest candidate that passes, if passing is monotone along the chain.

    Evaluates at most 1 + ceil(log2(n)) candidates; every returned one was evaluated. None
    says of those that were evaluated that they fail, and nothing of the others.
    """
    if not chained:
        return None
    if passes(chained[0]):
        return chained[0]
    found: Candidate | None = None
    low, high = 1, len(chained) - 1
    while low <= high:
        middle = (low + high) // 2
        if passes(chained[middle]):
            found, high = chained[middle], middle - 1
        else:
            low = middle + 1
    return found


def none_passes(tried: int, proposed: int, target: float, *, reused: int = 0) -> str:
    """What may be said where ``fastest_passing`` found nothing.

    Args:
        tried: Plans that were evaluated.
        proposed: Plans there were: most are not evaluated, as they are not fast or, by their
            predicted errors, not accurate enough.
        target: The metric to keep.
        reused: Of the trials, those that an earlier run made.
    """
    plans = "the one plan" if tried == 1 else f"none of the {tried} plans"
    misses = "misses" if tried == 1 else "keeps"
    told = f" ({reused} remembered by the study)" if reused else ""
    why = f"{plans} tried{told} {misses} the criterion (target {target:.6g})"
    rest = proposed - tried
    if rest > 0:
        why += f"; {rest} more were not tried: by time and predicted error they promised less"
    return why
