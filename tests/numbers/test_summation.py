"""Sums in each order against explicit loops over single numbers, to the last digit."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from finecast.numbers import summation
from finecast.numbers.formats import Format
from finecast.numbers.summation import Order, Scheme, Summation, orders

Floats = NDArray[np.float32]
TYPES = {Format.FP32: np.float32, Format.FP16: np.float16, Format.BF16: ml_dtypes.bfloat16}
BLOCK = 3
ORDERS = orders(7, blocked=True)
by_order = pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.label)
by_format = pytest.mark.parametrize("fmt", TYPES, ids=lambda fmt: fmt.label)


def rounded(number: float, fmt: Format) -> float:
    """A number in the accumulator's format; float64 holds each sum of two exactly here."""
    with np.errstate(over="ignore"):
        return float(np.float64(number).astype(TYPES[fmt]))


def in_turn(terms: Sequence[float], fmt: Format) -> float:
    total = rounded(terms[0], fmt)
    for term in terms[1:]:
        total = rounded(total + term, fmt)
    return total


def as_tree(terms: Sequence[float], fmt: Format) -> float:
    if len(terms) <= 2:
        return in_turn(terms, fmt)
    half = 1
    while 2 * half < len(terms):
        half *= 2
    return rounded(as_tree(terms[:half], fmt) + as_tree(terms[half:], fmt), fmt)


def expected(terms: Sequence[float], order: Order, fmt: Format) -> float:
    match order.scheme:
        case Scheme.SEQUENTIAL:
            return in_turn(terms, fmt)
        case Scheme.REVERSED:
            return in_turn(terms[::-1], fmt)
        case Scheme.PAIRWISE:
            return as_tree(terms, fmt)
        case Scheme.BLOCKED:
            parts = [terms[i : i + BLOCK] for i in range(0, len(terms), BLOCK)]
            return in_turn([in_turn(part, fmt) for part in parts], fmt)
        case Scheme.SHUFFLED:
            places = np.random.default_rng(order.seed).permutation(len(terms))
            return in_turn([terms[place] for place in places], fmt)


def accumulator(order: Order, fmt: Format = Format.FP32) -> Summation:
    return Summation(order=order, format=fmt, block=BLOCK)


def low(shape: tuple[int, ...], seed: int) -> Floats:
    numbers = np.random.default_rng(seed).standard_normal(shape)
    return numbers.astype(ml_dtypes.bfloat16).astype(np.float32)


@by_format
@by_order
@pytest.mark.parametrize("shape", [(1, 3, 11, 4), (2, 5, 8, 2), (1, 1, 1, 1), (2, 1, 6, 3)])
def test_products_are_those_of_loops(
    order: Order, fmt: Format, shape: tuple[int, int, int, int]
) -> None:
    batch, rows, count, columns = shape
    a, b = low((batch, rows, count), 0), low((batch, count, columns), 1)
    got = accumulator(order, fmt).products(a, b)
    for i, row, column in np.ndindex(got.shape):
        terms = [float(x) * float(y) for x, y in zip(a[i, row], b[i, :, column], strict=True)]
        assert got[i, row, column] == expected(terms, order, fmt)


