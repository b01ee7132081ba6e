"""Facts: statistics of each value, and of its channels, observed in runs of the fp32 model.

A value's magnitudes are kept as a histogram over binades: it gives the share that overflows
or underflows in any format, and the histograms of several batches add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast.graph import Dim, Graph
from finecast.numbers.formats import Format

# Histograms of a value's numbers, fine enough to choose the range of an encoding.
#
# Bins are an eighth of a binade wide and signed; zeros are not counted. Histograms merge by
# addition.


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
# Numbers that are read at a time: 256 KiB of fp32, and 512 KiB for the places of their bins.
# The second level of a core's cache holds both.
_PART: Final = 1 << 16


def _in_parts(
    numbers: NDArray[np.float32], room: type[np.integer]
) -> Iterator[tuple[NDArray[np.uint32], NDArray[Any]]]:
    """The bits of ``numbers``, in parts, each with as much room of a type to work in."""
    bits = np.ascontiguousarray(numbers).ravel().view(np.uint32)
    held = np.empty(min(bits.size, _PART), room)
    for start in range(0, bits.size, _PART):
        part = bits[start : start + _PART]
        yield part, held[: part.size]


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
        # By sign, exponent, and the first three bits of the fraction: the eighth of a binade.
        tallies = np.zeros((2, _SIGN), np.int64)
        for bits, places in _in_parts(numbers, np.int64):
            # Unlike ``bincount`` it seeks no least and no largest place first.
            np.add.at(tallies.ravel(), np.right_shift(bits, _DROPPED, out=places), 1)
        counts = np.zeros(2 * _BINS, np.int64)
        first = _SUBNORMAL_BINADES * _PER_BINADE
        normal = tallies[:, _PER_BINADE : _SIGN - _PER_BINADE]
        counts[_BINS + first :] = normal[0]
        counts[: _BINS - first] = normal[1, ::-1]
        below = int(tallies[:, :_PER_BINADE].sum())
        if below and below > np.count_nonzero(numbers == 0):  # not only zeros
            small = numbers[np.abs(numbers) < _SMALLEST_NORMAL]
            counts += np.bincount(_bins(small[small != 0]) + _BINS, minlength=len(counts))
        return cls._dense(counts)

    @classmethod
    def _dense(cls, counts: NDArray[np.int64]) -> Histogram:
        places = np.flatnonzero(counts)
        return cls(bins=places - _BINS, counts=counts[places])

    def merge(self, other: Histogram) -> Histogram:
        """The histogram of both sets of numbers; associative and commutative."""
        counts = np.zeros(2 * _BINS, np.int64)
        for one in (self, other):
            counts[one.bins + _BINS] += one.counts
        return Histogram._dense(counts)

    def scaled(self, exponent: int) -> Histogram:
        """The histogram of the numbers times 2 to the power ``exponent``.

        What leaves the range of the bins is counted in the first or last.
        """
        below = self.bins < 0
        magnitude = np.where(below, -1 - self.bins, self.bins) + exponent * _PER_BINADE
        magnitude = np.clip(magnitude, 0, _BINS - 1)
        counts = np.zeros(2 * _BINS, np.int64)
        np.add.at(counts, np.where(below, -1 - magnitude, magnitude) + _BINS, self.counts)
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


Floats = NDArray[np.float64]


@dataclass(slots=True, kw_only=True, eq=False)
class Moments:
    """The second moments of a value: the sums of x times its transpose, x its last axis.

    They are those of two halves of the samples, so that what one half chooses is judged by the
    other. They are as large as two squares of that axis, so that ``read`` observes them, and
    counts the rows, when they are asked for. ``chosen`` keeps the encodings of weights that
    were found by them, by the weights' name and the size of their groups.
    """

    read: Callable[[], tuple[Floats, int]]
    chosen: dict[tuple[str, int], bytes] = field(default_factory=dict[tuple[str, int], bytes])


# The frexp exponent of the first binade: that of the smallest subnormal, 2**-149.
_FIRST_BINADE: Final = -148


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFacts:
    """Magnitudes of one value over all observed elements, and its range.

    ``lowest`` and ``highest`` are the least and largest finite element, inf and -inf if there
    is none. ``histogram`` counts the finite nonzero elements; ``binades[k]`` those with
    magnitude in [2**(k-149), 2**(k-148)), which have frexp exponent ``k - 148``.
    ``moments`` are those of a value that a product by a matrix reads.
    """

    shape: tuple[int, ...]
    count: int
    zeros: int
    nans: int
    infs: int
    largest: float
    smallest_nonzero: float
    lowest: float
    highest: float
    histogram: Histogram
    moments: Moments | None = field(default=None, compare=False)

    @classmethod
    def of(cls, array: NDArray[np.generic]) -> ValueFacts:
        """Facts of one array."""
        finite = x = np.asarray(array, dtype=np.float32).ravel()
        lowest, highest = _range(x)
        nans = 0
        if not (math.isfinite(lowest) and math.isfinite(highest)):  # NaN is in both
            finite = x[np.isfinite(x)]
            nans = int(np.isnan(x).sum())
            lowest, highest = _range(finite)
        histogram = Histogram.of(finite)
        nonzero = int(histogram.counts.sum())
        return cls(
            shape=tuple(array.shape),
            count=x.size,
            zeros=finite.size - nonzero,
            nans=nans,
            infs=x.size - finite.size - nans,
            largest=max(abs(lowest), abs(highest)) if nonzero else 0.0,
            smallest_nonzero=_smallest_nonzero(finite) if nonzero else math.inf,
            lowest=lowest,
            highest=highest,
            histogram=histogram,
        )

    @classmethod
    def unseen(cls, shape: Sequence[Dim] | None) -> ValueFacts:
        """Facts of a value of which no element was observed; free sizes count as 0."""
        sizes = (0,) if shape is None else (d if isinstance(d, int) else 0 for d in shape)
        return replace(cls.of(np.zeros(0, np.float32)), shape=tuple(sizes))

    def merge(self, other: ValueFacts) -> ValueFacts:
        """Facts of both sets of elements together; associative and commutative."""
        return replace(
            self,
            count=self.count + other.count,
            zeros=self.zeros + other.zeros,
            nans=self.nans + other.nans,
            infs=self.infs + other.infs,
            largest=max(self.largest, other.largest),
            smallest_nonzero=min(self.smallest_nonzero, other.smallest_nonzero),
            lowest=min(self.lowest, other.lowest),
            highest=max(self.highest, other.highest),
            histogram=self.histogram.merge(other.histogram),
            shape=max(self.shape, other.shape, key=math.prod),
        )

    def scaled(self, exponent: int) -> ValueFacts:
        """Facts of the numbers times 2 to the power ``exponent``.

        The moments stay: GPTQ asks for their ratios alone.
        """
        factor = 2.0**exponent
        return replace(
            self,
            largest=self.largest * factor,
            smallest_nonzero=self.smallest_nonzero * factor,
            lowest=self.lowest * factor,
            highest=self.highest * factor,
            histogram=self.histogram.scaled(exponent),
        )

    @property
    def binades(self) -> NDArray[np.int64]:
        """Counts by magnitude."""
        return self.histogram.binades

    def flushed_share(self, fmt: Format) -> float:
        """Share of all elements that are nonzero and round to zero in ``fmt``."""
        return self.share_below(fmt.smallest_subnormal / 2)

    def subnormal_share(self, fmt: Format) -> float:
        """Share of all elements that are nonzero and below the normal range of ``fmt``."""
        return self.share_below(fmt.smallest_normal)

    def share_below(self, limit: float) -> float:
        """Share of all elements that are nonzero and below ``limit``, or a few less.

        Exact for a power of two, as all limits of formats are; else for the one below it.
        """
        top = math.frexp(limit)[1] - _FIRST_BINADE
        below = int(self.binades[: max(top, 0)].sum())
        return below / self.count if self.count else 0.0


def _range(numbers: NDArray[np.float32]) -> tuple[float, float]:
    return float(numbers.min(initial=math.inf)), float(numbers.max(initial=-math.inf))


def _smallest_nonzero(finite: NDArray[np.float32]) -> float:
    """The least magnitude other than 0: fp32 magnitudes have the order of their bits."""
    least = 2**32 - 1
    for bits, doubled in _in_parts(finite, np.uint32):
        np.add(bits, bits, out=doubled)  # without the sign
        np.subtract(doubled, 1, out=doubled)  # 0 wraps around to the largest number
        least = min(least, int(doubled.min()))
    return float(np.uint32((least + 1) // 2).view(np.float32))


Facts = Mapping[int, ValueFacts]


def merge(a: Facts, b: Facts) -> dict[int, ValueFacts]:
    """Union of two observations."""
    merged = dict(a)
    for key, facts in b.items():
        merged[key] = merged[key].merge(facts) if key in merged else facts
    return merged


def first_nonfinite(graph: Graph, facts: Mapping[int, ValueFacts]) -> str | None:
    """Name of the first op, in the graph's order, that gives NaN or Inf; None if none does."""
    for node in graph.nodes:
        for index in node.outputs:
            seen = facts.get(index) if index is not None else None
            if seen is not None and seen.nans + seen.infs:
                return node.name
    return None


def facts_in(
    graph: Graph, facts: Mapping[int, ValueFacts], seen_in: Graph
) -> dict[int, ValueFacts]:
    """Facts of values of ``seen_in``, by the ids of the values of equal name in ``graph``."""
    names = {v.name: v.id for v in graph.values}
    values = seen_in.values
    return {names[values[i].name]: f for i, f in facts.items() if values[i].name in names}
