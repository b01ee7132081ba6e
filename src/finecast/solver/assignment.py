"""The assignment problem for two formats, and the cost of an assignment.

The formats are *high* (the model's own) and *low*. A unit is an op, or the ops that the engine
fuses into one kernel, and gets one format.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finecast.errors import RuleConflictError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

PINNED_HIGH = -1
PINNED_LOW = -2


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An assignment problem: the cost of any set of low units at a price ``lam`` of error.

        cost = sum time + sum casts + lam * (sum unit error + sum value_error where rounded)

    A value is cast down once if its producer is high and any consumer low, up once if its
    producer is low and any consumer high, and rounded if its producer or any consumer is low.

    Args:
        time_high: float64[n], seconds; inf where high is not permitted.
        time_low: float64[n], seconds; inf where low is not permitted.
        error: float64[n], squared error added when the unit is low; finite, >= 0.
        producer: int64[m], the unit that makes each value, or ``PINNED_HIGH``/``PINNED_LOW``.
        consumer_ptr: int64[m + 1], CSR offsets into ``consumer_unit``.
        consumer_unit: int64[...], consuming units or pins (a graph output: PINNED_HIGH).
        down_cost: float64[m], seconds of one cast high -> low; finite, >= 0.
        up_cost: float64[m], seconds of one cast low -> high; finite, >= 0.
        value_error: float64[m], squared error of rounding the value; finite, >= 0.

    Raises:
        RuleConflictError: If a unit may be neither high nor low.
        ValueError: If the arrays' sizes or entries do not fit.
    """

    time_high: Floats
    time_low: Floats
    error: Floats
    producer: Ints
    consumer_ptr: Ints
    consumer_unit: Ints
    down_cost: Floats
    up_cost: Floats
    value_error: Floats

    def __post_init__(self) -> None:
        """Check shapes, ranges and that each unit has a permitted side."""
        n, m = len(self.time_high), len(self.producer)
        per_unit = (self.time_low, self.error)
        per_value = (self.down_cost, self.up_cost, self.value_error)
        if any(len(a) != n for a in per_unit) or any(len(a) != m for a in per_value):
            raise ValueError(f"arrays do not agree on {n} groups and {m} values")
        if len(self.consumer_ptr) != m + 1 or self.consumer_ptr[-1] != len(self.consumer_unit):
            raise ValueError(f"consumer_ptr is not CSR offsets of {m} values")
        for array in (self.error, *per_value):
            if not bool(np.all((array >= 0) & (array < np.inf))):
                raise ValueError("errors and cast costs must be finite and not negative")
        for array in (self.time_high, self.time_low):
            if not bool(np.all(array >= 0)):
                raise ValueError("times must be numbers and not negative")
        for array in (self.producer, self.consumer_unit):
            if len(array) and not PINNED_LOW <= array.min() <= array.max() < n:
                raise ValueError(f"group index outside {PINNED_LOW}..{n - 1}")
        neither = np.flatnonzero(np.isinf(self.time_high) & np.isinf(self.time_low))
        if len(neither):
            raise RuleConflictError(
                "neither format is permitted",
                where=f"precision group {neither[0]}",
                fix="relax a rule that forbids one of the formats for it",
            )

    @property
    def consumer_value(self) -> Ints:
        """int64[...]: the index of the value that each entry of ``consumer_unit`` reads."""
        return np.repeat(np.arange(len(self.producer)), np.diff(self.consumer_ptr))


class ProblemBuilder:
    """Builds a problem from blocks of values; costs that are not given are zero."""

    def __init__(self) -> None:
        self._producer: list[Ints] = []
        self._entries: list[tuple[Ints, Ints]] = []
        self._costs: list[tuple[Floats, Floats, Floats]] = []
        self._rows = 0

    def add(
        self,
        producer: Ints,
        row: Ints,
        unit: Ints,
        *,
        down: Floats | None = None,
        up: Floats | None = None,
        error: Floats | None = None,
    ) -> None:
        """Add a value for each ``producer``; unit ``unit[i]`` reads the block's ``row[i]``."""
        zeros = np.zeros(len(producer))
        self._producer.append(producer)
        self._entries.append((row + self._rows, unit))
        self._costs.append(
            (
                zeros if down is None else down,
                zeros if up is None else up,
                zeros if error is None else error,
            )
        )
        self._rows += len(producer)

    def problem(self, *, time_high: Floats, time_low: Floats, error: Floats) -> Problem:
        """The problem of all added values, with the units' own times and errors."""
        row = np.concatenate([r for r, _ in self._entries])
        unit = np.concatenate([u for _, u in self._entries])
        order = np.argsort(row, kind="stable")
        down, up, rounded = (np.concatenate(c) for c in zip(*self._costs, strict=True))
        return Problem(
            time_high=time_high,
            time_low=time_low,
            error=error,
            producer=np.concatenate(self._producer),
            consumer_ptr=np.searchsorted(row[order], np.arange(self._rows + 1)),
            consumer_unit=unit[order],
            down_cost=down,
            up_cost=up,
            value_error=rounded,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainProfile:
    """Time, error and number of casts at each step of a growing chain of low sets."""

    time_s: Floats
    error: Floats
    casts: Ints


def total_by(label: Ints, amount: Floats | Bools, count: int) -> Floats:
    """Sum of ``amount`` for each label below ``count``."""
    # bincount of nothing gives integers
    return np.bincount(label, amount, count).astype(np.float64, copy=False)


def chain_profile(problem: Problem, order: Ints, steps: int) -> ChainProfile:
    """Cost at each step of a chain: unit u is low from step ``order[u]`` on, ``steps``: never.

    A value is cast down from the first low consumer's step to its producer's, up from its
    producer's to the last consumer's, and rounded from the first of all on. So each cost is
    added at the step where it begins, subtracted where it ends, and summed up at last.
    """
    first, never = order == 0, order >= steps
    switch = ~(first | never)
    gain = problem.time_low[switch] - problem.time_high[switch]
    time = total_by(order[switch], gain, steps + 1)
    time[0] = np.where(first, problem.time_low, problem.time_high).sum()
    error = total_by(order, problem.error, steps + 1)
    sides = np.concatenate([order, [0, steps]])  # looked up by PINNED_LOW, PINNED_HIGH
    producer_steps, consumer_steps = sides[problem.producer], sides[problem.consumer_unit]
    earliest = np.full(len(producer_steps), steps)
    latest = np.zeros(len(producer_steps), dtype=np.int64)
    np.minimum.at(earliest, problem.consumer_value, consumer_steps)
    np.maximum.at(latest, problem.consumer_value, consumer_steps)
    rounded = np.minimum(producer_steps, earliest)
    error += total_by(rounded, problem.value_error, steps + 1)
    casts = np.zeros(steps + 1)
    for begin, end, cost in (
        (earliest, producer_steps, problem.down_cost),
        (producer_steps, latest, problem.up_cost),
    ):
        cast = (begin < end) & (cost > 0)
        for at, sign in ((begin[cast], 1.0), (end[cast], -1.0)):
            time += sign * total_by(at, cost[cast], steps + 1)
            casts += sign * np.bincount(at, minlength=steps + 1)
    return ChainProfile(
        time_s=np.cumsum(time[:steps]),
        error=np.cumsum(error[:steps]),
        casts=np.cumsum(casts[:steps]).astype(np.int64),
    )
