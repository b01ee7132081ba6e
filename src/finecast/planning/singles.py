"""Plans that differ from a given plan in one unit, those nearest to their thresholds first.

A unit's threshold is the price of error at which the optimal plan changes its format.
Predicted errors are sums over units, measured on calibration data; the metric may judge
otherwise, and then one unit more or less can decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from finecast.planning.alternatives import labels_of
from finecast.planning.choices import Choice, Proposal
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, build_problem
from finecast.planning.proposing import proposal
from finecast.solver.assignment import Floats, Ints
from finecast.solver.flips import Flips, flips
from finecast.solver.labelling import LabelProblem, evaluate

_MOST: Final = 6


def lowered_by_one(
    planner: Planner, analysis: Analysis, plan: Plan, *, most: int = _MOST
) -> list[Proposal]:
    """Faster plans with one unit changed, those that gain most time per added error first."""
    stated = _Stated.of(planner, analysis, plan)
    gained_s, added = -stated.flips.total_s, stated.flips.error
    faster = np.argwhere(gained_s > 0)
    gains = _ratio(gained_s, added)[*faster.T]
    found = faster[np.argsort(-gains, kind="stable")[:most]]
    return stated.proposals(planner, analysis, found, "with one more unit low")


def raised_by_one(
    planner: Planner, analysis: Analysis, plan: Plan, *, most: int = _MOST
) -> list[Proposal]:
    """More accurate plans with one unit changed, least time lost per removed error first."""
    stated = _Stated.of(planner, analysis, plan)
    lost_s, removed = stated.flips.total_s, -stated.flips.error
    others_low = np.count_nonzero(stated.label) - (stated.label > 0)
    lowers = (others_low[:, None] > 0) | (np.arange(stated.problem.labels) > 0)
    exact = np.argwhere((removed > 0) & np.isfinite(lost_s) & lowers)
    losses = _ratio(lost_s, removed)[*exact.T]
    found = exact[np.argsort(losses, kind="stable")[:most]]
    return stated.proposals(planner, analysis, found, "with one unit less low")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stated:
    """A plan as a labelling of the problem, and what each change of one unit makes of it."""

    problem: LabelProblem
    label: Ints
    flips: Flips

    @classmethod
    def of(cls, planner: Planner, analysis: Analysis, plan: Plan) -> _Stated:
        problem = build_problem(planner.graph, planner.permissions, analysis)
        label = labels_of(planner, analysis, problem, plan)
        return cls(problem=problem, label=label, flips=flips(problem, label))

    def proposals(
        self, planner: Planner, analysis: Analysis, found: Ints, how: str
    ) -> list[Proposal]:
        made: list[Proposal] = []
        for unit, label in found:
            changed = self.label.copy()
            changed[unit] = label
            choice = Choice.of(
                evaluate(self.problem, changed), self.problem, changed, analysis
            )
            name = f"{how}, error {math.sqrt(choice.error):.3g}"
            made.append(proposal(planner, analysis, choice, name))
        return made


def _ratio(time_s: Floats, error: Floats) -> Floats:
    """Seconds per squared error; infinite where the error is not positive."""
    return np.divide(time_s, error, out=np.full(error.shape, np.inf), where=error > 0)
