"""Which plans to evaluate on all data, and in which order.

Candidates that another one beats in both cost and predicted error are not tried. What is
left is a chain: faster means less accurate. Faster stands for less of the cost: a latency, a
time under load, or bytes. The fastest is evaluated first; if it misses the criterion,
bisection finds the fastest one that meets it. Of those that are as fast, within 3%, the most
accurate is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from finecast.pipeline.goal import MIN_SPEEDUP
from finecast.planning.choices import Proposal
from finecast.planning.plan import Plan

SAME_TIME: Final = 1.03
"""Of plans within this ratio of one another the most accurate is taken."""
# More evaluations than halving takes: where a search is aimed it mostly takes fewer.
_SPARE: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan, its predicted squared output error, and its measured latency.

    ``cost`` is what the search makes least of: the latency, or what else was asked for. It is
    known to a share ``spread`` of itself.
    """

    name: str
    plan: Plan
    error: float
    cost: float
    latency_s: float
    casts: int
    spread: float = 0.0

    @property
    def least(self) -> float:
        """The cost that it may have at least."""
        return self.cost * (1 - self.spread)

    @property
    def most(self) -> float:
        """The cost that it may have at most."""
        return self.cost * (1 + self.spread)


def worth_timing(
    proposals: Sequence[Proposal], min_speedup: float = MIN_SPEEDUP
) -> list[Proposal]:
    """Those that are predicted to gain at least half of what is asked for.

    Each of the others would cost a conversion, a load and its share of the rounds, and
    predictions are not that far off.

    Args:
        proposals: Of a frontier; the slowest one changes least.
        min_speedup: What is asked for.
    """
    exact_s = max((p.time_s for p in proposals), default=0.0)
    least = (1 + min_speedup) / 2
    return [p for p in proposals if p.time_s * least <= exact_s]


def chain(
    candidates: Sequence[Candidate], baseline: float, min_speedup: float = MIN_SPEEDUP
) -> list[Candidate]:
    """Candidates of less cost than the baseline that no other one beats, fastest first."""
    kept: list[Candidate] = []
    since = 0.0  # cost of the first candidate that the last one kept stands for
    for one in sorted(candidates, key=lambda c: (c.cost, c.error)):
        if one.cost * min_speedup >= baseline:
            continue
        if kept and one.error >= kept[-1].error:
            continue
        # As fast as the one before and more accurate: the one before has nothing to offer.
        if kept and one.cost <= since * SAME_TIME:
            kept[-1] = one
            continue
        since = one.cost
        kept.append(one)
    return kept


def fastest_passing(
    chained: Sequence[Candidate],
    passes: Callable[[Candidate], bool],
    may_try: Callable[[Candidate], bool] = lambda _: True,
    aim: Callable[[Sequence[Candidate]], int | None] = lambda _: None,
) -> Candidate | None:
    """The fastest candidate that passes, if passing is monotone along the chain.

    Law: of those within 3% of it that promise to be more accurate, the most accurate if it
    passes, too. Evaluates at most 2 + ceil(log2(n)) candidates, and two more where it is
    aimed; every returned one was evaluated. None says of those that were evaluated that they
    fail, of the others nothing.

    Args:
        chained: Fastest first, each more accurate than the one before.
        passes: Evaluates one.
        may_try: Asked before each evaluation: whether there is budget for it.
        aim: Where the fastest that passes is expected, if anything says so: it is looked for
            there first, as far as that takes at most two evaluations more than halving would.
    """
    found, passed = -1, set[int]()
    low, high, middle = 0, len(chained) - 1, aim(chained) or 0
    left = high.bit_length() + _SPARE  # evaluations that halving takes, after the first
    while low <= high and may_try(chained[middle]):
        if passes(chained[middle]):
            passed.add(middle)
            found, high = middle, middle - 1
        else:
            low = middle + 1
        aimed = aim(chained)
        middle = (low + high) // 2 if aimed is None else aimed
        left, reach = left - 1, (1 << max(left - 1, 0)) - 1
        middle = min(max(middle, low, high - reach), high, low + reach)
    if found < 0:
        return None
    limit = chained[found].cost * SAME_TIME
    near = max(i for i, c in enumerate(chained) if c.cost <= limit)
    if near in passed or (may_try(chained[near]) and passes(chained[near])):
        return chained[near]
    return chained[found]


def undecided(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other one surely beats in both cost and error."""
    return [
        one
        for one in candidates
        if not any(c.most < one.least and c.error <= one.error for c in candidates)
    ]


def rivals(
    candidates: Sequence[Candidate], fastest: Candidate, missed: float
) -> list[Candidate]:
    """Those that may be better than the ``fastest`` that passed, if costs were known better.

    They may be faster by more than matters, or as fast and more accurate. Of costs that are
    known there is none.

    Args:
        candidates: All that may be chosen.
        fastest: Of those that passed.
        missed: The least error of those that failed: who has as much is taken to fail.
    """
    found: list[Candidate] = []
    for one in candidates:
        if one is fastest or one.error >= missed:
            continue
        if one.error < fastest.error:
            is_open = one.cost > fastest.cost * SAME_TIME and (
                one.least <= fastest.most * SAME_TIME
            )
        else:
            is_open = one.cost * SAME_TIME >= fastest.cost and (
                one.least * SAME_TIME < fastest.most
            )
        if is_open:
            found.append(one)
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
    if not tried:
        return f"no plan was tried (target {target:.6g})"
    plans = "the one plan" if tried == 1 else f"none of the {tried} plans"
    misses = "misses" if tried == 1 else "keeps"
    told = f" ({reused} remembered by the study)" if reused else ""
    why = f"{plans} tried{told} {misses} the criterion (target {target:.6g})"
    rest = proposed - tried
    if rest > 0:
        why += f"; {rest} more were not tried: by time and predicted error they promised less"
    return why
