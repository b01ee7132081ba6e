"""Sums in a given order, of which every partial sum is rounded to a format.

Floating-point addition is not associative: devices, and kernels of one device, add up the
same numbers in different orders and get different sums. Law: an order gives the same bits
on every machine, because each addition is one operation of numpy's on whole arrays; sums
that are exact, as those of small integers, are equal in all orders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial, reduce
from itertools import chain, islice
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from finecast.numbers.formats import Format

Floats: TypeAlias = NDArray[np.float32]

# Elements of the results that are summed at a time, and of a row of them: the partial sums of
# so many stay in a processor's cache, and what is added to them is read once for many rows.
# OpenBLAS changes so many in one thread: to start others for each term would take longer.
_TILE: Final = 1 << 13
_WIDE: Final = 1 << 10
# Elements of an operand that are put into the order of the terms at a time, in a copy.
_HELD: Final = 1 << 22
# From so many elements on a call of BLAS takes less time than two of numpy's.
_BY_BLAS: Final = 1 << 11
# Products of numbers with 12 digits have 24, as many as fp32 has, if they are normal numbers.
_BEYOND_12_DIGITS: Final = np.uint32(0xFFF)
_SMALLEST_EXACT: Final = 2.0**-100

# Adds the terms from one place to another to a partial sum.
_AddProducts: TypeAlias = Callable[[NDArray[np.float32], int, int], NDArray[np.float32]]


class Scheme(Enum):
    """How a sum of n terms is split into additions of two numbers."""

    SEQUENTIAL = "sequential"
    """One after the other, from the first to the last."""
    REVERSED = "reversed"
    """One after the other, from the last to the first."""
    PAIRWISE = "pairwise"
    """As a binary tree: the first 2^k terms, the largest such number below n, and the rest.

    A term is added to another one as in a chain: an accumulator rounds the first of a pair.
    """
    BLOCKED = "blocked"
    """Blocks of terms one after the other, then the blocks' sums one after the other."""
    SHUFFLED = "shuffled"
    """One after the other, in an order that is drawn at random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An order of summation, the same for all sums of a run.

    Attributes:
        scheme: How a sum is split.
        seed: Which of the random orders; for ``SHUFFLED`` alone.
    """

    scheme: Scheme
    seed: int = 0

    @property
    def label(self) -> str:
        """Its name; a random order has a number."""
        drawn = self.scheme is Scheme.SHUFFLED
        return f"{self.scheme.value} {self.seed}" if drawn else self.scheme.value

    def places(self, count: int) -> NDArray[np.intp]:
        """The places of ``count`` terms in the order in which they are taken."""
        if self.scheme is Scheme.SHUFFLED:
            return np.random.default_rng(self.seed).permutation(count)
        places = np.arange(count)
        return places[::-1] if self.scheme is Scheme.REVERSED else places


