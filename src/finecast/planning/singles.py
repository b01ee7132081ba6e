"""Plans that differ from a given plan in one unit, those nearest to their thresholds first.

A unit's threshold is the price of error at which the optimal plan changes its format.
Predicted errors are sums over units, measured on calibration data; the metric may judge
otherwise, and then one unit more or less can decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from finecast.numbers.formats import Format
from finecast.planning.choices import Choice, Proposal
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, build_problem
from finecast.planning.proposing import proposal
from finecast.solver.assignment import Ints
from finecast.solver.labelling import Labelling, LabelProblem, evaluate

_MOST: Final = 6
# Evaluating one labelling takes time proportional to the number of all units.
_MOST_LOOKED_AT: Final = 256


def lowered_by_one(
    planner: Planner, analysis: Analysis, plan: Plan, *, most: int = _MOST
) -> list[Proposal]:
    """Faster plans with one unit changed, those that gain most time per added error first."""
    problem, at = _stated(planner, analysis, plan)
    faster = [one for one in _changed(problem, at) if one.time_s < at.time_s]
    faster.sort(key=lambda one: _price(one, at))
    return _proposals(planner, analysis, faster[-most:][::-1], "with one more unit low")


def raised_by_one(
    planner: Planner, analysis: Analysis, plan: Plan, *, most: int = _MOST
) -> list[Proposal]:
    """More accurate plans with one unit changed, least time lost per removed error first."""
    problem, at = _stated(planner, analysis, plan)
    exact = [one for one in _changed(problem, at) if one.error < at.error and one.label.any()]
    exact.sort(key=lambda one: _price(at, one))
    return _proposals(planner, analysis, exact[:most], "with one unit less low")


def _stated(
    planner: Planner, analysis: Analysis, plan: Plan
) -> tuple[LabelProblem, Labelling]:
    problem = build_problem(planner.graph, planner.permissions, analysis)
    numbers = {fmt: number for number, fmt in enumerate(analysis.times)}
    formats, nodes = plan.formats, planner.graph.nodes
    # A plan of an engine's hint may lower a unit in part: its lowest format counts.
    label = [
        max(numbers.get(formats.get(nodes[n].name, Format.FP32), 0) for n in members)
        for members in analysis.units.members
    ]
    return problem, evaluate(problem, np.array(label, dtype=np.int64))


def _changed(problem: LabelProblem, at: Labelling) -> Iterator[Labelling]:
    """Permitted labellings that differ in one unit, the largest change of its time first."""
    own = problem.time[np.arange(len(at.label)), at.label]
    change = np.abs(problem.time - own[:, None])
    found = np.argwhere(
        np.isfinite(problem.time) & (np.arange(problem.labels) != at.label[:, None])
    )
    order = np.argsort(-change[found[:, 0], found[:, 1]], kind="stable")
    for unit, label in found[order[:_MOST_LOOKED_AT]]:
        other: Ints = at.label.copy()
        other[unit] = label
        yield evaluate(problem, other)


def _price(fast: Labelling, slow: Labelling) -> float:
    """Additional seconds of ``slow`` per squared error that it removes from ``fast``."""
    less = fast.error - slow.error
    return (slow.time_s - fast.time_s) / less if less > 0 else math.inf


def _proposals(
    planner: Planner, analysis: Analysis, found: list[Labelling], how: str
) -> list[Proposal]:
    made: list[Proposal] = []
    for one in found:
        choice = Choice.of(one, one.label, analysis, how=how, index=None)
        name = f"{how}, error {math.sqrt(choice.error):.3g}"
        made.append(proposal(planner, analysis, choice, name))
    return made
