"""Choices between two steps of the frontier: as fast as possible within a given error.

The frontier is convex, so several units may change at once from one step to the next, and the
error that the criterion allows mostly lies between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from finecast.graph import Graph
from finecast.planning.choices import Choice
from finecast.planning.problem import Analysis, build_problem
from finecast.rules import Permission
from finecast.solver.assignment import Floats, Ints
from finecast.solver.flips import flips
from finecast.solver.labelling import Labelling, LabelProblem, evaluate

# Units that are changed one by one: each turn prices all changes anew.
_MOST_UNITS: Final = 64


def within(
    graph: Graph,
    permissions: Mapping[int, Permission],
    analysis: Analysis,
    steps: Sequence[Choice],
    error: float,
) -> Choice | None:
    """A choice of at most this squared error, faster than every step that keeps to it.

    Args:
        graph: The graph.
        permissions: What the rules left.
        analysis: Times, casts and errors.
        steps: The steps of the frontier, the most accurate first.
        error: The squared error.

    Returns:
        None if ``error`` lies outside the steps' errors, or no faster choice was found
        between the two steps around it.
    """
    pair = next(((a, b) for a, b in pairwise(steps) if a.error <= error < b.error), None)
    if pair is None:
        return None
    numbers = {f: number for number, f in enumerate(analysis.times)}
    slow, fast = (np.array([numbers[f] for f in choice.formats]) for choice in pair)
    problem = build_problem(graph, permissions, analysis)
    found = _descend(problem, slow, fast, analysis.saturation.apart(error))
    if found.time_s >= pair[0].time_s:
        return None
    return Choice.of(found, problem, found.label, analysis)


def _descend(problem: LabelProblem, slow: Ints, fast: Ints, error: float) -> Labelling:
    """Change units from ``fast`` to ``slow``, the best trade first, until ``error`` is kept.

    Then units are changed back as long as that gains time within ``error``. ``slow`` as a
    whole keeps the error.
    """
    at = evaluate(problem, fast)
    differ = np.flatnonzero(slow != fast)
    price = _price(*_changes(problem, at, differ, slow))
    tried = differ[np.argsort(price, kind="stable")[:_MOST_UNITS]]
    while at.error > error:
        ahead = tried[at.label[tried] != slow[tried]]
        if not len(ahead):
            return evaluate(problem, slow)
        price = _price(*_changes(problem, at, ahead, slow))
        at = _with(problem, at, ahead[np.argmin(price)], slow)
    while True:
        back = tried[at.label[tried] != fast[tried]]
        more_s, more = _changes(problem, at, back, fast)
        gains = np.where(at.error + more <= error, more_s, np.inf)
        if not len(back) or gains.min() >= 0:
            return at
        at = _with(problem, at, back[np.argmin(gains)], fast)


def _changes(
    problem: LabelProblem, at: Labelling, units: Ints, label: Ints
) -> tuple[Floats, Floats]:
    """Additional seconds and squared error if one of ``units`` alone takes its ``label``."""
    found = flips(problem, at.label)
    return found.total_s[units, label[units]], found.error[units, label[units]]


def _with(problem: LabelProblem, at: Labelling, unit: int, label: Ints) -> Labelling:
    changed = at.label.copy()
    changed[unit] = label[unit]
    return evaluate(problem, changed)


def _price(more_s: Floats, more: Floats) -> Floats:
    """Seconds lost per squared error removed; infinite where none is removed."""
    return np.divide(more_s, -more, out=np.full(len(more), np.inf), where=more < 0)
