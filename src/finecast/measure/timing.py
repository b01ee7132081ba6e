"""Latency on a noisy machine: what is compared runs in turns.

Law: in every round each callable runs once, so that a disturbance hits all of them; the
order is reversed from round to round, so that none always runs after the same other. Ratios
are taken within rounds, then their median.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from finecast.errors import UsageError

_ROUNDS_MAX = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Wall times of single calls, in seconds, in the order of the rounds."""

    samples_s: tuple[float, ...]

    @property
    def runs(self) -> int:
        """How many calls were timed."""
        return len(self.samples_s)

    @property
    def median_s(self) -> float:
        """Median time of a call."""
        return self.quantile_s(0.5)

    @property
    def p10_s(self) -> float:
        """The time that one call in ten stays under."""
        return self.quantile_s(0.1)

    @property
    def p90_s(self) -> float:
        """The time that nine calls in ten stay under."""
        return self.quantile_s(0.9)

    @property
    def iqr_s(self) -> float:
        """Distance between the quartiles."""
        return self.quantile_s(0.75) - self.quantile_s(0.25)

    @property
    def spread(self) -> float:
        """Distance between the quartiles as a share of the median."""
        return self.iqr_s / self.median_s

    def quantile_s(self, q: float) -> float:
        """The ``q`` quantile of the times."""
        return float(np.quantile(self.samples_s, q))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Median of the rounds' ratios and the quartiles around it."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """Distance between the quartiles."""
        return self.high - self.low


def latency(
    callables: Mapping[str, Callable[[], object]],
    *,
    min_time_s: float = 1.0,
    repeats: int = 10,
    warmup: int = 3,
) -> dict[str, Latency]:
    """Time the callables in turns, at least ``repeats`` rounds and ``min_time_s`` in all."""
    names = list(callables)
    for name in names:
        for _ in range(warmup):
            callables[name]()
    samples: dict[str, list[float]] = {name: [] for name in names}
    end = time.perf_counter() + min_time_s
    for turn in range(_ROUNDS_MAX if names else 0):
        if turn >= repeats and time.perf_counter() >= end:
            break
        for name in names if turn % 2 == 0 else reversed(names):
            call = callables[name]
            start = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - start)
    return {name: Latency(samples_s=tuple(times)) for name, times in samples.items()}


def ratio(a: Latency, b: Latency) -> Ratio:
    """Time of ``a`` over time of ``b``, round by round: above 1 where ``b`` is faster.

    Raises:
        UsageError: If the two were not timed in the same rounds.
    """
    if a.runs != b.runs or not a.runs:
        raise UsageError(
            f"cannot compare {a.runs} runs with {b.runs}", fix="time both in one call"
        )
    ratios = np.divide(a.samples_s, b.samples_s)
    low, median, high = (float(q) for q in np.quantile(ratios, (0.25, 0.5, 0.75)))
    return Ratio(median=median, low=low, high=high)
