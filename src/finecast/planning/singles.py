"""Plans that differ from one in a single unit, those nearest to their thresholds first.

A unit's threshold is the price of error at which the minimum changes its format. Predicted
errors add up over units and hold on calibration data: where the metric disagrees, one unit
more or less may be what decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
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
# Each is evaluated in the time of all units.
_MOST_LOOKED_AT: Final = 256


def lowered_by_one(
    planner: Planner, analysis: Analysis, plan: Plan, *, most: int = _MOST
) -> list[Proposal]:
    """Plans with one unit in a lower format, predicted to gain: the most for their error."""
    problem, at = _stated(planner, analysis, plan)
    faster = [one for one in _changed(problem, at) if one.time_s < at.time_s]
    faster.sort(key=lambda one: _price(one, at))
    return _proposals(planner, analysis, faster[-most:][::-1], "with one more unit low")


def raised_by_one(
    planner: Planner, analysis: Analysis, plan: Plan, *, most: int = _MOST
) -> list[Proposal]:
    """Plans with one unit in a higher format: those that lose least time for their error."""
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
    # Of a unit that an engine's hint keeps in part the lowest format counts.
    label = [
        max(numbers.get(formats.get(nodes[n].name, Format.FP32), 0) for n in members)
        for members in analysis.units.members
    ]
    return problem, evaluate(problem, np.array(label, dtype=np.int64))


def _changed(problem: LabelProblem, at: Labelling) -> Iterator[Labelling]:
    """Permitted labellings that differ in one unit: those that change its own time most."""
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
    """Seconds that ``slow`` takes more, for each squared error that it has less."""
    less = fast.error - slow.error
    return (slow.time_s - fast.time_s) / less if less > 0 else math.inf


def _proposals(
    planner: Planner, analysis: Analysis, found: list[Labelling], how: str
) -> list[Proposal]:
    formats, adds_up = (*analysis.times,), analysis.saturation
    made: list[Proposal] = []
    for one in found:
        error = adds_up.together(one.error)
        choice = Choice(
            how=how,
            index=None,
            formats=tuple(formats[k] for k in one.label),
            time_s=one.time_s,
            error=error,
            casts=one.casts,
            priced=analysis.priced,
        )
        name = f"{how}, error {math.sqrt(error):.3g}"
        made.append(replace(proposal(planner, analysis, choice), name=name))
    return made
