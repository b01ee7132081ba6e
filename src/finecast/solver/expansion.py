"""The choice among more than two formats, by expansion moves: each is one minimum cut.

A move lets any set of units change to one format. Which set is best is a problem with two
sides, to change or not, that a minimum cut solves. Moves are made until none helps. Source:
Y. Boykov, O. Veksler and R. Zabih, "Fast approximate energy minimization via graph cuts"
(2001), with higher-order terms for casts that several consumers share.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from finecast.solver.assignment import PINNED_HIGH, PINNED_LOW, Ints, Problem, ProblemBuilder
from finecast.solver.frontier import spread
from finecast.solver.integer import improved
from finecast.solver.labelling import Labelling, LabelProblem, evaluate
from finecast.solver.mincut import solve

# Costs that differ by less than this share count as equal, because sums are rounded.
_SAME = 1e-12
# The largest number of searches between two steps, for each step that is wanted.
_TRIES = 4


def label(problem: LabelProblem, lam: float, start: Labelling | None = None) -> Labelling:
    """A labelling that no expansion move improves at ``lam``, seconds per squared error.

    Laws: it costs no more than ``start``. If all units may have label 0, nothing is pinned to
    another label, and casts from a format to itself take no time, it costs no more than the
    best assignment of label 0 and any one other label; with two formats it is then optimal.
    For more formats it is the best of all if the problem is small (see ``integer``).
    Deterministic.
    """
    return improved(problem, lam, _by_moves(problem, lam, start))


def _by_moves(problem: LabelProblem, lam: float, start: Labelling | None = None) -> Labelling:
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
    """The labelling with label 0 wherever it is permitted, else the fastest label."""
    fastest = problem.time.argmin(axis=1)
    return evaluate(problem, np.where(np.isfinite(problem.time[:, 0]), 0, fastest))


def envelope(
    problem: LabelProblem, *, max_steps: int, errors: tuple[float, float] = (0.0, np.inf)
) -> tuple[Labelling, ...]:
    """Labellings along the lower convex envelope of error and time, fastest last.

    Law: error grows and time falls strictly. The envelope is of the labellings that moves
    find, which are optimal for two formats only. At most ``max_steps`` are returned, evenly
    spread along it. The search is not refined between steps whose errors lie outside
    ``errors``.
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
        moved = (_by_moves(problem, lam, x) for x in (high, low))
        between = improved(problem, lam, min(moved, key=lambda x: x.cost(lam)))
        if between.cost(lam) < low.cost(lam) - _SAME * low.cost(lam):
            found.append(between)
            waiting += [(high, between), (between, low)]
    return _thinned(_pareto(found), max_steps)


def _pareto(found: Iterable[Labelling]) -> list[Labelling]:
    """The labellings that no other one beats in both time and error."""
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
    """``at`` with the best set of units changed to label ``to``.

    If a cast would become cheaper (or, one to ``to`` itself, dearer) by its producer's change,
    a cut cannot express that, and the cast counts with its present cost.
    """
    move = _Move(problem, at.label, to, lam)
    low = solve(move.problem(), 1.0).low
    moved = evaluate(problem, np.where(low, to, at.label))
    return moved if moved.cost(lam) < at.cost(lam) else at


class _Move:
    """The problem with two sides of one move: units on the low side get label ``to``."""

    def __init__(self, problem: LabelProblem, label: Ints, to: int, lam: float) -> None:
        self.of, self.label, self.to, self.lam = problem, label, to, lam
        self.sides = problem.with_pins(label)
        # Side of each unit and pin: low if it has ``to`` already, else the unit itself if it
        # may change, else high.
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
        # A cast to ``to`` is paid if any consumer has it; more if the producer does not.
        now, then = of.cast[made, to, value], of.cast[to, to, value]
        then = np.where(maker >= 0, np.minimum(now, then), now)
        self.builder.add(np.full(len(made), PINNED_HIGH), row, self.side[unit], down=then)
        self.builder.add(maker, row, self.side[unit], down=now - then)
        for other in range(of.labels):
            if other == to:
                continue
            keeps = self.sides[unit] == other
            rows, left = row[keeps], self.side[unit[keeps]]
            # One to ``other`` is paid while a consumer keeps it; more if the producer changes.
            now, then = of.cast[made, other, value], of.cast[to, other, value]
            then = np.where(maker >= 0, np.maximum(now, then), now)
            self.builder.add(np.full(len(made), PINNED_LOW), rows, left, up=now)
            self.builder.add(maker, rows, left, up=then - now)

    def _roundings(self) -> None:
        for number, found in enumerate(self.of.roundings, start=1):
            row, unit = found.rows.row, found.rows.unit
            priced = self.lam * found.error
            if number == self.to:
                nobody = np.full(len(priced), PINNED_HIGH)
                self.builder.add(nobody, row, self.side[unit], error=priced)
            else:
                has = self.sides[unit] == number
                everybody = np.full(len(priced), PINNED_LOW)
                self.builder.add(everybody, row[has], self.side[unit[has]], up=priced)
