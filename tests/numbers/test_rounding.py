"""Rounding is idempotent, monotone, to nearest even, and equal to ml_dtypes."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from finecast.numbers import formats
from finecast.numbers.formats import Format
from finecast.numbers.rounding import convert_constant, overflow_limit, round_to

Floats = NDArray[np.float32]

FORMATS = st.sampled_from(formats.FLOATS)
FLOATS = st.floats(width=32)
NARROW = [f for f in formats.FLOATS if f.bits <= 16]
SIGN_BIT = 0x80000000
INFINITY_BITS = 0x7F800000
DROPPED = Format.FP32.mantissa_bits - Format.TF32.mantissa_bits


def one(x: float, fmt: Format) -> float:
    return float(round_to(np.array([x], dtype=np.float32), fmt)[0])


def codes(fmt: Format) -> Floats:
    """Every finite non-negative number of ``fmt``, ascending."""
    unsigned = np.dtype(f"u{fmt.bits // 8}")
    count = 1 << (fmt.bits - 1)
    with np.errstate(invalid="ignore"):
        numbers = np.arange(count, dtype=unsigned).view(fmt.dtype).astype(np.float32)
    return numbers[np.isfinite(numbers)]


def same(got: Floats, expected: Floats) -> bool:
    """Equal bit for bit, but for the payload of NaNs."""
    nan = np.isnan(expected)
    equal = got.view(np.uint32) == expected.view(np.uint32)
    return bool(np.all(np.where(nan, np.isnan(got), equal)))


def tf32_oracle(x: float) -> float:
    """TF32 by exact fractions: no bit trick, no float rounding."""
    if not math.isfinite(x) or x == 0:
        return x
    exponent = max(math.frexp(x)[1] - 1, 1 - Format.TF32.bias)
    step = Fraction(2) ** (exponent - Format.TF32.mantissa_bits)
    rounded = round(Fraction(x) / step) * step  # round() of a Fraction: half to even
    if abs(rounded) > Fraction(Format.TF32.max):
        return math.copysign(math.inf, x)
    return math.copysign(float(rounded), x)


@given(FLOATS, FORMATS)
def test_idempotent(x: float, fmt: Format) -> None:
    once = round_to(np.array([x], dtype=np.float32), fmt)
    assert same(round_to(once, fmt), once)


@given(FLOATS, FLOATS, FORMATS)
def test_monotone(x: float, y: float, fmt: Format) -> None:
    low, high = one(min(x, y), fmt), one(max(x, y), fmt)
    if not (math.isnan(low) or math.isnan(high)):
        assert low <= high


@given(FLOATS, FORMATS)
def test_odd(x: float, fmt: Format) -> None:
    assert same(
        np.array([one(-x, fmt)], dtype=np.float32), np.array([-one(x, fmt)], dtype=np.float32)
    )


@given(FLOATS.filter(lambda x: abs(x) < math.inf), FORMATS)
def test_error_is_within_the_unit_roundoff(x: float, fmt: Format) -> None:
    if abs(x) <= fmt.max:
        # Half a step: relative to x among normals, fixed among subnormals.
        bound = max(fmt.unit_roundoff * abs(x), fmt.smallest_subnormal / 2)
        assert abs(one(x, fmt) - x) <= bound


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.label)
def test_every_code_is_a_fixed_point(fmt: Format) -> None:
    numbers = codes(fmt)
    assert len(numbers) > 1 << (fmt.bits - 2)
    assert same(round_to(numbers, fmt), numbers)
    assert same(round_to(-numbers, fmt), -numbers)


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.label)
def test_midpoints_go_to_the_even_neighbour(fmt: Format) -> None:
    numbers = codes(fmt).astype(np.float64)
    lower, upper = numbers[:-1], numbers[1:]
    middle = ((lower + upper) / 2).astype(np.float32)  # one more bit: exact in fp32
    # Neighbours have neighbouring codes, and code i of an ascending list has parity i.
    even = np.where(np.arange(len(lower)) % 2 == 0, lower, upper).astype(np.float32)
    assert same(round_to(middle, fmt), even)
    down = np.nextafter(middle, np.float32(0))
    up = np.nextafter(middle, np.float32(np.inf))
    # bf16 subnormals: where fp32's own step is as coarse, the midpoint has no neighbours.
    apart = (down > lower) & (up < upper)
    assert same(round_to(down, fmt)[apart], lower.astype(np.float32)[apart])
    assert same(round_to(up, fmt)[apart], upper.astype(np.float32)[apart])


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.label)
def test_equals_ml_dtypes_at_codes_midpoints_and_their_neighbours(fmt: Format) -> None:
    numbers = codes(fmt)
    exact = numbers.astype(np.float64)
    middle = ((exact[:-1] + exact[1:]) / 2).astype(np.float32)
    around = np.concatenate(
        [
            base
            for x in (numbers, middle)
            for base in (
                x,
                np.nextafter(x, np.float32(0)),
                np.nextafter(x, np.float32(np.inf)),
            )
        ]
    )
    beyond = np.array([np.inf, np.nan, 2 * fmt.max, 1.1 * fmt.max], dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.concatenate([around, beyond.astype(np.float32)])
        x = np.concatenate([x, -x])
        expected = x.astype(fmt.dtype).astype(np.float32)
    assert same(round_to(x, fmt), expected)


@given(st.integers(0, (1 << 32) - 1))
def test_tf32_equals_an_exact_oracle(bits: int) -> None:
    x = float(np.uint32(bits).view(np.float32))
    got, expected = one(x, Format.TF32), tf32_oracle(x)
    assert same(np.array([got], dtype=np.float32), np.array([expected], dtype=np.float32))


@given(st.integers(0, INFINITY_BITS >> DROPPED), st.integers(-1, 1), st.booleans())
def test_tf32_equals_the_oracle_at_midpoints(code: int, nudge: int, negative: bool) -> None:
    middle = min((code << DROPPED) + (1 << (DROPPED - 1)) + nudge, INFINITY_BITS)
    x = float(np.uint32(middle | (SIGN_BIT if negative else 0)).view(np.float32))
    got, expected = one(x, Format.TF32), tf32_oracle(x)
    assert same(np.array([got], dtype=np.float32), np.array([expected], dtype=np.float32))


def test_tf32_keeps_nan_and_infinity() -> None:
    x = np.array([0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000], dtype=np.uint32)
    rounded = round_to(x.view(np.float32), Format.TF32)
    assert np.isnan(rounded).tolist() == [True, True, False, False]
    assert rounded[2:].tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize("fmt", formats.FLOATS, ids=lambda f: f.label)
def test_overflow(fmt: Format) -> None:
    beyond = one(float(np.float32(min(4 * fmt.max, Format.FP32.max))), fmt)
    if fmt.finite_only:
        assert math.isnan(beyond)
    elif fmt is not Format.FP32:
        assert beyond == math.inf
    assert one(fmt.max, fmt) == fmt.max


@pytest.mark.parametrize("fmt", formats.FLOATS, ids=lambda f: f.label)
def test_keeps_shape_and_layout_of_any_view(fmt: Format) -> None:
    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)[::2, ::-1].T
    rounded = round_to(x, fmt)
    assert rounded.shape == x.shape
    assert rounded.dtype == np.float32
    assert same(rounded.ravel(), round_to(np.ascontiguousarray(x).ravel(), fmt))


@pytest.mark.parametrize(
    "fmt", [f for f in formats.FLOATS if f is not Format.FP32], ids=lambda f: f.label
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_constants_saturate_up_to_one_ulp_beyond_the_range(fmt: Format, sign: float) -> None:
    ulp = fmt.max - float(codes(fmt)[-2]) if fmt.bits <= 16 else 2.0**117
    assert overflow_limit(fmt) == fmt.max + ulp
    limit = min(overflow_limit(fmt), math.inf)
    with np.errstate(over="ignore"):
        beyond = np.float32(limit)  # Inf where it is beyond fp32, too
    inside = np.nextafter(beyond, np.float32(0))
    given = sign * np.array([fmt.max, inside, beyond, np.nan, 0.0], np.float32)
    with np.errstate(invalid="ignore"):
        got = convert_constant(given, fmt).astype(np.float32)
    assert got[:2].tolist() == [sign * fmt.max] * 2
    assert not np.isfinite(got[2])
    assert np.isnan(got[3])
    # What fits beside them is rounded as ever.
    assert got[4] == 0.0
    assert np.signbit(got[4]) == (sign < 0)


@given(st.lists(FLOATS, min_size=1, max_size=6), FORMATS)
def test_constants_within_the_range_round_as_values_do(
    numbers: list[float], fmt: Format
) -> None:
    x = np.array(numbers, np.float32)
    x = x[np.abs(x) <= fmt.max]
    assert same(convert_constant(x, fmt).astype(np.float32), round_to(x, fmt))
