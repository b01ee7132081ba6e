"""The last race of a search: between the plan found and those that may be better.

The first race, of all plans, tells times to some percent only, and the fastest of many plans
is the fastest partly by chance. What one race says of two plans that differ by about 3% may
differ in the next. So here a more accurate plan counts as equally fast until it is known to
be more than 3% slower, and two runs of one search agree. Errors are measured, too: predicted
ones may put two nearly equal plans in the wrong order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from finecast.measure.racing import Race
from finecast.pipeline.measuring import Measurements
from finecast.pipeline.search import SAME_TIME, Candidate, chain
from finecast.pipeline.trials import Trials
from finecast.planning.plan import Plan

# The most races. Each takes seconds; if the plans of so many were not faster after all, the
# others hardly are.
_MOST: Final = 4
# Measured errors within 5% are those of other data in another order.
_FINER: Final = 0.9
# A plan whose median is slower by this ratio does not count as equally fast, however busy
# the machine and uncertain the median. Of two plans 1.5% apart the medians were up to 5.5%
# apart beside four other processes.
_SLOWER: Final = 1.1


def last_race(
    found: Candidate,
    candidates: Sequence[Candidate],
    *,
    fp32: float,
    trials: Trials,
    evaluate: Callable[[Plan], float],
    race: Callable[[Sequence[Candidate]], Measurements],
    error: Callable[[Candidate], float],
) -> tuple[Candidate, Measurements]:
    """The best plan, and the measurements of the race that tells its speed.

    Where no plan that raced gains what is asked for, the search goes on among the others.

    Args:
        found: The plan that the search found.
        candidates: All plans whose models are loaded, with their costs in the first races.
        fp32: The cost of the fp32 model in those races.
        trials: What was evaluated.
        evaluate: Gives the metric of a plan.
        race: Races some of ``candidates`` beside fp32 until their speeds are known.
        error: Measures the squared output error of a plan.
    """
    least = trials.budget.goal.min_speedup
    left = list(candidates)
    races = 0
    while True:
        races += 1
        racing = [found, *trials.rivals([c for c in left if c is not found], found)]
        measurements = race(racing)
        costs, raced = measurements.costs, {c.plan.digest for c in racing}
        known = [
            replace(c, cost=fp32 * costs.slowdown(c.plan.digest).median, error=error(c))
            for c in racing
            if racing[1:] and c.plan.digest in costs.names
        ]
        same = partial(_same_time, costs)
        chained = chain(known, fp32, least, same, _FINER)
        best = trials.search(chained, evaluate, same) if racing[1:] else None
        best = _as_predicted(best, racing) if best else found
        left = [c for c in left if c.plan.digest not in raced]
        if costs.speed(best.plan.digest).median >= least or races == _MOST:
            return best, measurements
        following = trials.search(chain(left, fp32, least), evaluate)
        if following is None:
            return best, measurements
        found = following


def _as_predicted(best: Candidate, racing: Sequence[Candidate]) -> Candidate:
    """``best`` with its predicted error instead of the measured one."""
    digest = best.plan.digest
    return replace(best, error=next(c.error for c in racing if c.plan.digest == digest))


def _same_time(costs: Race, fast: Candidate, other: Candidate) -> bool:
    """Whether ``other`` is not known to be more than ``SAME_TIME`` slower than ``fast``."""
    slower = costs.between(other.plan.digest, fast.plan.digest)
    return slower.low <= SAME_TIME and slower.median <= _SLOWER
