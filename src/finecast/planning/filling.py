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
from finecast.solver.assignment import Ints
from finecast.solver.labelling import Labelling, LabelProblem, evaluate

# Units that are tried one by one: each turn evaluates every unit not yet changed.
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
    how = "between steps of the frontier"
    return Choice.of(found, found.label, analysis, how=how, index=pair[1].index)


def _descend(problem: LabelProblem, slow: Ints, fast: Ints, error: float) -> Labelling:
    """Change units from ``fast`` to ``slow``, the best trade first, until ``error`` is kept.

    Then units are changed back as long as that gains time within ``error``. ``slow`` as a
    whole keeps the error.
    """
    at = evaluate(problem, fast)
    differ = [int(u) for u in np.flatnonzero(slow != fast)]
    trades = [(_ratio(at, _with(problem, at, u, slow)), u) for u in differ]
    tried = [u for _, u in sorted(trades)[:_MOST_UNITS]]
    while at.error > error:
        ahead = [u for u in tried if at.label[u] != slow[u]]
        if not ahead:
            return evaluate(problem, slow)
        moved = [_with(problem, at, u, slow) for u in ahead]
        at = min(moved, key=lambda m, now=at: _ratio(now, m))
    while True:
        back = [_with(problem, at, u, fast) for u in tried if at.label[u] != fast[u]]
        kept = [b for b in back if b.error <= error and b.time_s < at.time_s]
        if not kept:
            return at
        at = min(kept, key=lambda b: b.time_s)


def _with(problem: LabelProblem, at: Labelling, unit: int, label: Ints) -> Labelling:
    changed = at.label.copy()
    changed[unit] = label[unit]
    return evaluate(problem, changed)


def _ratio(now: Labelling, then: Labelling) -> float:
    """Seconds lost per squared error removed; infinite where none is removed."""
    removed = now.error - then.error
    return (then.time_s - now.time_s) / removed if removed > 0 else np.inf
