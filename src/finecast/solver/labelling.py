"""The labelling problem for any number of formats, and the cost of a labelling.

Label 0 is the model's own format, labels from 1 on are low ones. With two formats it is
equivalent to ``assignment.Problem``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from finecast.errors import RuleConflictError
from finecast.solver.assignment import (
    PINNED_HIGH,
    PINNED_LOW,
    Bools,
    Floats,
    Ints,
    Problem,
    ProblemBuilder,
    total_by,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Lists of units in CSR form: row r is ``unit[ptr[r] : ptr[r + 1]]``.

    A negative entry is a pin: -1 stands for label 0, -2 for label 1, and so on.
    """

    ptr: Ints
    unit: Ints

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Rows:
        """Rows from lists."""
        ends = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        return cls(ptr=ends, unit=np.array([u for x in lists for u in x], dtype=np.int64))

    @property
    def row(self) -> Ints:
        """The row of each entry of ``unit``."""
        return np.repeat(np.arange(len(self.ptr) - 1), np.diff(self.ptr))

    def having(self, units: Bools) -> Bools:
        """Which rows have any of these units and pins."""
        return np.bincount(self.row, units[self.unit], len(self.ptr) - 1) > 0

    def renamed(self, rows: Bools, names: Ints) -> Rows:
        """Some of the rows, with ``names`` in place of units and pins."""
        ends = np.append(0, np.cumsum(np.diff(self.ptr)[rows]))
        return Rows(ptr=ends, unit=names[self.unit[rows[self.row]]])


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingErrors:
    """Roundings to one format.

    Each adds its squared error once, if any unit in its row has that format.
    """

    rows: Rows
    error: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelProblem:
    """A labelling problem: the cost of any labelling at a price ``lam`` of error.

        cost = sum time + sum casts + lam * (sum unit error + sum error rounded)

    A value is cast once to each format that any consumer has, from that of its producer.

    Args:
        time: float64[n, k], seconds of each unit in each format; inf where not permitted.
        error: float64[n, k], squared error added by the unit's own constants, and, negative
            or not, by errors of its result that its readers have in common; finite. No
            labelling's error is negative.
        producer: int64[m], the unit that makes each value, or a pin.
        consumers: The units, or pins, that read each value.
        cast: float64[k, k, m], seconds to cast each value, from the producer's format to a
            consumer's. From a format to itself it is zero, unless ops in that format store
            their results in another one.
        roundings: For each low format, label 1 first, its roundings.
        limit: What labellings may take of something else, such as bytes; None for any amount.

    Attributes:
        known: Labellings that searches along the envelope found, by the two between which
            they lie: the next search begins with these.

    Raises:
        RuleConflictError: If a unit may have no format.
        ValueError: If the arrays do not fit together.
    """

    time: Floats
    error: Floats
    producer: Ints
    consumers: Rows
    cast: Floats
    roundings: tuple[RoundingErrors, ...]
    limit: SizeLimit | None = None
    known: dict[tuple[bytes, bytes], Labelling] = field(
        init=False, repr=False, compare=False, default_factory=dict["tuple[bytes, bytes]", Any]
    )

    def __post_init__(self) -> None:
        """Check shapes, and that each unit has a permitted format."""
        k, m = self.time.shape[1], len(self.producer)
        if self.error.shape != self.time.shape or self.cast.shape != (k, k, m):
            raise ValueError(f"arrays do not agree on {k} formats and {m} values")
        if len(self.roundings) != k - 1 or len(self.consumers.ptr) != m + 1:
            raise ValueError(f"rows do not agree on {k} formats and {m} values")
        nowhere = np.flatnonzero(np.isinf(self.time).all(axis=1))
        if len(nowhere):
            raise RuleConflictError(
                "no format is permitted",
                where=f"precision group {nowhere[0]}",
                fix="relax a rule that forbids a format for it",
            )

    def __getstate__(self) -> list[Any]:
        """Pickled without what searches found."""
        return [{} if f.name == "known" else getattr(self, f.name) for f in fields(self)]

    @property
    def is_monotone(self) -> bool:
        """Whether no unit's own error is negative, so that more low units err no less."""
        return not (self.error < 0).any()

    @property
    def labels(self) -> int:
        """Number of formats."""
        return self.time.shape[1]

    def with_pins(self, label: Ints) -> Ints:
        """``label`` extended by the pins' labels: to be indexed by units and by pins."""
        return np.concatenate([label, np.arange(self.labels)[::-1]])

    def part(self, free: Bools, label: Ints) -> LabelProblem:
        """The problem of the units that are ``free``; all others keep their ``label``.

        Law: the costs of two labellings of the part differ by as much as those of all units.
        The part has no limit.
        """
        names = np.where(free, np.cumsum(free) - 1, -1 - label)
        names = np.concatenate([names, np.arange(-self.labels, 0)])
        either = np.concatenate([free, np.zeros(self.labels, dtype=np.bool_)])
        values = either[self.producer] | self.consumers.having(either)
        rounded = [(r, r.rows.having(either)) for r in self.roundings]
        return LabelProblem(
            time=self.time[free],
            error=self.error[free],
            producer=names[self.producer[values]],
            consumers=self.consumers.renamed(values, names),
            cast=self.cast[:, :, values],
            roundings=tuple(
                RoundingErrors(rows=r.rows.renamed(rows, names), error=r.error[rows])
                for r, rows in rounded
            ),
        )

    def fits(self, label: Ints) -> bool:
        """Whether a labelling keeps the limit."""
        return self.limit is None or self.limit.size(label) <= self.limit.most

    def priced(self, price: float) -> LabelProblem:
        """The problem without its limit, in which sizes cost ``price`` seconds a unit."""
        if self.limit is None or not price:
            return replace(self, limit=None)
        sizes = self.limit.sizes
        ends = self.consumers.ptr[-1] + sizes.consumers.ptr[1:]
        return replace(
            self,
            time=self.time + price * sizes.time,
            producer=np.concatenate([self.producer, sizes.producer]),
            consumers=Rows(
                ptr=np.concatenate([self.consumers.ptr, ends]),
                unit=np.concatenate([self.consumers.unit, sizes.consumers.unit]),
            ),
            cast=np.concatenate([self.cast, price * sizes.cast], axis=2),
            limit=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeLimit:
    """The most that a labelling may take of something that adds up as time does, as bytes.

    Attributes:
        sizes: What units, and copies of values in the formats of readers, take of it, in place
            of seconds. Its errors count nothing.
        most: The limit.
    """

    sizes: LabelProblem
    most: float

    def size(self, label: Ints) -> float:
        """What a labelling takes."""
        return evaluate(self.sizes, label).time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelling:
    """A format for each unit and what that costs.

    Attributes:
        label: The format of each unit.
        time_s: Seconds of units and casts.
        errors: float64[k], the squared errors of roundings to each format, label 0 first.
        casts: The number of casts that take time.
    """

    label: Ints = field(repr=False)
    time_s: float
    errors: Floats = field(repr=False)
    casts: int

    @property
    def error(self) -> float:
        """The sum of all squared errors."""
        return float(self.errors.sum())

    def cost(self, lam: float) -> float:
        """Seconds, with error at ``lam`` seconds a unit."""
        return self.time_s + lam * self.error


def evaluate(problem: LabelProblem, label: Ints) -> Labelling:
    """What a labelling costs; one that is not permitted takes infinite time."""
    unit = np.arange(len(label))
    sides = problem.with_pins(label)
    read = read_in(problem, sides)
    cost = problem.cast[sides[problem.producer], :, np.arange(len(problem.producer))]
    errors = total_by(label, problem.error[unit, label], problem.labels)
    for number, rounded in enumerate(problem.roundings, start=1):
        hit = np.bincount(
            rounded.rows.row, sides[rounded.rows.unit] == number, len(rounded.error)
        )
        errors[number] += rounded.error[hit > 0].sum()
    return Labelling(
        label=label,
        time_s=float(problem.time[unit, label].sum() + cost[read].sum()),
        errors=errors,
        casts=int(np.count_nonzero(read & (cost > 0))),
    )


def read_in(problem: LabelProblem, sides: Ints) -> Bools:
    """bool[m, k]: whether each value is read in each format."""
    read = np.zeros((len(problem.producer), problem.labels), dtype=np.bool_)
    read[problem.consumers.row, sides[problem.consumers.unit]] = True
    return read


def two_sided(problem: LabelProblem) -> Problem:
    """The problem of two labels as an assignment problem, for the exact solver.

    Law: every assignment has the time and the error of the same labelling. It has as many
    casts, too, if a cast to the value's own label takes no time, or as long as from the other.

    Raises:
        ValueError: If there are not two labels, a unit's error is negative, or a cast of a
            unit's result to its own label takes longer than from the other label.
    """
    if problem.labels != 2:
        raise ValueError(f"{problem.labels} labels, not 2")
    (high_high, high_low), (low_high, low_low) = problem.cast
    producer, row, unit = problem.producer, problem.consumers.row, problem.consumers.unit
    if np.any((producer >= 0) & ((high_high > low_high) | (low_low > high_low))):
        raise ValueError("a cast to a value's own label takes longer than from the other")
    # Readers on a side cost this whatever the producer's side, and the rest (``more_...``)
    # only if the producer is on the other side.
    down = np.where(producer == PINNED_HIGH, high_low, low_low)
    up = np.where(producer == PINNED_LOW, low_high, high_high)
    built = ProblemBuilder()
    more_down, more_up = (np.maximum(x, 0.0) for x in (high_low - down, low_high - up))
    built.add(producer, row, unit, down=more_down, up=more_up)
    if down.any():
        built.add(np.full(len(producer), PINNED_HIGH), row, unit, down=down)
    if up.any():
        built.add(np.full(len(producer), PINNED_LOW), row, unit, up=up)
    rounded = problem.roundings[0]
    nobody = np.full(len(rounded.error), PINNED_HIGH)
    built.add(nobody, rounded.rows.row, rounded.rows.unit, error=rounded.error)
    return built.problem(
        time_high=problem.time[:, 0], time_low=problem.time[:, 1], error=problem.error[:, 1]
    )
