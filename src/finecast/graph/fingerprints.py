"""Fingerprints of constants: whether two hold the same numbers, and how far apart they are.

Laws: arrays whose numbers or whose order of numbers differ have different fingerprints, as far
as 64 bits tell. ``numbers`` and the axes as a set do not depend on the order of the axes, and
axes of size 1 do not count: exporters store the same weights transposed or with more axes. The
type does not count: fp16 weights equal the fp32 weights that a Cast makes of them.

Arrays are read in pieces, so that one in a file is never in memory as a whole.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, permutations
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

# Elements of a piece: its hashes stay in the processor's cache.
_PIECE: Final = 1 << 15
# Layouts that are compared at most. A kernel of four equal sizes has as many.
_MOST_LAYOUTS: Final = 24
# The multipliers of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
# generators", 2014).
_MULTIPLIERS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_HALF: Final = np.uint64(32)

Block = tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What identifies the content of an array.

    Attributes:
        numbers: A hash of the numbers in any order.
        axes: For each axis of more than one element its size, and a hash of the numbers at
            each place along it.
    """

    numbers: int
    axes: tuple[tuple[int, int], ...]


def fingerprint(array: NDArray[Any]) -> Fingerprint:
    """The fingerprint of ``array``; linear in its elements.

    Integers above 2^53 are compared as fp64 has them.
    """
    array = _squeezed(array)
    numbers, axes = 0, [0] * array.ndim
    for block in _blocks(array.shape):
        hashes = _hashes(array[block])
        sums = [_sum_along(hashes, axis) for axis in range(array.ndim)]
        numbers += int(hashes.sum(dtype=np.uint64))
        for axis, (part, there) in enumerate(zip(sums, block, strict=True)):
            # A sum of products of two hashes, modulo 2^64: any order of the blocks gives it.
            places = np.arange(there.start + 1, there.stop + 1, dtype=np.uint64)
            axes[axis] += int((part * _mixed(places)).sum(dtype=np.uint64))
    return Fingerprint(
        numbers=numbers % (1 << 64),
        axes=tuple(
            (n, h % (1 << 64)) for n, h in zip(array.shape, axes, strict=True) if n != 1
        ),
    )


def relative_difference(
    one: NDArray[Any], two: NDArray[Any], *, turned: bool = False
) -> float | None:
    """The norm of the difference of two arrays, relative to the larger of their norms.

    Numbers that are not finite in both are left out; infinite if other numbers of one are not
    finite than of the other. With ``turned`` the axes of ``two`` may have
    another order: the difference is that of the order that fits best. None if the arrays are
    no numbers, or not equally large.
    """
    if one.size != two.size or one.dtype.kind in "OSU" or two.dtype.kind in "OSU":
        return None
    one, two = _squeezed(one), _squeezed(two)
    if one.shape == two.shape and not turned:
        return _distance(one, two)
    orders = permutations(range(two.ndim))
    fitting = (o for o in orders if tuple(two.shape[i] for i in o) == one.shape)
    layouts = [two.transpose(order) for order in islice(fitting, _MOST_LAYOUTS)]
    distances = [_distance(one, layout) for layout in layouts or [two.reshape(one.shape)]]
    return min((d for d in distances if d is not None), default=None)


def _distance(one: NDArray[Any], two: NDArray[Any]) -> float | None:
    squares = np.zeros(3)
    with np.errstate(over="ignore", invalid="ignore"):
        for block in _blocks(one.shape):
            a, b = (_real(array[block]).ravel() for array in (one, two))
            finite = np.isfinite(a) & np.isfinite(b)
            if not (finite | (a == b) | (np.isnan(a) & np.isnan(b))).all():
                return math.inf
            a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
            squares += [a @ a, b @ b, (a - b) @ (a - b)]
    if not np.isfinite(squares).all():
        return None
    largest = max(squares[:2])
    return math.sqrt(squares[2] / largest) if largest else 0.0


def _squeezed(array: NDArray[Any]) -> NDArray[Any]:
    """Without axes of size 1; a number alone keeps one."""
    return array.reshape([n for n in array.shape if n != 1] or [1])


def _blocks(shape: tuple[int, ...], before: Block = ()) -> Iterator[Block]:
    """Slices that together are an array of ``shape``, each of few elements."""
    if not shape:
        yield before
        return
    inner = math.prod(shape[1:])
    step = max(_PIECE // max(inner, 1), 1)
    for start in range(0, shape[0], step):
        here = (*before, slice(start, min(start + step, shape[0])))
        if inner > _PIECE:
            yield from _blocks(shape[1:], here)
        else:
            yield (*here, *(slice(0, n) for n in shape[1:]))


def _real(array: NDArray[Any]) -> NDArray[np.float64]:
    if array.dtype.kind == "c":
        return np.stack([np.real(array), np.imag(array)], axis=-1).astype(np.float64)
    return array.astype(np.float64)


def _hashes(array: NDArray[Any]) -> NDArray[np.uint64]:
    """A hash of each element."""
    if array.dtype.kind in "OSU":  # text
        return np.array(
            [_text_hash(one) for one in array.ravel().tolist()], np.uint64
        ).reshape(array.shape)
    if array.dtype.kind == "c":
        return _hashes(np.real(array)) + np.uint64(3) * _hashes(np.imag(array))
    numbers = _real(array) + 0.0  # -0 is 0
    numbers[np.isnan(numbers)] = np.nan  # one of the many
    return _mixed(numbers.view(np.uint64))


def _text_hash(text: object) -> int:
    content = text if isinstance(text, bytes) else str(text).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Other bits for each number, all of which depend on all bits of it."""
    for multiplier in _MULTIPLIERS:
        bits = bits * multiplier
        bits ^= bits >> _HALF
    return bits


def _sum_along(hashes: NDArray[np.uint64], axis: int) -> NDArray[np.uint64]:
    """The sums of all but one axis."""
    others = tuple(i for i in range(hashes.ndim) if i != axis)
    return hashes.sum(axis=others, dtype=np.uint64)
