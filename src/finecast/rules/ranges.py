"""Calibration: the range of a value that an encoding with a scale covers.

Numbers outside the range are clipped to its ends; a smaller range has finer steps.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import numpy as np

from finecast.numbers.formats import Format, Grid
from finecast.rules.facts import ValueFacts

# The largest share of a value's numbers beyond each end: the 99.99th percentile, as in tools
# of engines. A smaller range clips numbers that decide about classes (ResNet-20's outputs had
# four times the cosine distance).
_BEYOND: Final = 1e-4
# Ranges that are tried for the least error, as shares of the observed range.
_SHARES: Final = np.linspace(1.0, 0.2, 81)


class Calibration(Enum):
    """How the range is chosen from the observed numbers.

    GPTQ chooses codes, those of weights by groups: ranges are as by MINMAX.
    """

    MINMAX = "minmax"
    PERCENTILE = "percentile"
    MSE = "mse"
    GPTQ = "gptq"

    def changes(self, fmt: Format) -> bool:
        """Whether codes in ``fmt`` are others than by default."""
        return self is not Calibration.MINMAX and self.suits(fmt)

    def suits(self, fmt: Format) -> bool:
        """Whether it changes codes in ``fmt``, or is the default of a format with scales."""
        by_group = bool(fmt.group_sizes)
        return {
            Calibration.MINMAX: fmt.has_scales,
            Calibration.PERCENTILE: fmt.needs_ranges,
            Calibration.MSE: fmt.needs_ranges or by_group,
            Calibration.GPTQ: by_group,
        }[self]


def covered(seen: ValueFacts, grid: Grid, calibration: Calibration) -> tuple[float, float]:
    """The least and the largest number that codes of ``grid`` shall represent.

    Laws: never beyond the observed range; min-max and GPTQ give exactly that range.
    """
    if calibration is Calibration.PERCENTILE:
        return _percentile(seen)
    if calibration is Calibration.MSE:
        return _least_error(seen, grid)
    return seen.lowest, seen.highest


def _percentile(seen: ValueFacts) -> tuple[float, float]:
    lower, upper = seen.histogram.edges
    counts, most = seen.histogram.counts, _BEYOND * seen.count
    above = np.cumsum(counts[::-1])[::-1]  # numbers in bin k and in larger ones
    high = upper[above > most].max(initial=0.0)
    low = lower[np.cumsum(counts) > most].min(initial=0.0)
    return max(float(low), seen.lowest), min(float(high), seen.highest)


def _least_error(seen: ValueFacts, grid: Grid) -> tuple[float, float]:
    """The observed range times the share, for both ends, that has the least squared error.

    Numbers within the range have the error of a step, those that become 0 their own square;
    numbers beyond have the squared distance to the range's end.
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