@by_order
@pytest.mark.parametrize("by_blas", [1, 1 << 30])
def test_products_in_tiles_are_those_of_loops(
    order: Order, by_blas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = low((3, 5, 9), 2), low((1, 9, 7), 3)
    whole = accumulator(order).products(a, b)
    for name, size in {"_TILE": 4, "_BY_BLAS": by_blas, "_HELD": 60}.items():
        monkeypatch.setattr(summation, name, size)
    assert np.array_equal(accumulator(order).products(a, b), whole)


@by_order
@pytest.mark.parametrize("what", ["digits", "tiny", "infinite"])
def test_blas_adds_exact_products_alone(
    order: Order, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are rounded to fp32 by numpy, and BLAS might not round them."""
    a, b = low((2, 7, 30), 7), low((2, 30, 6), 8)
    if what == "digits":
        a = np.random.default_rng(9).standard_normal(a.shape).astype(np.float32)
    elif what == "tiny":
        a, b = a * np.float32(2**-70), b * np.float32(2**-70)
    else:
        a[0, 0, 3], b[0, 3] = np.inf, 0
    apart = accumulator(order).products(a, b)
    monkeypatch.setattr(summation, "_BY_BLAS", 1)
    assert np.array_equal(accumulator(order).products(a, b), apart, equal_nan=True)


@by_format
@by_order
def test_sums_are_those_of_loops(order: Order, fmt: Format) -> None:
    terms = np.random.default_rng(4).standard_normal((13, 2, 3)).astype(np.float32)
    got = accumulator(order, fmt).sums(terms)
    for place in np.ndindex(got.shape):
        column = [float(term) for term in terms[(slice(None), *place)]]
        assert got[place] == expected(column, order, fmt)


def test_orders_differ_and_each_is_known_by_its_name() -> None:
    a, b = low((1, 8, 200), 5), low((1, 200, 8), 6)
    results = {o.label: accumulator(o).products(a, b).tobytes() for o in ORDERS}
    assert len(results) == len(ORDERS)
    assert len({*results.values()}) == len(ORDERS)


def test_a_narrow_accumulator_loses_by_its_order() -> None:
    """2048 ones: fp16 cannot add 1 to 2048, in blocks or as a tree it never has to."""
    ones = np.ones((1, 1, 4096), np.float32)
    totals = {
        scheme: Summation(order=Order(scheme=scheme), format=Format.FP16, block=64)
        .products(ones, ones.transpose(0, 2, 1))
        .item()
        for scheme in (Scheme.SEQUENTIAL, Scheme.BLOCKED, Scheme.PAIRWISE)
    }
    assert totals == {
        Scheme.SEQUENTIAL: 2048,
        Scheme.BLOCKED: 4096,
        Scheme.PAIRWISE: 4096,
    }


def test_nothing_sums_to_zero() -> None:
    empty = np.zeros((1, 2, 0), np.float32)
    for order in ORDERS:
        assert not accumulator(order).products(empty, np.zeros((1, 0, 3), np.float32)).any()
        assert accumulator(order).sums(np.zeros((0, 4), np.float32)).shape == (4,)


def test_without_blocks_other_orders_take_their_place() -> None:
    labels = [order.label for order in orders(5, blocked=False)]
    assert labels == ["sequential", "reversed", "pairwise", "shuffled 0", "shuffled 1"]


sizes = st.tuples(st.integers(1, 6), st.integers(1, 40), st.integers(1, 6))


@given(sizes, st.sampled_from(ORDERS), st.integers(0, 99))
def test_the_same_order_gives_the_same_numbers(
    size: tuple[int, int, int], order: Order, seed: int
) -> None:
    rows, count, columns = size
    rng = np.random.default_rng(seed)
    a, b = (
        rng.standard_normal(s).astype(np.float32) for s in ((rows, count), (count, columns))
    )
    first = accumulator(order).products(a[None], b[None])
    assert np.array_equal(first, accumulator(order).products(a[None], b[None]))
    # Nor does it matter what else is computed with a result.
    one = accumulator(order).products(a[None, -1:], b[None, :, -1:])
    assert one[0, 0, 0] == first[0, -1, -1]


@given(sizes, st.sampled_from(ORDERS), st.integers(0, 99))
def test_exact_sums_are_equal_in_all_orders(
    size: tuple[int, int, int], order: Order, seed: int
) -> None:
    rows, count, columns = size
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-7, 8, s) for s in ((rows, count), (count, columns)))
    fmt = Format.FP16 if count * 49 <= 2048 else Format.FP32
    got = accumulator(order, fmt).products(
        a[None].astype(np.float32), b[None].astype(np.float32)
    )
    assert np.array_equal(got[0], a @ b)
