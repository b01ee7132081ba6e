"""What assignments of two formats cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from finecast.solver.assignment import Bools, Problem, chain_profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An assignment and what it costs; ``casts`` counts the casts that take time."""

    low: Bools
    time_s: float
    error: float
    casts: int


def evaluate(problem: Problem, low: Bools) -> Solution:
    """The cost of an assignment; a format that is not permitted takes infinite time."""
    profile = chain_profile(problem, np.where(low, 0, 1), 1)
    (time_s,), (error,), (casts,) = profile.time_s, profile.error, profile.casts
    return Solution(low=low, time_s=float(time_s), error=float(error), casts=int(casts))
