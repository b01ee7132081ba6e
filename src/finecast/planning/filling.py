"""Choices between two steps of the frontier: as fast as possible within a given error.

The frontier is convex: from one step to the next several units may change at once, and the
error that the criterion allows mostly lies between the two.
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

# Units that are tried one by one: each turn evaluates every one that is left.
_MOST_UNITS: Final = 64


def within(
    graph: Graph,
    permissions: Mapping[int, Permission],
    analysis: Analysis,
    steps: Sequence[Choice],
    error: float,
) -> Choice | None:
    """A choice of at most this squared error, faster than the steps that keep it.

    Args:
        graph: The graph.
        permissions: What the rules left.
        analysis: What the choice rests on.
        steps: Those of the frontier, the most accurate first.
        error: The squared error.

    Returns:
        None if ``error`` lies beyond the steps, or no other choice lies between the two
        that it lies between.
    """
    pair = next(((a, b) for a, b in pairwise(steps) if a.error <= error < b.error), None)
    if pair is None:
        return None
    formats = (*analysis.times,)
    numbers = {f: number for number, f in enumerate(formats)}
    slow, fast = (np.array([numbers[f] for f in choice.formats]) for choice in pair)
    adds_up = analysis.saturation
    problem = build_problem(graph, permissions, analysis)
    found = _descend(problem, slow, fast, adds_up.apart(error))
    if found.time_s >= pair[0].time_s:
        return None
    return Choice(
        how="between steps of the frontier",
        index=pair[1].index,
        formats=tuple(formats[label] for label in found.label),
        time_s=found.time_s,
        error=adds_up.together(found.error),
        casts=found.casts,
        priced=analysis.priced,
    )


def _descend(problem: LabelProblem, slow: Ints, fast: Ints, error: float) -> Labelling:
    """From ``fast`` towards ``slow``, the best trade first, until the error is kept.

    Then back wherever that gains time within the error. All of ``slow`` keeps it.
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
    """Seconds lost per squared error gained; what gains none comes last."""
    gained = now.error - then.error
    return (then.time_s - now.time_s) / gained if gained > 0 else np.inf
