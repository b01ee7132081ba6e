"""The fastest plan of a drawn net whose true loss is allowed, as far as one is found.

The solver gives plans along the frontier of true times and of sums of single errors. From the
fastest of them that are allowed, and from faster ones that are repaired, a local search
changes one unit or two at a time, by true times and true losses, until nothing gains; then
stretches of units get another format by chance, and it goes on from there. Of a net with few
plans all are tried. What is found bounds the best time from above: ``RESULTS-lab.md`` says how
often a search found a faster plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np

from finecast.solver.assignment import Floats, Ints
from finecast.solver.expansion import envelope
from finecast.solver.flips import flips
from finecast.solver.frontier import frontier
from finecast.solver.labelling import Labelling, LabelProblem, evaluate, two_sided

Losses: TypeAlias = Callable[[Ints], Floats]
"""True losses, over what may be lost, of int64[b, n] labellings."""

_STEPS: Final = 40
_STARTS: Final = 3
_SINGLES: Final = 500
_PAIRED: Final = 24
_FEWEST_KICKS: Final = 16
_MOST_KICKS: Final = 100
_KICKED_UNITS: Final = 4000
_KICKED: Final = 10
_FEW_PLANS: Final = 1 << 14
_TRIED: Final = 1 << 10


def fastest_allowed(
    problem: LabelProblem, losses: Losses, rng: np.random.Generator
) -> Labelling:
    """The fastest labelling found whose loss is at most 1; fp32 loses nothing.

    Args:
        problem: True times; errors are the squares of single roundings.
        losses: The true losses of labellings.
        rng: Draws the kicks.
    """
    if problem.labels ** len(problem.time) <= _FEW_PLANS:
        return _best_of_all(problem, losses)
    steps = _steps(problem)
    lost = losses(np.array([step.label for step in steps]))
    allowed = [s for s, loss in zip(steps, lost, strict=True) if loss <= 1]
    beyond = [s for s, loss in zip(steps, lost, strict=True) if loss > 1]
    fp32 = evaluate(problem, np.zeros(len(problem.time), dtype=np.int64))
    best = min([*allowed, fp32], key=lambda s: s.time_s)
    starts = [best, *(_repaired(problem, losses, s) for s in beyond[:_STARTS])]
    best = min((_descended(problem, losses, s) for s in starts), key=lambda s: s.time_s)
    for _ in range(max(_FEWEST_KICKS, min(_MOST_KICKS, _KICKED_UNITS // len(problem.time)))):
        kicked = _repaired(problem, losses, evaluate(problem, _kicked(problem, best, rng)))
        descended = _descended(problem, losses, kicked)
        best = min(best, descended, key=lambda s: s.time_s)
    return best


def _best_of_all(problem: LabelProblem, losses: Losses) -> Labelling:
    """The fastest of all labellings that are permitted and allowed."""
    units = np.arange(len(problem.time))
    every = np.indices([problem.labels] * len(units)).reshape(len(units), -1).T
    every = every[np.isfinite(problem.time[units, every]).all(axis=1)]
    parts = (every[first : first + _TRIED] for first in range(0, len(every), _TRIED))
    allowed = (label for part in parts for label in part[losses(part) <= 1])
    return min((evaluate(problem, label) for label in allowed), key=lambda s: s.time_s)


def _kicked(problem: LabelProblem, at: Labelling, rng: np.random.Generator) -> Ints:
    """A stretch of units in another format: none of them alone may gain, for its casts."""
    count = len(at.label)
    first, length = rng.integers(count), rng.integers(1, _KICKED + 1)
    to = int(rng.integers(problem.labels))
    label = at.label.copy()
    stretch = np.arange(first, min(first + length, count))
    label[stretch[np.isfinite(problem.time[stretch, to])]] = to
    return label


def _steps(problem: LabelProblem) -> list[Labelling]:
    """Labellings along the frontier of times and sums of single errors."""
    if problem.labels == 2 and problem.is_monotone:
        steps = frontier(two_sided(problem), max_steps=_STEPS)
        return [evaluate(problem, step.low.astype(np.int64)) for step in steps]
    return [*envelope(problem, max_steps=_STEPS)]


def _repaired(problem: LabelProblem, losses: Losses, at: Labelling) -> Labelling:
    """``at`` with units back in fp32, those of most loss per second first."""
    while losses(at.label[None])[0] > 1:
        units = np.flatnonzero(at.label)
        if not len(units):
            break
        tried = _changed(at.label, units, np.zeros(len(units), dtype=np.int64))
        gained = losses(at.label[None])[0] - losses(tried)
        slower = np.maximum(flips(problem, at.label).total_s[units, 0], 1e-9)
        at = evaluate(problem, tried[int(np.argmax(gained / slower))])
    return at


def _descended(problem: LabelProblem, losses: Losses, at: Labelling) -> Labelling:
    """``at`` after changes of one unit, or of two, as long as they gain and are kept."""
    while True:
        total = flips(problem, at.label).total_s
        total[np.arange(len(at.label)), at.label] = np.inf
        unit, label = np.nonzero(np.isfinite(total))
        change = total[unit, label]
        order = np.argsort(change)
        faster = order[change[order] < -1e-12][:_SINGLES]
        lost = losses(_changed(at.label, unit[faster], label[faster]))
        kept = np.flatnonzero(lost <= 1)
        if len(kept):
            first = faster[kept[0]]
            at = evaluate(problem, _changed(at.label, unit[[first]], label[[first]])[0])
            continue
        paired = _paired(problem, losses, at, (unit, label, change), faster, lost)
        if paired is None:
            return at
        at = paired


def _paired(
    problem: LabelProblem,
    losses: Losses,
    at: Labelling,
    changes: tuple[Ints, Ints, Floats],
    faster: Ints,
    lost: Floats,
) -> Labelling | None:
    """The best of two changes, one of which saves time and the other one loss."""
    unit, label, change = changes
    saving = faster[np.argsort((lost - 1) / -change[faster])[:_PAIRED]]
    slower = np.flatnonzero(change >= -1e-12)
    if not len(saving) or not len(slower):
        return None
    own = losses(at.label[None])[0]
    gained = own - losses(_changed(at.label, unit[slower], label[slower]))
    useful = slower[gained > 0]
    worth = gained[gained > 0] / np.maximum(change[useful], 1e-9)
    repairs = useful[np.argsort(-worth)[:_PAIRED]]
    one, other = (side.ravel() for side in np.meshgrid(saving, repairs, indexing="ij"))
    promising = (change[one] + change[other] < 0) & (unit[one] != unit[other])
    one, other = one[promising], other[promising]
    if not len(one):
        return None
    tried = _changed(at.label, unit[one], label[one])
    tried[np.arange(len(one)), unit[other]] = label[other]
    kept = tried[losses(tried) <= 1]
    fastest = min((evaluate(problem, x) for x in kept), key=lambda s: s.time_s, default=at)
    return fastest if fastest.time_s < at.time_s - 1e-12 else None


def _changed(label: Ints, unit: Ints, to: Ints) -> Ints:
    """int64[b, n]: ``label`` with one unit changed in each row."""
    labels = np.tile(label, (len(unit), 1))
    labels[np.arange(len(unit)), unit] = to
    return labels
