"""The choice among more than two formats, by expansion moves: each is one minimum cut.

A move lets any set of units change to one format, and the best such set is a minimum cut of
the problem of two sides: to change or not. Moves are made until none helps. Source: Y.
Boykov, O. Veksler and R. Zabih, "Fast approximate energy minimization via graph cuts" (2001),
with the higher-order terms that a cast shared by many consumers is.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from finecast.solver.assignment import PINNED_HIGH, PINNED_LOW, Ints, Problem, ProblemBuilder
from finecast.solver.exact import solve
from finecast.solver.frontier import spread
from finecast.solver.labelling import Labelling, LabelProblem, evaluate

# A cost that is lower by less than this share is the same: sums of it round.
_SAME = 1e-12
# Cuts of the search for the envelope, for each step that is wanted.
_TRIES = 4


def label(problem: LabelProblem, lam: float, start: Labelling | None = None) -> Labelling:
    """A labelling that no expansion move improves at ``lam``, seconds per squared error.

    Laws: it costs no more than ``start``. Where all units may have label 0 and nothing is
    pinned to another, it costs no more than the best assignment of label 0 and any one
    other, if casts from a format to itself take no time; of two formats it is then the
    best of all. Deterministic.
    """
    high = highest(problem)
    firsts = [_moved(problem, high, low, lam) for low in range(1, problem.labels)]
    best = min([start or high, *firsts], key=lambda x: x.cost(lam))
    idle, low = 0, 0
    while idle < problem.labels:
        moved = _moved(problem, best, low, lam)
        better = moved.cost(lam) < best.cost(lam) - _SAME * abs(best.cost(lam))
        best, idle = (moved, 0) if better else (best, idle + 1)
        low = (low + 1) % problem.labels
    return best


def highest(problem: LabelProblem) -> Labelling:
    """Label 0 wherever it is permitted, else the fastest."""
    fastest = problem.time.argmin(axis=1)
    return evaluate(problem, np.where(np.isfinite(problem.time[:, 0]), 0, fastest))


def envelope(
    problem: LabelProblem, *, max_steps: int, errors: tuple[float, float] = (0.0, np.inf)
) -> tuple[Labelling, ...]:
    """Labellings along the lower convex envelope of error and time, fastest last.

    Law: error grows and time falls strictly. The envelope is that of what moves find: they
    are exact for two formats only. At most ``max_steps``, evenly spread along it. Between two
    steps nothing is looked for where no error lies within ``errors``.
    """
    slowest, fastest = highest(problem), label(problem, 0.0)
    found, waiting = [slowest, fastest], [(slowest, fastest)]
    for _ in range(_TRIES * max_steps):
        if not waiting:
            break
        high, low = waiting.pop(0)
        if low.error <= high.error or low.time_s >= high.time_s:
            continue
        if low.error <= errors[0] or high.error > errors[1]:
            continue
        lam = (high.time_s - low.time_s) / (low.error - high.error)
        between = min((label(problem, lam, x) for x in (high, low)), key=lambda x: x.cost(lam))
        if between.cost(lam) < low.cost(lam) - _SAME * low.cost(lam):
            found.append(between)
            waiting += [(high, between), (between, low)]
    return _thinned(_pareto(found), max_steps)


def _pareto(found: Iterable[Labelling]) -> list[Labelling]:
    """Those that no other is at once faster and more accurate than."""
    kept: list[Labelling] = []
    for one in sorted(found, key=lambda x: (x.error, x.time_s)):
        if not kept or one.time_s < kept[-1].time_s:
            kept.append(one)
    return kept


def _thinned(steps: list[Labelling], count: int) -> tuple[Labelling, ...]:
    if len(steps) <= count:
        return tuple(steps)
    time_s, error = (np.array([getattr(s, of) for s in steps]) for of in ("time_s", "error"))
    return tuple(steps[k] for k in spread(time_s, error, count))


def _moved(problem: LabelProblem, at: Labelling, to: int, lam: float) -> Labelling:
    """The best set of units changed to label ``to``.

    Where a value would be cast for less (or, to ``to`` itself, for more) once its producer has
    changed, no cut can tell: its cost counts as it is now.
    """
    move = _Move(problem, at.label, to, lam)
    low = solve(move.problem(), 1.0).low
    moved = evaluate(problem, np.where(low, to, at.label))
    return moved if moved.cost(lam) < at.cost(lam) else at


class _Move:
    """The problem of two sides, whose low side is to have label ``to``."""

    def __init__(self, problem: LabelProblem, label: Ints, to: int, lam: float) -> None:
        self.of, self.label, self.to, self.lam = problem, label, to, lam
        self.sides = problem.looked_up(label)
        # Where an entry of a row stands: in ``to`` already, free to change, or not.
        units = np.arange(len(label))
        free = np.where(np.isfinite(problem.time[:, to]), units, PINNED_HIGH)
        own = np.where(label == to, PINNED_LOW, free)
        pins = np.full(problem.labels, PINNED_HIGH)
        pins[to] = PINNED_LOW
        self.side = np.concatenate([own, pins[::-1]])
        self.builder = ProblemBuilder()

    def problem(self) -> Problem:
        of, units = self.of, np.arange(len(self.label))
        self._casts()
        self._roundings()
        weight = of.time + self.lam * of.error
        stays = self.label == self.to
        return self.builder.problem(
            time_high=np.where(stays, 0.0, weight[units, self.label]),
            time_low=np.where(stays, 0.0, weight[:, self.to]),
            error=np.zeros(len(units)),
        )

    def _casts(self) -> None:
        of, to = self.of, self.to
        made, value = self.sides[of.producer], np.arange(len(of.producer))
        row, unit = of.consumers.row, of.consumers.unit
        maker = self.side[of.producer]
        # To the label itself: paid if any consumer has it; more if the producer has not.
        now, then = of.cast[made, to, value], of.cast[to, to, value]
        then = np.where(maker >= 0, np.minimum(now, then), now)
        self.builder.add(np.full(len(made), PINNED_HIGH), row, self.side[unit], down=then)
        self.builder.add(maker, row, self.side[unit], down=now - then)
        for other in range(of.labels):
            if other == to:
                continue
            keeps = self.sides[unit] == other
            rows, left = row[keeps], self.side[unit[keeps]]
            # Paid while a consumer keeps its format; more if the producer changes its own.
            now, then = of.cast[made, other, value], of.cast[to, other, value]
            then = np.where(maker >= 0, np.maximum(now, then), now)
            self.builder.add(np.full(len(made), PINNED_LOW), rows, left, up=now)
            self.builder.add(maker, rows, left, up=then - now)

    def _roundings(self) -> None:
        for number, found in enumerate(self.of.touched, start=1):
            row, unit = found.rows.row, found.rows.unit
            priced = self.lam * found.error
            if number == self.to:
                nobody = np.full(len(priced), PINNED_HIGH)
                self.builder.add(nobody, row, self.side[unit], error=priced)
            else:
                has = self.sides[unit] == number
                everybody = np.full(len(priced), PINNED_LOW)
                self.builder.add(everybody, row[has], self.side[unit[has]], up=priced)
