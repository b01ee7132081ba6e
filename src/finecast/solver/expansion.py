"""The choice among more than two formats, by expansion moves: each is one minimum cut.

A move lets any set of units change to one format. Which set is best is a problem with two
sides, to change or not, that a minimum cut solves. Moves are made until none helps. Source:
Y. Boykov, O. Veksler and R. Zabih, "Fast approximate energy minimization via graph cuts"
(2001), with higher-order terms for casts that several consumers share. What moves find for a
small problem is improved to the best of all by an integer program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from finecast.solver.assignment import (
    PINNED_HIGH,
    PINNED_LOW,
    Bools,
    Floats,
    Ints,
    Problem,
    ProblemBuilder,
)
from finecast.solver.flips import flips
from finecast.solver.frontier import spread
from finecast.solver.labelling import Labelling, LabelProblem, evaluate
from finecast.solver.mincut import solve

# The best labelling of a small problem, by integer programming.
#
# Expansion moves stop where no single move helps, which may be some percent from the best.
# As an integer program the problem has a variable for each unit and label, and one for each
# cast that a choice may need. HiGHS (in scipy) solves it by branch and bound, with few
# branches, because the relaxation is nearly tight. The number of branches is limited, and
# never the time: a frontier must not depend on how busy the machine is.


# Variables of the largest program that is solved: 20 units with three formats and one cast of
# each. On random graphs of that size a frontier took 1.6 times as long as by moves alone, and
# a dense one of 60 units with five formats took a minute for one program.
#
# Larger programs are left to moves, because these miss less than two plans may differ in time
# and still count as equally fast (3%). Costs of moves above the best, by the program without
# this limit, on 20 to 40 random problems of three formats each, at prices of error where two
# steps of the frontier cost about the same; seconds of a processor for one program:
#
#   variables  graph    not the best   mean     worst    moves   program: mean, worst
#   400        random       20%        0.074%   1.13%    0.02 s   0.04    0.48 s
#   400        local        23%        0.041%   0.93%    0.02 s   0.02    0.17 s
#   700        random       27%        0.079%   0.81%    0.03 s   0.3     2.7 s
#   700        local        40%        0.052%   0.43%    0.04 s   0.09    0.84 s
#   1000       random       15%        0.037%   0.40%    0.03 s   0.5     6.4 s
#   1000       local        50%        0.044%   0.26%    0.04 s   0.06    0.15 s
#
# In a local graph units read the five before them, as in most nets. The worst miss falls as
# problems grow, while the time of a program, of which a frontier may need 40, has no bound.
_LARGEST: Final = 300
# Branches after which the best labelling so far is taken.
_MOST_NODES: Final = 50
# How many times as large as the error that is allowed a single one may be: HiGHS computes with
# some 16 digits, and takes a violation of 1e-7 for none.
_ERRORS: Final = 1e9
# The scale of costs: HiGHS takes differences below 1e-6 for none.
_SCALE: Final = 1e3


def improved(problem: LabelProblem, lam: float, known: Labelling) -> Labelling:
    """The labelling of least cost at ``lam``, or ``known`` where no better one is found.

    Laws: it costs no more than ``known``, and keeps the problem's limit if ``known`` does. If
    the problem is small, and few branches suffice, no labelling that does costs less by more
    than 1e-6 of its cost. Deterministic.
    """
    scale = known.cost(lam)
    if not 0 < scale < np.inf or _size(problem) > _LARGEST:
        return known
    label = _Program(problem, lam).solved(_SCALE / scale)
    if label is None or not problem.fits(label):
        return known
    labelling = evaluate(problem, label)
    return labelling if labelling.cost(lam) < scale else known


def fastest_within(problem: LabelProblem, error: float, known: Labelling) -> Labelling:
    """The fastest labelling of at most this error, or ``known`` where no faster one is found.

    Laws: its error is at most ``error`` if that of ``known`` is, it takes no longer, and keeps
    the problem's limit if ``known`` does. If the problem is small, few branches suffice, and
    no single error is more than 1e9 times as large, no such labelling is faster by more than
    1e-6. Deterministic.
    """
    if not 0 < known.time_s < np.inf or not 0 < error < np.inf or _size(problem) > _LARGEST:
        return known
    program = _Program(problem, 0.0)
    if max(np.abs(part).max(initial=0.0) for part in program.error) > _ERRORS * error:
        return known
    label = program.solved(_SCALE / known.time_s, error)
    if label is None or not problem.fits(label):
        return known
    labelling = evaluate(problem, label)
    return labelling if labelling.time_s < known.time_s and labelling.error <= error else known


def _size(problem: LabelProblem) -> int:
    parts = (problem, *((problem.limit.sizes,) if problem.limit else ()))
    casts = sum(int(np.count_nonzero((part.cast > 0).any(axis=0))) for part in parts)
    rounded = sum(len(r.error) for r in problem.roundings)
    return problem.time.size + casts * problem.labels + rounded


class _Program:
    """Variables: each unit (then each pin) by label, casts, roundings; all from 0 to 1."""

    def __init__(self, problem: LabelProblem, lam: float) -> None:
        self.of = problem
        n, k = problem.time.shape
        pins = np.eye(k)
        allowed = np.isfinite(problem.time)
        cost = np.where(allowed, problem.time + lam * problem.error, 0.0)
        self.cost: list[Floats] = [cost.ravel(), np.zeros(k * k)]
        self.error: list[Floats] = [problem.error.ravel(), np.zeros(k * k)]
        sizes = None if problem.limit is None else problem.limit.sizes
        own = np.zeros((n, k)) if sizes is None else np.where(allowed, sizes.time, 0.0)
        self.bytes: list[Floats] = [own.ravel(), np.zeros(k * k)]
        self.lower: list[Floats] = [np.zeros(n * k), pins.ravel()]
        self.upper: list[Floats] = [allowed.astype(np.float64).ravel(), pins.ravel()]
        self.size = (n + k) * k
        # Entries of the constraints ``sum >= 0``: row, column, coefficient.
        self.entries: list[tuple[Ints, Ints, Floats]] = []
        self.rows = 0
        self._casts(problem)
        if sizes is not None:
            self._casts(sizes, of_size=True)
        for number, rounded in enumerate(problem.roundings, start=1):
            paid = self._added(lam * rounded.error, error=rounded.error)
            units = self._column(rounded.rows.unit, number)
            self._at_least(paid[rounded.rows.row][:, None], units)

    def solved(self, scale: float, within: float = np.inf) -> Ints | None:
        """The best labels that were found, of at most an error; None if there are none."""
        import scipy.optimize

        optimize: Any = scipy.optimize  # its stubs take bounds for single numbers
        n, k = self.of.time.shape
        unit = np.arange(n).repeat(k)
        label = np.arange(n * k)
        ones = scipy.sparse.csr_array((np.ones(n * k), (unit, label)), shape=(n, self.size))
        limits: list[Any] = [optimize.LinearConstraint(ones, 1, 1)]
        if self.rows:
            row, column, factor = (np.concatenate(x) for x in zip(*self.entries, strict=True))
            matrix = scipy.sparse.csr_array(
                (factor, (row, column)), shape=(self.rows, self.size)
            )
            limits.append(optimize.LinearConstraint(matrix, 0, np.inf))
        if within < np.inf:
            error = scipy.sparse.csr_array(np.concatenate(self.error)[None] / within)
            limits.append(optimize.LinearConstraint(error, -np.inf, 1.0))
        if self.of.limit is not None:
            size = scipy.sparse.csr_array(
                np.concatenate(self.bytes)[None] / self.of.limit.most
            )
            limits.append(optimize.LinearConstraint(size, -np.inf, 1.0))
        whole = np.zeros(self.size)
        whole[: n * k] = 1
        solution: Any = optimize.milp(
            scale * np.concatenate(self.cost),
            integrality=whole,
            bounds=optimize.Bounds(np.concatenate(self.lower), np.concatenate(self.upper)),
            constraints=limits,
            # Presolving corrupts memory on some of these programs (HiGHS of scipy 1.17), and
            # loses solutions on others, which it prints to standard output.
            options={"node_limit": _MOST_NODES, "mip_rel_gap": 0.0, "presolve": False},
        )
        return None if solution.x is None else solution.x[: n * k].reshape(n, k).argmax(axis=1)

    def _casts(self, of: LabelProblem, *, of_size: bool = False) -> None:
        """A cast is paid if the producer has the one label and any consumer the other.

        The casts of a value into a label, from every label, add up to 1 if a consumer has it.
        There is none from a label that the producer does not have. They cost time, or those
        ``of_size`` what is limited.
        """
        k = of.labels
        row, unit = of.consumers.row, of.consumers.unit
        for to in range(k):
            costs = of.cast[:, to]
            values = np.flatnonzero((costs > 0).any(axis=0))
            if not len(values):
                continue
            usable = np.isfinite(costs[:, values])
            amount = np.where(usable, costs[:, values], 0.0).ravel()
            seconds, size = (np.zeros(len(amount)), amount) if of_size else (amount, None)
            paid = self._added(seconds, usable.ravel(), size=size)
            paid = paid.reshape(k, len(values))
            for source in range(k):
                producer_columns = self._column(of.producer[values], source)
                self._at_least(producer_columns[:, None], paid[source])
            number = np.full(len(of.producer), -1)
            number[values] = np.arange(len(values))
            read = number[row] >= 0
            self._at_least(paid[:, number[row[read]]].T, self._column(unit[read], to))

    def _column(self, unit: Ints, label: int) -> Ints:
        """The variables of units, or pins, having a label."""
        n, k = self.of.time.shape
        place = np.where(unit >= 0, unit, n - 1 - unit)
        return place * k + label

    def _added(
        self,
        cost: Floats,
        usable: Bools | None = None,
        *,
        error: Floats | None = None,
        size: Floats | None = None,
    ) -> Ints:
        """New variables with these costs, and with these errors and sizes if they have any."""
        count = len(cost)
        self.cost.append(cost)
        self.error.append(np.zeros(count) if error is None else error)
        self.bytes.append(np.zeros(count) if size is None else size)
        self.lower.append(np.zeros(count))
        self.upper.append(np.ones(count) if usable is None else usable.astype(np.float64))
        self.size += count
        return np.arange(self.size - count, self.size)

    def _at_least(self, more: Ints, less: Ints) -> None:
        """In each row, the variables ``more`` add up to no less than the variable ``less``."""
        count, width = len(less), more.shape[1]
        rows = self.rows + np.arange(count)
        self.entries += [
            (rows.repeat(width), more.ravel(), np.ones(count * width)),
            (rows, less, -np.ones(count)),
        ]
        self.rows += count


# The price of error at which a labelling of the least error is looked for, times the time of
# the fastest labelling over its error: differences of a millionth of that error count less
# than all of the time.
_ACCURATE: Final = 1e6
# Prices of size: by how much one is raised until the limit is kept, how often, and how often
# the range of prices is halved then. It is small enough where so much of the limit is used.
_RAISE: Final = 4.0
_RAISES: Final = 40
_HALVES: Final = 8
_FULL: Final = 0.99
# Single changes by which what a price leaves of the limit is filled.
_FILLS: Final = 64
# Costs that differ by less than this share count as equal, because sums are rounded.
_SAME = 1e-12
# The largest number of searches between two steps, for each step that is wanted.
_TRIES = 4
# The name of the fastest labelling among those that a problem knows.
_FASTEST: Final = (b"", b"fastest")


def label(problem: LabelProblem, lam: float, start: Labelling | None = None) -> Labelling:
    """A labelling that no expansion move improves at ``lam``, seconds per squared error.

    Laws: it costs no more than ``start``. If all units may have label 0, nothing is pinned to
    another label, and casts from a format to itself take no time, it costs no more than the
    best assignment of label 0 and any one other label; with two formats it is then optimal.
    For more formats it is the best of all if the problem is small (see ``improved``).
    Where the problem has a limit, it keeps that if any labelling was found that does.
    Deterministic.
    """

    def find(priced: LabelProblem) -> Labelling:
        at = None if start is None else evaluate(priced, start.label)
        return _by_moves(priced, lam, at)

    return improved(problem, lam, limited(problem, lam, find))


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

    Law: error grows and time falls strictly, and all keep the problem's limit. The envelope is
    of the labellings that moves find, which are optimal for two formats only. At most
    ``max_steps`` are returned, evenly spread along it. The search is not refined between steps
    whose errors lie outside ``errors``.
    """
    known = problem.known
    fastest = known.get(_FASTEST) or known.setdefault(_FASTEST, label(problem, 0.0))
    slowest = highest(problem) if problem.limit is None else _most_accurate(problem, fastest)
    labellings = [one for one in (slowest, fastest) if problem.fits(one.label)]
    waiting = [(slowest, fastest)] if len(labellings) > 1 else []
    for _ in range(_TRIES * max_steps):
        if not waiting:
            break
        high, low = waiting.pop(0)
        if low.error <= high.error or low.time_s >= high.time_s:
            continue
        if low.error <= errors[0] or high.error > errors[1]:
            continue
        lam = (high.time_s - low.time_s) / (low.error - high.error)
        ends = high.label.tobytes(), low.label.tobytes()
        if ends not in known:
            find = partial(_between, lam=lam, high=high.label, low=low.label)
            known[ends] = improved(problem, lam, limited(problem, lam, find))
        between = known[ends]
        if between.cost(lam) < low.cost(lam) - _SAME * low.cost(lam):
            labellings.append(between)
            waiting += [(high, between), (between, low)]
    return _thinned(_pareto(labellings), max_steps)


