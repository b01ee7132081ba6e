"""Slices of an output whose numbers have different units, found from what fp32 gives.

A detector may give boxes in pixels and scores between 0 and 1 in one tensor. The relative
error of all its numbers is that of the boxes then, whatever becomes of the scores. So an
output is compared by slices along an axis, and the worst slice counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.errors import UsageError

_Array = NDArray[np.generic]

# Indices of an axis are slices of their own where even the median number of the larger ones is
# so many times as large as the largest number of the others: three binary digits. Of normal
# numbers the spreads then differ by a factor of 40.
_APART: Final = 8.0
# Probabilities, cosines and normalized coordinates stay within [-1, 1] and have one unit: the
# small ones are unlikely, which is nothing that has to keep its digits.
BOUNDED: Final = 1.0
# Numbers that stay below this are no scores of what was detected, but channels that are dead
# on the data: their relative error says nothing.
_NOISE: Final = 1e-3
# Larger numbers count as this one, of which multiples and sums of two are finite.
_LARGEST: Final = float(np.finfo(np.float32).max) / (2 * _APART)
# Numbers by which an index of an axis is judged: of fewer the largest is often a small one.
LEAST: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Some indices along an axis of an output; all of it if ``indices`` is None."""

    axis: int = 0
    indices: tuple[int, ...] | None = None

    def of(self, array: _Array) -> _Array:
        """Those numbers of an output; of an array without such an axis all."""
        if self.indices is None or array.ndim <= self.axis:
            return array
        return np.take(array, self.indices, axis=self.axis)

    def __str__(self) -> str:
        """As it is written behind the output's name: ``[:, 4:24]``; empty for all."""
        if self.indices is None:
            return ""
        breaks = [b for a, b in pairwise(self.indices) if b != a + 1]
        starts = [self.indices[0], *breaks]
        ends = [a + 1 for a, b in pairwise(self.indices) if b != a + 1]
        runs = zip(starts, [*ends, self.indices[-1] + 1], strict=True)
        ranges = ",".join(str(a) if b == a + 1 else f"{a}:{b}" for a, b in runs)
        return f"[{':, ' * self.axis}{ranges}]"


WHOLE: Final = Slice()
"""All of an output."""


def slices_of(wanted: _Array, named: int | None = None) -> tuple[Slice, ...]:
    """The slices by which outputs are compared with fp32's; mostly one, which is all of it.

    Indices of an axis are apart if the numbers of some are always far larger than those of the
    others. The first axis is that of samples, which have one unit. Of an axis that the user
    named each index is a slice, unless its numbers are all 0.
    """
    if wanted.dtype.kind in "biucOSUmM" or wanted.ndim < 2:
        return (WHOLE,)
    if named is not None and -wanted.ndim <= named < wanted.ndim:
        axis = named % wanted.ndim
        alive = (np.moveaxis(wanted, axis, 0) != 0).any(axis=tuple(range(1, wanted.ndim)))
        slices = tuple(Slice(axis=axis, indices=(int(i),)) for i in np.flatnonzero(alive))
        return slices or (WHOLE,)
    with np.errstate(over="ignore", invalid="ignore"):
        sizes = np.abs(wanted.astype(np.float32))
    sizes[~np.isfinite(sizes)] = 0
    for axis in range(1, sizes.ndim):
        groups = groups_along(sizes, axis)
        if len(groups) > 1:
            return tuple(Slice(axis=axis, indices=group) for group in groups)
    return (WHOLE,)


def check_axis(named: int | None, outputs: Iterable[_Array]) -> None:
    """Raise UsageError if the user named an axis that no output has."""
    ranks = {array.ndim for array in outputs}
    if named is None or any(-rank <= named < rank for rank in ranks):
        return
    raise UsageError(
        f"no output has an axis {named}",
        where="--slices",
        fix=f"the outputs have {' or '.join(map(str, sorted(ranks)))} axes, the first is 0",
    )


def groups_along(sizes: NDArray[np.float32], axis: int) -> list[tuple[int, ...]]:
    """The indices of an axis by the size of their numbers, the largest first."""
    count = sizes.shape[axis]
    if count < 2 or sizes.size < LEAST * count:
        return []
    others = tuple(i for i in range(sizes.ndim) if i != axis)
    largest = np.minimum(sizes.max(axis=others), _LARGEST)
    ordered = np.sort(largest)[::-1]
    # No median is above the largest number: most axes are done here.
    if not (ordered[:-1] >= _APART * np.maximum(ordered[1:], _NOISE / _APART)).any():
        return []
    usual = np.median(np.minimum(sizes, _LARGEST), axis=others)
    order = np.argsort(-usual, kind="stable")
    least = usual[order][:-1]
    beyond = np.maximum.accumulate(largest[order][::-1])[::-1][1:]
    apart = (least > BOUNDED) & (least >= _APART * beyond) & (beyond >= _NOISE)
    starts = [0, *(np.flatnonzero(apart) + 1).tolist(), count]
    return [tuple(sorted(order[a:b].tolist())) for a, b in pairwise(starts)]