def orders(count: int, *, blocked: bool) -> tuple[Order, ...]:
    """``count`` orders: each scheme once, then random ones.

    ``blocked`` says whether the device states a length of blocks.
    """
    schemes = [s for s in Scheme if s is not Scheme.SHUFFLED]
    named = [Order(scheme=s) for s in schemes if blocked or s is not Scheme.BLOCKED]
    drawn = (Order(scheme=Scheme.SHUFFLED, seed=seed) for seed in range(count))
    return tuple(islice(chain(named, drawn), count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summation:
    """How terms are added up.

    Attributes:
        format: That of the partial sums. Where it is not fp32 a term is added to the partial
            sum exactly, as a fused multiply-add does, and the result is rounded once.
        block: Terms of a block for ``BLOCKED``; 0 if the device states none.
    """

    order: Order
    format: Format = Format.FP32
    block: int = 0

    def products(self, a: Floats, b: Floats) -> Floats:
        """The matrix products ``a @ b``; products of two numbers are rounded to fp32.

        They are exact where both have at most 12 digits, as bf16, fp16, tf32 and fp8 have.

        Args:
            a: Of shape [batch, rows, terms].
            b: Of shape [batch, terms, columns]; either may have a batch of 1.
        """
        if a.shape[1] > b.shape[2]:  # numpy's inner loops run along the last axis
            return self.products(b.transpose(0, 2, 1), a.transpose(0, 2, 1)).transpose(0, 2, 1)
        out = np.zeros((max(len(a), len(b)), a.shape[1], b.shape[2]), np.float32)
        if out.size and a.shape[2]:
            for rows in _pieces(a.shape[1], len(a) * a.shape[2]):
                for columns in _pieces(b.shape[2], len(b) * b.shape[1]):
                    self._multiply(a[:, rows], b[:, :, columns], out[:, rows, columns])
        return out

    def _multiply(self, a: Floats, b: Floats, out: Floats) -> None:
        """Compute the matrix products into ``out``."""
        places = self.order.places(a.shape[2])
        left = np.ascontiguousarray(a.transpose(2, 0, 1)[places])[..., None]
        right = np.ascontiguousarray(b.transpose(1, 0, 2)[places])[:, :, None]
        exact = self.format is Format.FP32 and _are_exact(a, b)
        with np.errstate(over="ignore", invalid="ignore"):
            for batch, rows, columns in _tiles(*out.shape):
                own, other = (
                    slice(None) if one.shape[1] == 1 else batch for one in (left, right)
                )
                factors = left[:, own, rows], right[:, other, :, columns]
                shape = out[batch, rows, columns].shape
                by_blas = exact and shape[1] * shape[2] >= _BY_BLAS
                add_products = _add_by_blas if by_blas else self._add_products
                add = partial(add_products, *factors)
                out[batch, rows, columns] = self._sum(add, shape, len(places))

    def sums(self, terms: Floats) -> Floats:
        """The sums of ``terms`` along the first axis."""
        ones = np.ones((1, 1, len(terms)), np.float32)
        rows = terms.reshape(1, len(terms), math.prod(terms.shape[1:]))
        return self.products(ones, rows).reshape(terms.shape[1:])

    def _sum(self, add_products: _AddProducts, shape: tuple[int, ...], count: int) -> Floats:
        """The sum of ``count`` terms, which ``add_products`` adds to a partial sum."""

        def added(start: int, end: int) -> Floats:
            return self._rounded(add_products(np.zeros(shape, np.float32), start, end))

        match self.order.scheme:
            case Scheme.PAIRWISE:
                return self._tree(added, count)
            case Scheme.BLOCKED if self.block:
                starts = range(0, count, self.block)
                blocks = (added(at, min(at + self.block, count)) for at in starts)
                return reduce(self._add, blocks)
            case _:
                return added(0, count)

    def _tree(self, added: Callable[[int, int], Floats], count: int) -> Floats:
        """The sum as a binary tree of pairs, of which at most log2 n sums are held."""
        held: list[Floats] = []
        for number, start in enumerate(range(0, count, 2)):
            part = added(start, min(start + 2, count))
            while number & 1:
                part, number = self._add(held.pop(), part), number >> 1
            held.append(part)
        total = held.pop()
        while held:
            total = self._add(held.pop(), total)
        return total

    def _add_products(
        self, left: Floats, right: Floats, total: Floats, start: int, end: int
    ) -> Floats:
        """``total`` and the products from ``start`` to ``end``, added one by one."""
        term = np.empty_like(total)
        for k in range(start, end):
            total = self._add(total, np.multiply(left[k], right[k], out=term))
        return total

    def _add(self, total: Floats, term: Floats) -> Floats:
        """``total``, to which ``term`` was added in place."""
        if self.format is Format.FP32:
            return np.add(total, term, out=total)
        return self._rounded(np.add(total, term, dtype=np.float64))

    def _rounded(self, numbers: NDArray[np.floating]) -> Floats:
        if self.format is Format.FP32:
            return numbers.astype(np.float32, copy=False)
        return numbers.astype(self.format.dtype).astype(np.float32)


def _are_exact(a: Floats, b: Floats) -> bool:
    """Whether fp32 has each product of a number of ``a`` and one of ``b``.

    Then a fused multiply-add, which BLAS may use, gives what a product and a sum give.
    """
    least = 1.0
    for numbers in (np.ascontiguousarray(a), np.ascontiguousarray(b)):
        if (numbers.view(np.uint32) & _BEYOND_12_DIGITS).any():
            return False
        if not np.isfinite(numbers).all():  # BLAS skips products by 0, which may be NaN
            return False
        sizes = np.abs(numbers)
        least *= float(np.min(sizes, where=sizes > 0, initial=np.inf))
    return least >= _SMALLEST_EXACT


def _add_by_blas(left: Floats, right: Floats, total: Floats, start: int, end: int) -> Floats:
    """``total`` and exact products, added one by one: each is one update of rank 1."""
    add_product = _rank_1_update()
    for i, part in enumerate(total):
        columns = left[:, i if left.shape[1] > 1 else 0, :, 0]
        rows = right[:, i if right.shape[1] > 1 else 0, 0]
        sums = part.T  # which BLAS changes in place, as its columns lie one after the other
        for k in range(start, end):
            add_product(1.0, rows[k], columns[k], a=sums, overwrite_a=1)
    return total


@cache
def _rank_1_update() -> Callable[..., Any]:
    """BLAS's ``sger``; scipy takes long to import for what does not add up."""
    from scipy.linalg import get_blas_funcs

    update: Any = get_blas_funcs("ger", dtype=np.float32)
    return update


def _pieces(count: int, size: int) -> Iterator[slice]:
    """Parts of ``count`` rows of ``size`` elements each, of which copies may be held."""
    some = max(1, _HELD // size)
    return (slice(first, first + some) for first in range(0, count, some))


def _tiles(batch: int, rows: int, columns: int) -> Iterator[tuple[slice, slice, slice]]:
    """Parts of a batch, of rows and of columns, of at most ``_TILE`` elements each."""
    wide = min(columns, _WIDE, _TILE)
    high = min(rows, max(1, _TILE // wide))
    deep = max(1, _TILE // (wide * high))
    for first in range(0, batch, deep):
        for row in range(0, rows, high):
            for column in range(0, columns, wide):
                yield (
                    slice(first, first + deep),
                    slice(row, row + high),
                    slice(column, column + wide),
                )