def _most_accurate(problem: LabelProblem, fastest: Labelling) -> Labelling:
    """A labelling of the least error within the limit, the fastest of about equal ones."""
    lam = _ACCURATE * fastest.time_s / fastest.error if fastest.error > 0 else 0.0
    return label(problem, lam, fastest)


def smallest(problem: LabelProblem) -> Labelling:
    """A labelling that takes least of what is limited, the most accurate of equal ones."""
    assert problem.limit is not None
    sizes = replace(
        problem.limit.sizes,
        time=np.where(np.isfinite(problem.time), problem.limit.sizes.time, np.inf),
        error=problem.error,
        roundings=problem.roundings,
    )
    least = label(sizes, 0.0)
    lam = least.time_s / (_ACCURATE * least.error) if least.error > 0 else 0.0
    return evaluate(problem, label(sizes, lam, least).label)


def limited(
    problem: LabelProblem, lam: float, find: Callable[[LabelProblem], Labelling]
) -> Labelling:
    """The best labelling at ``lam`` within the problem's limit that prices of size lead to.

    ``find`` gives a labelling of little cost at ``lam`` of a problem without limit. In such a
    problem sizes have a price, the least at which the limit is kept: Lagrange's multiplier.
    What that leaves of the limit single changes fill. Where nothing keeps the limit, the
    result does not, either.
    """
    limit = problem.limit
    free = find(problem.priced(0.0))
    if limit is None or limit.most < 0 or problem.fits(free.label):
        return evaluate(problem, free.label)
    # Prices at which the limit is broken and kept; the first guess is the mean cost of a unit.
    broken, kept = 0.0, max(free.cost(lam), 1e-300) / max(limit.most, 1.0)
    known: list[Labelling] = []
    for _ in range(_RAISES):
        labelling = find(problem.priced(kept))
        if problem.fits(labelling.label):
            known.append(labelling)
            break
        broken, kept = kept, _RAISE * kept
    if not known:
        return evaluate(problem, free.label)
    for _ in range(_HALVES):
        if limit.size(known[-1].label) >= _FULL * limit.most:
            break
        price = math.sqrt(broken * kept) if broken else kept / _RAISE
        labelling = find(problem.priced(price))
        if problem.fits(labelling.label):
            kept = price
            known.append(labelling)
        else:
            broken = price
    best = min((evaluate(problem, x.label) for x in known), key=lambda x: x.cost(lam))
    return _filled(problem, lam, best)


