"""How often a value's numbers fall where, fine enough to choose a range by.

Histograms are merged by addition. Bins are an eighth of a binade wide, of either sign; zeros
are counted elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_PER_BINADE: Final = 8
# frexp exponents of fp32: from the smallest subnormal, 2**-149, to below 2**128.
_LOWEST: Final = -148
_BINADES: Final = 128 - _LOWEST + 1
_BINS: Final = _BINADES * _PER_BINADE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Histogram:
    """``counts[k]`` numbers lie in bin ``bins[k]``; bins rise, and empty ones are left out.

    Bin b of positive numbers is that of exponent ``b // 8`` and of the eighth ``b % 8``;
    that of the same numbers below zero is ``-1 - b``.
    """

    bins: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, numbers: NDArray[np.floating[Any]]) -> Histogram:
        """Of finite numbers other than 0."""
        fraction, exponent = np.frexp(np.abs(numbers))
        bins = ((fraction - 0.5) * (2 * _PER_BINADE)).astype(np.int32)
        bins += (exponent - _LOWEST) * _PER_BINADE
        bins = np.where(numbers > 0, bins, -1 - bins) + _BINS
        return cls._dense(np.bincount(bins))

    @classmethod
    def _dense(cls, counts: NDArray[np.int64]) -> Histogram:
        found = np.flatnonzero(counts)
        return cls(bins=found - _BINS, counts=counts[found])

    def merge(self, other: Histogram) -> Histogram:
        """Of both sets of numbers; associative and commutative."""
        counts = np.zeros(2 * _BINS, np.int64)
        for one in (self, other):
            counts[one.bins + _BINS] += one.counts
        return Histogram._dense(counts)

    def __eq__(self, other: object) -> bool:
        """Whether it has the same bins and counts."""
        if not isinstance(other, Histogram):
            return NotImplemented
        same = np.array_equal(self.bins, other.bins)
        return same and np.array_equal(self.counts, other.counts)

    @property
    def binades(self) -> NDArray[np.int64]:
        """Counts by exponent, from the smallest on, of both signs."""
        magnitude = np.where(self.bins < 0, -1 - self.bins, self.bins)
        counts = np.zeros(_BINADES, np.int64)
        np.add.at(counts, magnitude // _PER_BINADE, self.counts)
        return counts

    @property
    def edges(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The lower and the upper end of each bin."""
        magnitude = np.where(self.bins < 0, -1 - self.bins, self.bins)
        binade, eighth = np.divmod(magnitude, _PER_BINADE)
        width = np.exp2(binade + _LOWEST) / (2.0 * _PER_BINADE)
        near = width * (_PER_BINADE + eighth)
        far = near + width
        below = self.bins < 0
        return np.where(below, -far, near), np.where(below, -near, far)
