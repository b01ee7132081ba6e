"""Sums in a given order, of which every partial sum is rounded to a format.

Floating-point addition is not associative: devices, and kernels of one device, add up the
same numbers in different orders and get different sums. Law: an order gives the same bits
on every machine, because each addition is one operation of numpy's on whole arrays; sums
that are exact, as those of small integers, are equal in all orders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain, islice
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from finecast.numbers.formats import Format

Floats: TypeAlias = NDArray[np.float32]

# Elements of the results that are summed at a time: the partial sums of so many stay in a
# processor's cache, and ten of them take little memory.
_TILE: Final = 1 << 15


class Scheme(Enum):
    """How a sum of n terms is split into additions of two numbers."""

    SEQUENTIAL = "sequential"
    """One after the other, from the first to the last."""
    REVERSED = "reversed"
    """One after the other, from the last to the first."""
    PAIRWISE = "pairwise"
    """As a binary tree: the first 2^k terms, the largest such number below n, and the rest."""
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

    Args:
        count: How many.
        blocked: Whether the device states a length of blocks.
    """
    schemes = [s for s in Scheme if s is not Scheme.SHUFFLED]
    named = [Order(scheme=s) for s in schemes if blocked or s is not Scheme.BLOCKED]
    drawn = (Order(scheme=Scheme.SHUFFLED, seed=seed) for seed in range(count))
    return tuple(islice(chain(named, drawn), count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulator:
    """What adds up terms.

    Attributes:
        order: The order.
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
        places = self.order.places(a.shape[2])
        if not (out.size and places.size):
            return out
        left = np.ascontiguousarray(a.transpose(2, 0, 1)[places])[..., None]
        right = np.ascontiguousarray(b.transpose(1, 0, 2)[places])[:, :, None]
        for batch, rows, columns in _tiles(*out.shape):
            own, other = (slice(None) if one.shape[1] == 1 else batch for one in (left, right))
            factors = zip(left[:, own, rows], right[:, other, :, columns], strict=True)
            out[batch, rows, columns] = self._sum(factors, out[batch, rows, columns].shape)
        return out

    def sums(self, terms: Floats) -> Floats:
        """The sums of ``terms`` along the first axis."""
        ones = np.ones((1, 1, len(terms)), np.float32)
        rows = terms.reshape(1, len(terms), math.prod(terms.shape[1:]))
        return self.products(ones, rows).reshape(terms.shape[1:])

    def _sum(self, factors: Iterable[tuple[Floats, Floats]], shape: tuple[int, ...]) -> Floats:
        """The sum of the products of each pair, which stand in their order."""
        terms = (partial(np.multiply, *pair) for pair in factors)
        with np.errstate(over="ignore", invalid="ignore"):
            if self.order.scheme is Scheme.PAIRWISE:
                return self._tree(terms, shape)
            if self.order.scheme is not Scheme.BLOCKED:
                return self._chain(terms, shape)
            total = None
            for first in terms:
                block = chain([first], islice(terms, max(self.block, 1) - 1))
                part = self._chain(block, shape)
                total = part if total is None else self._add(total, part)
            assert total is not None
            return total

    def _chain(self, terms: Iterator[Callable[..., Floats]], shape: tuple[int, ...]) -> Floats:
        """The sum of the terms, one after the other."""
        buffer = np.empty(shape, np.float32)
        total = self._rounded(next(terms)(out=np.empty(shape, np.float32)))
        for term in terms:
            total = self._add(total, term(out=buffer))
        return total

    def _tree(self, terms: Iterator[Callable[..., Floats]], shape: tuple[int, ...]) -> Floats:
        """The sum of the terms as a binary tree, of which at most log2 n sums are held."""
        held: list[Floats] = []
        for number, term in enumerate(terms):
            part = self._rounded(term(out=np.empty(shape, np.float32)))
            while number & 1:
                part, number = self._add(held.pop(), part), number >> 1
            held.append(part)
        total = held.pop()
        while held:
            total = self._add(held.pop(), total)
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


def _tiles(batch: int, rows: int, columns: int) -> Iterator[tuple[slice, slice, slice]]:
    """Parts of a batch, of rows and of columns, of at most ``_TILE`` elements each."""
    wide = min(columns, _TILE)
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