def _filled(problem: LabelProblem, lam: float, at: Labelling) -> Labelling:
    """``at`` with single units changed, as long as that costs less and keeps the limit."""
    limit = problem.limit
    assert limit is not None
    for _ in range(_FILLS):
        change = flips(problem, at.label)
        more = change.total_s + lam * change.error
        room = limit.most - limit.size(at.label)
        more = np.where(flips(limit.sizes, at.label).total_s <= room, more, np.inf)
        unit, to = np.unravel_index(int(more.argmin()), more.shape)
        changed = at.label.copy()
        changed[unit] = to
        better = evaluate(problem, changed)
        if not problem.fits(changed) or better.cost(lam) >= at.cost(lam) * (1 - _SAME):
            break
        at = better
    return at


def _between(problem: LabelProblem, lam: float, high: Ints, low: Ints) -> Labelling:
    """What moves find at ``lam``, where two steps cost the same.

    Among more than two formats units in which both steps agree keep their label. With all
    units free moves find labellings that cost at most 0.09% less, in eight times the time
    (10,000 units of three formats).
    """
    if problem.labels == 2:
        return _by_moves(problem, lam, evaluate(problem, high))
    free = high != low
    part = problem.part(free, high)
    label = high.copy()
    label[free] = _by_moves(part, lam, evaluate(part, high[free])).label
    return evaluate(problem, label)


