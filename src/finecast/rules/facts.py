"""Facts: statistics of each value, observed in runs of the fp32 model.

A value's magnitudes are kept as a histogram over binades: it gives the share that overflows
or underflows in any format, and the histograms of several batches add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.rules.histogram import Histogram

# The frexp exponent of the first binade: that of the smallest subnormal, 2**-149.
_LOWEST: Final = -148


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFacts:
    """Magnitudes of one value over all observed elements, and its range.

    ``lowest`` and ``highest`` are the least and largest finite element, inf and -inf if there
    is none. ``histogram`` counts the finite nonzero elements; ``binades[k]`` those with
    magnitude in [2**(k-149), 2**(k-148)), which have frexp exponent ``k - 148``.
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

    @classmethod
    def of(cls, array: NDArray[np.generic]) -> ValueFacts:
        """Facts of one array."""
        x = np.asarray(array, dtype=np.float32).ravel()
        is_finite = np.isfinite(x)
        finite = x if is_finite.all() else x[is_finite]
        nans = int(np.isnan(x).sum()) if finite.size < x.size else 0
        histogram = Histogram.of(finite)
        nonzero = int(histogram.counts.sum())
        lowest = float(finite.min(initial=math.inf))
        highest = float(finite.max(initial=-math.inf))
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

    @property
    def binades(self) -> NDArray[np.int64]:
        """Counts by magnitude."""
        return self.histogram.binades

    def flushed_share(self, fmt: Format) -> float:
        """Share of all elements that are nonzero and round to zero in ``fmt``."""
        return self._share_below(fmt.smallest_subnormal / 2)

    def subnormal_share(self, fmt: Format) -> float:
        """Share of all elements that are nonzero and below the normal range of ``fmt``."""
        return self._share_below(fmt.smallest_normal)

    def _share_below(self, power_of_two: float) -> float:
        """Share of elements below a power of two, which all limits of formats are."""
        top = math.frexp(power_of_two)[1] - _LOWEST
        below = int(self.binades[: max(top, 0)].sum())
        return below / self.count if self.count else 0.0


def _smallest_nonzero(finite: NDArray[np.float32]) -> float:
    """The least magnitude other than 0: fp32 magnitudes have the order of their bits."""
    magnitudes = finite.view(np.uint32) & np.uint32(0x7FFFFFFF)
    magnitudes -= np.uint32(1)  # 0 wraps around to the largest number
    return float((magnitudes.min() + np.uint32(1)).view(np.float32))


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
