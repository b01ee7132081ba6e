"""With which probability a plan keeps the decisions on the data at hand.

A decision changes if a plan moves its margin across 0. How far plans move margins is known of
those that were tried. Plans with large parts of their errors in common move margins alike,
and others by chance. For each sample the move over the plan's error is a Gaussian process
over plans, with one covariance for all samples. So a plan that changes a decision tells that
its neighbours change it, too, and that a plan of other parts may not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from finecast.solver.assignment import Bools, Floats


@dataclass(slots=True, kw_only=True)
class DecisionChances:
    """The decisions of one evaluation set.

    Attributes:
        exact: float64[n], the margins of fp32; negative where it is wrong.
        may_lose: How many right decisions may be lost.
        unexplained: The share of a move's variance that no part of a plan explains.
    """

    exact: Floats
    may_lose: float
    unexplained: float
    _parts: list[Floats] = field(init=False, default_factory=list[Floats])
    _moves: list[Floats] = field(init=False, default_factory=list[Floats])
    _open: Bools = field(init=False)
    _margins: Floats = field(init=False)

    def __post_init__(self) -> None:
        """Leave out samples whose decision cannot change."""
        self._open = np.isfinite(self.exact)
        self._margins = self.exact[self._open]

    @property
    def are_known(self) -> bool:
        """Whether any plan was tried."""
        return bool(self._moves)

    def tried(self, parts: Floats, error: float, margins: Floats) -> None:
        """Take the margins under a plan of this relative error.

        ``parts`` are the features of its error, of length 1.
        """
        low = margins[self._open]
        moves = np.where(np.isfinite(low), low - self._margins, 0.0)
        self._parts.append(parts)
        self._moves.append(moves / error)

    def passes(self, parts: Floats, errors: Floats) -> Floats:
        """The probability of each plan, float64[m], not to lose more than may be.

        Args:
            parts: float64[m, k], the features of the plans' errors, of length 1 each.
            errors: float64[m], their relative errors.
        """
        seen, moves = np.array(self._parts), np.array(self._moves)
        among = seen @ seen.T + self.unexplained * np.eye(len(seen))
        to = seen @ parts.T
        weights = np.linalg.solve(among, to)
        left = np.clip(1 - (to * weights).sum(axis=0), self.unexplained, 1.0)
        size = np.sqrt((moves**2).mean())
        draws = 128  # a chance is then known to 4%
        drawn = np.random.default_rng(0).standard_normal((draws, len(self._margins)))
        chances = np.empty(len(errors))
        for plan, error in enumerate(errors):
            expected = error * (weights[:, plan] @ moves)
            off = error * size * np.sqrt(left[plan])
            # Of margins beyond four deviations one in 30,000 is moved across 0.
            near = np.abs(self._margins) < np.abs(expected) + 4 * off
            still = self._margins[near]
            moved = still + expected[near] + off * drawn[:, near]
            lost = (still > 0).sum() - (moved > 0).sum(axis=1)
            chances[plan] = (np.count_nonzero(lost <= self.may_lose) + 0.5) / (draws + 1)
        return chances