def _pareto(found: Iterable[Labelling]) -> list[Labelling]:
    """The labellings that no other one beats in both time and error."""
    kept: list[Labelling] = []
    for labelling in sorted(found, key=lambda x: (x.error, x.time_s)):
        if not kept or labelling.time_s < kept[-1].time_s:
            kept.append(labelling)
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
    low = solve(move.problem(), 1.0)
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
        weight -= np.minimum(weight.min(axis=1, keepdims=True), 0.0)  # differences decide
        stays = self.label == self.to
        return self.builder.problem(
            time_high=np.where(stays, 0.0, weight[units, self.label]),
            time_low=np.where(stays, 0.0, weight[:, self.to]),
            error=np.zeros(len(units)),
        )

    def _casts(self) -> None:
        of, to = self.of, self.to
        producer_sides, value = self.sides[of.producer], np.arange(len(of.producer))
        row, unit = of.consumers.row, of.consumers.unit
        maker = self.side[of.producer]
        # A cast to ``to`` is paid if any consumer has it; more if the producer does not.
        now, then = of.cast[producer_sides, to, value], of.cast[to, to, value]
        then = np.where(maker >= 0, np.minimum(now, then), now)
        self.builder.add(
            np.full(len(producer_sides), PINNED_HIGH), row, self.side[unit], down=then
        )
        self.builder.add(maker, row, self.side[unit], down=now - then)
        for other in range(of.labels):
            if other == to:
                continue
            keeps = self.sides[unit] == other
            rows, left = row[keeps], self.side[unit[keeps]]
            # One to ``other`` is paid while a consumer keeps it; more if the producer changes.
            now, then = of.cast[producer_sides, other, value], of.cast[to, other, value]
            then = np.where(maker >= 0, np.maximum(now, then), now)
            self.builder.add(np.full(len(producer_sides), PINNED_LOW), rows, left, up=now)
            self.builder.add(maker, rows, left, up=then - now)

    def _roundings(self) -> None:
        for number, rounding in enumerate(self.of.roundings, start=1):
            row, unit = rounding.rows.row, rounding.rows.unit
            priced = self.lam * rounding.error
            if number == self.to:
                nobody = np.full(len(priced), PINNED_HIGH)
                self.builder.add(nobody, row, self.side[unit], error=priced)
            else:
                has = self.sides[unit] == number
                everybody = np.full(len(priced), PINNED_LOW)
                self.builder.add(everybody, row[has], self.side[unit[has]], up=priced)
