"""The last race of a search: between the plan found and those that may be better.

A first race of all tells times to some percent, and the fastest of many is partly so by
chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from finecast.pipeline.measuring import Standing
from finecast.pipeline.search import Candidate, chain
from finecast.pipeline.trials import Trials
from finecast.planning.plan import Plan

# Each takes seconds: where so many plans were not faster after all, the others hardly are.
_MOST: Final = 4


def last_race(
    found: Candidate,
    candidates: Sequence[Candidate],
    *,
    fp32: float,
    trials: Trials,
    measure: Callable[[Plan], float],
    race: Callable[[Sequence[Candidate]], Standing],
) -> tuple[Candidate, Standing]:
    """The best plan, and the race that tells its speed.

    Where nothing that raced gains what is asked for, the search goes on among the others.

    Args:
        found: What passed.
        candidates: What there is, by costs that the first races told.
        fp32: The cost of the fp32 model in those.
        trials: What was evaluated.
        measure: The metric of a plan.
        race: Races some of ``candidates`` beside fp32 until their speeds are known.
    """
    least = trials.budget.goal.min_speedup
    left = list(candidates)
    races = 0
    while True:
        races += 1
        racing = [found, *trials.rivals([c for c in left if c is not found], found)]
        standing = race(racing)
        costs, raced = standing.costs, {c.plan.digest for c in racing}
        known = [
            replace(c, cost=fp32 * costs.slowdown(c.plan.digest).median)
            for c in racing
            if c.plan.digest in costs.names
        ]
        best = trials.search(chain(known, fp32, least), measure) if racing[1:] else None
        best = best or found
        left = [c for c in left if c.plan.digest not in raced]
        if costs.speed(best.plan.digest).median >= least or races == _MOST:
            return best, standing
        following = trials.search(chain(left, fp32, least), measure)
        if following is None:
            return best, standing
        found = following
