"""Conversions: equal to ml_dtypes, exact on what is representable, reproducible draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from finecast.numbers.formats import FLOATS, Format
from finecast.numbers.rounding import round_to
from finecast.numbers.roundmodes import Rounder, Rounding, _by_steps, convert, draws

Floats = NDArray[np.float32]
NARROW = [f for f in FLOATS if f.bits <= 16]
LOW = [f for f in FLOATS if f is not Format.FP32]
ANY_BITS = st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=64)


def codes(fmt: Format) -> Floats:
    """Every number of ``fmt``, NaN and Inf too."""
    count = 1 << (fmt.bits)
    with np.errstate(invalid="ignore"):
        return np.arange(count, dtype=f"u{fmt.bits // 8}").view(fmt.dtype).astype(np.float32)


def same(got: Floats, expected: Floats) -> bool:
    nan = np.isnan(expected)
    equal = got.view(np.uint32) == expected.view(np.uint32)
    return bool(np.all(np.where(nan, np.isnan(got), equal)))


def bits(numbers: list[int]) -> Floats:
    return np.array(numbers, dtype=np.uint32).view(np.float32)


def one(x: float, how: Rounder) -> float:
    return float(convert(np.array([x], dtype=np.float32), how)[0])


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.label)
def test_to_nearest_equals_ml_dtypes_around_every_code(fmt: Format) -> None:
    finite = np.unique(np.abs(codes(fmt)[np.isfinite(codes(fmt))])).astype(np.float64)
    middle = ((finite[:-1] + finite[1:]) / 2).astype(np.float32)
    parts = [finite.astype(np.float32), middle]
    parts += [np.nextafter(p, np.float32(s)) for p in parts for s in (0, np.inf)]
    edge = np.array([np.inf, np.nan, min(4 * fmt.max, Format.FP32.max)], dtype=np.float32)
    x = np.concatenate([*parts, edge])
    x = np.concatenate([x, -x])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(fmt.dtype).astype(np.float32)
    assert same(_by_steps(x, Rounder(format=fmt), 0, 0), expected)
    assert same(convert(x, Rounder(format=fmt)), expected)


@given(ANY_BITS, st.sampled_from(FLOATS))
def test_to_nearest_is_round_to(numbers: list[int], fmt: Format) -> None:
    x = bits(numbers)
    assert same(_by_steps(x, Rounder(format=fmt), 0, 0), round_to(x, fmt))


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.label)
@pytest.mark.parametrize("mode", Rounding)
@pytest.mark.parametrize("saturate", [False, True])
def test_every_code_is_a_fixed_point_of_every_mode(
    fmt: Format, mode: Rounding, saturate: bool
) -> None:
    x = codes(fmt)
    x = x[np.isfinite(x)]
    assert same(convert(x, Rounder(format=fmt, rounding=mode, saturate=saturate)), x)


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.label)
def test_toward_zero_and_stochastic_take_a_neighbour(fmt: Format) -> None:
    numbers = np.unique(np.abs(codes(fmt)[np.isfinite(codes(fmt))])).astype(np.float64)
    lower, upper = numbers[:-1].astype(np.float32), numbers[1:].astype(np.float32)
    between = (lower.astype(np.float64) * 0.75 + upper.astype(np.float64) * 0.25).astype(
        np.float32
    )
    down = convert(between, Rounder(format=fmt, rounding=Rounding.TOWARD_ZERO))
    assert same(down, lower)
    assert same(convert(-between, Rounder(format=fmt, rounding=Rounding.TOWARD_ZERO)), -lower)
    drawn = convert(between, Rounder(format=fmt, rounding=Rounding.STOCHASTIC, seed=1))
    assert np.all((drawn == lower) | (drawn == upper))
    # bf16's lowest subnormals: a quarter step is no fp32 number and comes out as none or half
    if len(lower) > 1000:
        share = float(np.mean(drawn == upper))
        assert abs(share - 0.25) < 4 * math.sqrt(0.25 * 0.75 / len(lower)) + 2.0**-8


@given(ANY_BITS)
def test_tf32_toward_zero_cuts_the_bits(numbers: list[int]) -> None:
    x = bits(numbers)
    cut = (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    expected = np.where(np.isnan(x), x, cut)
    assert same(
        convert(x, Rounder(format=Format.TF32, rounding=Rounding.TOWARD_ZERO)), expected
    )


@pytest.mark.parametrize("fmt", LOW, ids=lambda f: f.label)
@pytest.mark.parametrize("mode", Rounding)
def test_saturation(fmt: Format, mode: Rounding) -> None:
    how = Rounder(format=fmt, rounding=mode, saturate=True)
    assert one(math.inf, how) == fmt.max
    assert one(-math.inf, how) == -fmt.max
    assert one(Format.FP32.max, how) == fmt.max
    assert math.isnan(one(math.nan, how))


@pytest.mark.parametrize("fmt", LOW, ids=lambda f: f.label)
def test_overflow_without_saturation(fmt: Format) -> None:
    far = min(4 * fmt.max, Format.FP32.max)
    infinity = one(math.inf, Rounder(format=fmt))
    assert math.isnan(infinity) if fmt.finite_only else infinity == math.inf
    near = one(far, Rounder(format=fmt))
    assert not math.isfinite(near)
    assert one(far, Rounder(format=fmt, rounding=Rounding.TOWARD_ZERO)) == fmt.max


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.label)
def test_flush(fmt: Format) -> None:
    how = Rounder(format=fmt, flush_subnormals=True)
    small = fmt.smallest_normal / 2
    assert one(small, how) == 0
    assert math.copysign(1, one(-small, how)) == -1
    assert one(fmt.smallest_normal, how) == fmt.smallest_normal
    assert one(small, Rounder(format=fmt)) == small


@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 1 << 40), st.integers(0, 5))
def test_batch_splits_reproduce(count: int, cut: int, start: int, stream: int) -> None:
    x = np.linspace(-3, 3, count, dtype=np.float32)
    how = Rounder(format=Format.FP8_E5M2, rounding=Rounding.STOCHASTIC, seed=7)
    whole = convert(x, how, offset=start, stream=stream)
    cut = min(cut, count)
    parts = [
        convert(x[:cut], how, offset=start, stream=stream),
        convert(x[cut:], how, offset=start + cut, stream=stream),
    ]
    assert same(np.concatenate(parts), whole)


def test_draws_differ_by_seed_and_stream() -> None:
    base = draws(64, seed=0)
    assert not np.array_equal(base, draws(64, seed=1))
    assert not np.array_equal(base, draws(64, seed=0, stream=1))
    assert base.min() >= 0
    assert base.max() < 1


def test_neurons_reference_test_of_stochastic_rounding() -> None:
    # fp16 1024 plus 0.5, 2048 times: to nearest never leaves 1024, stochastic does.
    nearest = Rounder(format=Format.FP16)
    drawn = Rounder(format=Format.FP16, rounding=Rounding.STOCHASTIC, seed=0)
    a = b = np.array([1024], dtype=np.float32)
    for i in range(2048):
        a = convert(a + np.float32(0.5), nearest)
        b = convert(b + np.float32(0.5), drawn, offset=i)
    assert float(a[0]) == 1024
    # 2048 steps of variance 1/4: a standard deviation of 22.6 about 2048; Neuron: about 2056.
    assert abs(float(b[0]) - 2048) < 4 * math.sqrt(2048 / 4)


@given(ANY_BITS)
def test_up_from_odd_is_openvinos_bit_trick(numbers: list[int]) -> None:
    words = np.array(numbers, dtype=np.uint32)
    x = words.view(np.float32)
    carried = words.astype(np.uint64) + ((words & np.uint32(0x10000)) >> np.uint32(1))
    expected = (carried & 0xFFFF0000).astype(np.uint32).view(np.float32)
    how = Rounder(format=Format.BF16, rounding=Rounding.UP_FROM_ODD)
    keep = np.isfinite(x) & np.isfinite(expected)
    assert same(convert(x[keep], how), expected[keep])
