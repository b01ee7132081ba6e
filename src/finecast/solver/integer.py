"""The best labelling of a small problem, by integer programming.

Expansion moves stop where no single move helps, which may be some percent from the best. As an
integer program the problem has a variable for each unit and label, and one for each cast that
a choice may need. HiGHS (in scipy) solves it by branch and bound, with few branches, because
the relaxation is nearly tight. The number of branches is limited, and never the time: a
frontier must not depend on how busy the machine is.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from scipy.sparse import csr_array

from finecast.solver.assignment import Bools, Floats, Ints
from finecast.solver.labelling import Labelling, LabelProblem, evaluate

# Variables of the largest program that is solved: 20 units with three formats and one cast of
# each. On random graphs of that size a frontier took 1.6 times as long as by moves alone, and
# a dense one of 60 units with five formats took a minute for one program.
_LARGEST: Final = 300
# Branches after which the best labelling so far is taken.
_MOST_NODES: Final = 50
# The scale of costs: HiGHS takes differences below 1e-6 for none.
_SCALE: Final = 1e3


def improved(problem: LabelProblem, lam: float, known: Labelling) -> Labelling:
    """The labelling of least cost at ``lam``, or ``known`` where no better one is found.

    Laws: it costs no more than ``known``. If the problem is small, and few branches suffice,
    no labelling costs less by more than 1e-6 of its cost. Deterministic.
    """
    scale = known.cost(lam)
    if not 0 < scale < np.inf or _size(problem) > _LARGEST:
        return known
    label = _Program(problem, lam).solved(_SCALE / scale)
    if label is None:
        return known
    found = evaluate(problem, label)
    return found if found.cost(lam) < scale else known


def _size(problem: LabelProblem) -> int:
    """How many variables the program has."""
    casts = int(np.count_nonzero((problem.cast > 0).any(axis=0)))
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
        self.lower: list[Floats] = [np.zeros(n * k), pins.ravel()]
        self.upper: list[Floats] = [allowed.astype(np.float64).ravel(), pins.ravel()]
        self.size = (n + k) * k
        # Entries of the constraints ``sum >= 0``: row, column, coefficient.
        self.entries: list[tuple[Ints, Ints, Floats]] = []
        self.rows = 0
        self._casts()
        for number, rounded in enumerate(problem.roundings, start=1):
            paid = self._added(lam * rounded.error)
            units = self._column(rounded.rows.unit, number)
            self._at_least(paid[rounded.rows.row][:, None], units)

    def solved(self, scale: float) -> Ints | None:
        """The best labels that were found; None if there are none."""
        import scipy.optimize

        optimize: Any = scipy.optimize  # its stubs take bounds for single numbers
        n, k = self.of.time.shape
        unit = np.arange(n).repeat(k)
        label = np.arange(n * k)
        ones = csr_array((np.ones(n * k), (unit, label)), shape=(n, self.size))
        limits: list[Any] = [optimize.LinearConstraint(ones, 1, 1)]
        if self.rows:
            row, column, factor = (np.concatenate(x) for x in zip(*self.entries, strict=True))
            matrix = csr_array((factor, (row, column)), shape=(self.rows, self.size))
            limits.append(optimize.LinearConstraint(matrix, 0, np.inf))
        whole = np.zeros(self.size)
        whole[: n * k] = 1
        found: Any = optimize.milp(
            scale * np.concatenate(self.cost),
            integrality=whole,
            bounds=optimize.Bounds(np.concatenate(self.lower), np.concatenate(self.upper)),
            constraints=limits,
            options={"node_limit": _MOST_NODES, "mip_rel_gap": 0.0},
        )
        return None if found.x is None else found.x[: n * k].reshape(n, k).argmax(axis=1)

    def _casts(self) -> None:
        """A cast is paid if the producer has the one label and any consumer the other.

        The casts of a value into a label, from every label, add up to 1 if a consumer has it.
        There is none from a label that the producer does not have.
        """
        of, k = self.of, self.of.labels
        row, unit = of.consumers.row, of.consumers.unit
        for to in range(k):
            costs = of.cast[:, to]
            values = np.flatnonzero((costs > 0).any(axis=0))
            if not len(values):
                continue
            usable = np.isfinite(costs[:, values])
            paid = self._added(np.where(usable, costs[:, values], 0.0).ravel(), usable.ravel())
            paid = paid.reshape(k, len(values))
            for source in range(k):
                made = self._column(of.producer[values], source)
                self._at_least(made[:, None], paid[source])
            number = np.full(len(of.producer), -1)
            number[values] = np.arange(len(values))
            read = number[row] >= 0
            self._at_least(paid[:, number[row[read]]].T, self._column(unit[read], to))

    def _column(self, unit: Ints, label: int) -> Ints:
        """The variables of units, or pins, having a label."""
        n, k = self.of.time.shape
        place = np.where(unit >= 0, unit, n - 1 - unit)
        return place * k + label

    def _added(self, cost: Floats, usable: Bools | None = None) -> Ints:
        """New variables with these costs."""
        count = len(cost)
        self.cost.append(cost)
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
