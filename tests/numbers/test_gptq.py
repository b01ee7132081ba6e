"""GPTQ: codes that products lose less by, on the values that they were chosen by."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from finecast.numbers.encodings import Scaled, stored_bytes, stored_shifts
from finecast.numbers.formats import Format
from finecast.numbers.gptq import compensated

INT4 = Format.INT4_WEIGHTS
SUMMED, COLUMNS = 128, 6


def halves(x: NDArray[np.float64]) -> NDArray[np.float64]:
    cut = len(x) // 2
    return np.stack([x[:cut].T @ x[:cut], x[cut:].T @ x[cut:]])


def drawn(seed: int, axis: int, rank: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Weights with sums along ``axis``, and the moments of values that ``rank`` others mix.

    They are those of two halves of the values' rows.
    """
    draw = np.random.default_rng(seed)
    weights = draw.standard_normal((SUMMED, COLUMNS)).astype(np.float32)
    mixed = draw.standard_normal((500, rank)) @ draw.standard_normal((rank, SUMMED))
    x = mixed + 0.1 * draw.standard_normal((500, SUMMED))
    return np.ascontiguousarray(weights if axis == 0 else weights.T), halves(x)


def errors(
    weights: NDArray[np.float32], encoding: Scaled, moments: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The squared error of each column of the product, by the definition."""
    lost = (encoding.round(weights) - weights).astype(np.float64)
    lost = lost if encoding.axis == 0 else lost.T
    return np.array([one @ moments.sum(axis=0) @ one for one in lost.T])


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([0, 1]), st.sampled_from([3, 40]))
def test_no_column_loses_more_and_most_lose_far_less(seed: int, axis: int, rank: int) -> None:
    weights, moments = drawn(seed, axis, rank)
    plain = Scaled.of_constant(INT4, weights, (1 - axis,))
    found = compensated(plain, weights, moments, 500)
    before, after = errors(weights, plain, moments), errors(weights, found, moments)
    assert (after <= before * (1 + 1e-9)).all()
    assert after.sum() < 0.5 * before.sum()
    assert replace(found, shifts=b"") == plain


def test_values_that_are_not_correlated_leave_the_nearest_codes() -> None:
    weights, _ = drawn(0, 0, 3)
    plain = Scaled.of_constant(INT4, weights, (1,))
    found = compensated(plain, weights, np.stack(2 * [np.diag(np.arange(1.0, SUMMED + 1))]), 9)
    np.testing.assert_array_equal(found.encode(weights), plain.encode(weights))
    one_sample = np.stack([np.zeros((SUMMED, SUMMED)), np.ones((SUMMED, SUMMED))])
    for nothing in (
        np.zeros((2, SUMMED, SUMMED)),
        np.full((2, SUMMED, SUMMED), np.inf),
        one_sample,
    ):
        assert compensated(plain, weights, nothing, 9) is plain


def test_codes_are_the_nearest_and_their_shifts_within_the_grid() -> None:
    weights, moments = drawn(1, 1, 3)
    found = compensated(Scaled.of_constant(INT4, weights, (0,)), weights, moments, 500)
    nearest = replace(found, shifts=b"").encode(weights).astype(int)
    shifts = found.shifted(weights.shape)
    assert shifts is not None
    assert shifts.any()
    codes = found.encode(weights)
    np.testing.assert_array_equal(codes.astype(int), nearest + shifts)
    assert np.abs(codes.astype(int)).max() <= 7
    stored = b"".join(stored_bytes(weights, found, piece=128))
    assert stored == b"".join(stored_bytes(weights, found, piece=1 << 20))
    low = np.frombuffer(stored, np.uint8)
    signed = np.stack([low & 0xF, low >> 4], axis=-1).reshape(-1).astype(int)
    np.testing.assert_array_equal((signed ^ 8) - 8, codes.astype(int).reshape(-1))
    moved = found.moved(-1)
    np.testing.assert_array_equal(moved.round(weights), found.round(weights))


def test_shifts_are_part_of_a_plan() -> None:
    weights, moments = drawn(2, 0, 3)
    found = compensated(Scaled.of_constant(INT4, weights, (1,)), weights, moments, 500)
    text = json.dumps(found.to_dict())
    grid = INT4.grid(constant=True)
    assert Scaled.from_dict(INT4, grid, json.loads(text)) == found
    content: dict[str, Any] = json.loads(text)
    many = np.zeros(10 * SUMMED * COLUMNS, np.int8)
    wrong = [stored_shifts(many), stored_shifts(many[:5]), found.shifts[:-9], b"no codes"]
    for shifts in wrong:
        with pytest.raises(ValueError, match="shifts of quantized numbers"):
            replace(found, shifts=shifts)
    with pytest.raises(ValueError, match=r"base64|padding"):
        Scaled.from_dict(INT4, grid, {**content, "shifts": "?"})
    with pytest.raises(ValueError, match="shifts of quantized numbers"):
        replace(found, group=None, axis=None, scale=(1.0,))


_COUNTS = {"apart": 2, "positive": 2, "mixed": 2, "sequences": 64}


@pytest.mark.parametrize(
    ("kind", "count"),
    [(k, n) for k, least in _COUNTS.items() for n in (2, 8, 64, 512) if n >= least],
)
def test_other_rows_lose_hardly_more_than_by_the_nearest_codes(kind: str, count: int) -> None:
    """Of few rows, chance correlations made codes that lost three times as much on others."""
    weights, _ = drawn(3, 0, 3)
    mix = np.random.default_rng(4).standard_normal((8, SUMMED))

    def values(seed: int, count: int) -> NDArray[np.float64]:
        draw = np.random.default_rng(seed)
        own = draw.standard_normal((count, SUMMED))
        if kind == "sequences":
            # A sequence's 16 rows are alike, so that samples are fewer than rows.
            alike = draw.standard_normal((count // 16, SUMMED))
            return np.repeat(alike, 16, axis=0) + 0.5 * own
        if kind == "mixed":
            return draw.standard_normal((count, 8)) @ mix + 0.3 * own
        return np.maximum(own, 0) if kind == "positive" else own

    plain = Scaled.of_constant(INT4, weights, (1,))
    found = compensated(plain, weights, halves(values(5, count)), count)
    others = halves(values(6, 2000))
    before, after = (errors(weights, e, others).sum() for e in (plain, found))
    assert after <= 1.1 * before
    if kind == "mixed" and count >= 64:
        assert after < 0.3 * before
