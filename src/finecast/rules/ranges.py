"""Which range of a value an encoding with a scale covers: all of it, or what most lies in.

What lies beyond becomes the range's end; the rest has finer steps for it.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import numpy as np

from finecast.naming import look_up
from finecast.numbers.scaled import Grid
from finecast.rules.facts import ValueFacts

# At most this share of a value's numbers lies beyond each end: 99.99%, as engines' tools have
# it. Less cuts into what a network tells classes by (1-cos of ResNet-20's outputs fourfold).
_BEYOND: Final = 1e-4
# Ranges that are tried for the least error: shares of the whole one.
_SHARES: Final = np.linspace(1.0, 0.2, 81)


class Calibration(Enum):
    """How the range is taken from what was observed."""

    MINMAX = "minmax"
    PERCENTILE = "percentile"
    MSE = "mse"

    @classmethod
    def parse(cls, name: str) -> Calibration:
        """Read its name.

        Raises:
            UsageError: If it is none.
        """
        known = {c.value: c for c in cls}
        return look_up(name, known, what="calibration", where="--calibration")


def covered(seen: ValueFacts, grid: Grid, calibration: Calibration) -> tuple[float, float]:
    """The least and the largest number that codes of ``grid`` are to stand for.

    Laws: never beyond what was observed; of min-max exactly that.
    """
    if calibration is Calibration.PERCENTILE:
        return _percentile(seen)
    if calibration is Calibration.MSE:
        return _least_error(seen, grid)
    return seen.lowest, seen.highest


def _percentile(seen: ValueFacts) -> tuple[float, float]:
    lower, upper = seen.histogram.edges
    counts, most = seen.histogram.counts, _BEYOND * seen.count
    above = np.cumsum(counts[::-1])[::-1]  # as large as bin k, or larger
    high = upper[above > most].max(initial=0.0)
    low = lower[np.cumsum(counts) > most].min(initial=0.0)
    return max(float(low), seen.lowest), min(float(high), seen.highest)


def _least_error(seen: ValueFacts, grid: Grid) -> tuple[float, float]:
    """The range, shrunk at both ends alike, of the least squared error.

    Within it that of a step, or a small number's own, which becomes 0; beyond it the distance.
    """
    lower, upper = seen.histogram.edges
    numbers, counts = (lower + upper) / 2, seen.histogram.counts

    def error(share: float) -> float:
        low, high = share * min(seen.lowest, 0.0), share * max(seen.highest, 0.0)
        step = (high - low) / (grid.highest - grid.lowest)
        within = np.where(np.abs(numbers) < step / 2, numbers**2, step**2 / 12)
        beyond = np.maximum(numbers - high, low - numbers)
        return float(np.sum(counts * np.where(beyond > 0, beyond**2, within)))

    best = float(min(_SHARES, key=error))
    return best * seen.lowest, best * seen.highest
