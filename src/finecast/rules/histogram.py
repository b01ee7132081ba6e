"""Histograms of a value's numbers, fine enough to choose the range of an encoding.

Bins are an eighth of a binade wide and signed; zeros are not counted. Histograms merge by
addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_PER_BINADE: Final = 8
# frexp exponents of fp32: from the smallest subnormal, 2**-149, to below 2**128.
_LOWEST: Final = -148
_BINADES: Final = 128 - _LOWEST + 1
_BINS: Final = _BINADES * _PER_BINADE
_SMALLEST_NORMAL: Final = np.float32(2.0**-126)
_SUBNORMAL_BINADES: Final = -125 - _LOWEST
# The low bits of an fp32 number that do not affect its bin; the sign bit among those left.
_DROPPED: Final = 23 - 3
_SIGN: Final = 1 << (31 - _DROPPED)


def _bins(numbers: NDArray[np.float32]) -> NDArray[np.int64]:
    """The bin of each of ``numbers``, which are finite and not 0."""
    fraction, exponent = np.frexp(np.abs(numbers))
    bins = ((fraction - 0.5) * (2 * _PER_BINADE)).astype(np.int64)
    bins += (exponent - _LOWEST).astype(np.int64) * _PER_BINADE
    return np.where(numbers > 0, bins, -1 - bins)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Histogram:
    """``counts[k]`` numbers are in bin ``bins[k]``; in ascending order, without empty bins.

    Bin b >= 0 has the positive numbers with frexp exponent ``b // 8 - 148``, in eighth
    ``b % 8`` of the binade; bin ``-1 - b`` has their negatives.
    """

    bins: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, numbers: NDArray[np.float32]) -> Histogram:
        """The histogram of finite numbers."""
        bits = np.ascontiguousarray(numbers).view(np.uint32)
        # By sign, exponent, and the first three bits of the fraction: the eighth of a binade.
        found = np.bincount(bits >> _DROPPED, minlength=2 * _SIGN).reshape(2, _SIGN)
        counts = np.zeros(2 * _BINS, np.int64)
        first = _SUBNORMAL_BINADES * _PER_BINADE
        normal = found[:, _PER_BINADE : _SIGN - _PER_BINADE]
        counts[_BINS + first :] = normal[0]
        counts[: _BINS - first] = normal[1, ::-1]
        if found[:, :_PER_BINADE].any():
            small = numbers[np.abs(numbers) < _SMALLEST_NORMAL]
            counts += np.bincount(_bins(small[small != 0]) + _BINS, minlength=len(counts))
        return cls._dense(counts)

    @classmethod
    def _dense(cls, counts: NDArray[np.int64]) -> Histogram:
        found = np.flatnonzero(counts)
        return cls(bins=found - _BINS, counts=counts[found])

    def merge(self, other: Histogram) -> Histogram:
        """The histogram of both sets of numbers; associative and commutative."""
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
        """Counts of both signs by exponent, starting at the smallest."""
        magnitude = np.where(self.bins < 0, -1 - self.bins, self.bins)
        counts = np.zeros(_BINADES, np.int64)
        np.add.at(counts, magnitude // _PER_BINADE, self.counts)
        return counts

    @property
    def edges(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The lower and the upper edge of each bin."""
        magnitude = np.where(self.bins < 0, -1 - self.bins, self.bins)
        binade, eighth = np.divmod(magnitude, _PER_BINADE)
        width = np.exp2(binade + _LOWEST) / (2.0 * _PER_BINADE)
        near = width * (_PER_BINADE + eighth)
        far = near + width
        below = self.bins < 0
        return np.where(below, -far, near), np.where(below, -near, far)
