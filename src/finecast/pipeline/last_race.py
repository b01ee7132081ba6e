"""The last race of a search: between the plan found and those that may be better.

The first race, of all plans, tells times to some percent only, and the fastest of many plans
is the fastest partly by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from finecast.pipeline.measuring import Measurements
from finecast.pipeline.search import Candidate, chain
from finecast.pipeline.trials import Trials
from finecast.planning.plan import Plan

# The most races. Each takes seconds; if the plans of so many were not faster after all, the
# others hardly are.
_MOST: Final = 4


def last_race(
    found: Candidate,
    candidates: Sequence[Candidate],
    *,
    fp32: float,
    trials: Trials,
    evaluate: Callable[[Plan], float],
    race: Callable[[Sequence[Candidate]], Measurements],
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
            replace(c, cost=fp32 * costs.slowdown(c.plan.digest).median)
            for c in racing
            if c.plan.digest in costs.names
        ]
        best = trials.search(chain(known, fp32, least), evaluate) if racing[1:] else None
        best = best or found
        left = [c for c in left if c.plan.digest not in raced]
        if costs.speed(best.plan.digest).median >= least or races == _MOST:
            return best, measurements
        following = trials.search(chain(left, fp32, least), evaluate)
        if following is None:
            return best, measurements
        found = following
