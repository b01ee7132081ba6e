"""Formats of blocks against ml_dtypes, and against the OCP text written with fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from finecast.numbers.blocks import E4M3, BlockLayout, Element
from finecast.numbers.encodings import Blocks, Dynamic, Encodings, stored_as, stored_bytes
from finecast.numbers.formats import BLOCKS, Format

Array = NDArray[np.float32]

MX: Final = [f for f in BLOCKS if f.label.startswith("mx") and f.result is Format.FP32]
FLOATS: Final = [f for f in MX if f is not Format.MXINT8]
# Exponent bits, mantissa bits, exponent bias and largest code without a sign: OCP MX 1.0,
# tables 2 to 6, and of OCP 8-bit floats.
OCP: Final = {
    Format.MXFP8_E4M3: (4, 3, 7, 0x7E),
    Format.MXFP8_E5M2: (5, 2, 15, 0x7B),
    Format.MXFP6_E3M2: (3, 2, 3, 0x1F),
    Format.MXFP6_E2M3: (2, 3, 1, 0x1F),
    Format.MXFP4: (2, 1, 1, 0x7),
}


def layout_of(fmt: Format) -> BlockLayout:
    assert fmt.blocks is not None
    return fmt.blocks


def numbers_of(fmt: Format) -> list[Fraction]:
    """The numbers without a sign of an element, by code: written from the OCP tables."""
    if fmt is Format.MXINT8:
        return [Fraction(code, 64) for code in range(128)]
    _, mantissa_bits, bias, last = OCP[fmt]
    found: list[Fraction] = []
    for code in range(last + 1):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        hidden = 0 if exponent == 0 else 1
        power = Fraction(2) ** (max(exponent, 1) - bias)
        found.append(power * (hidden + Fraction(mantissa, 2**mantissa_bits)))
    return found


def nearest(number: Fraction, numbers: list[Fraction]) -> Fraction:
    """The nearest element without a sign, the one of even code in a tie; else the largest."""
    if number >= numbers[-1]:
        return numbers[-1]
    above = next(code for code, one in enumerate(numbers) if one > number)
    low, high = numbers[above - 1], numbers[above]
    if number - low == high - number:
        return low if (above - 1) % 2 == 0 else high
    return low if number - low < high - number else high


def power_below(number: Fraction) -> int:
    """floor(log2(number)), in integers."""
    exponent = number.numerator.bit_length() - number.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= number else exponent - 1


def by_the_text(block: list[float], fmt: Format) -> list[float]:
    """Section 6.3 of the OCP MX specification, number by number, in exact arithmetic."""
    if not all(map(math.isfinite, block)):
        return [math.nan] * len(block)
    numbers = numbers_of(fmt)
    exact = [Fraction(v) for v in block]
    largest = max(map(abs, exact))
    if largest == 0:
        return block if fmt in FLOATS else [0.0] * len(block)
    shared = power_below(largest) - power_below(numbers[-1])
    scale = Fraction(2) ** min(max(shared, -127), 127)
    rounded = [nearest(abs(v) / scale, numbers) * scale for v in exact]
    return [signed(r, v, fmt) for r, v in zip(rounded, block, strict=True)]


def signed(magnitude: Fraction, like: float, fmt: Format) -> float:
    """A magnitude with the sign of another number; zeros of integers have none."""
    number = math.copysign(float(magnitude), like)
    return number if number or fmt in FLOATS else 0.0


def same(a: Any, b: Any) -> bool:
    """Whether both have the same numbers, with their signs, and NaN at the same places."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    nan = np.isnan(a) & np.isnan(b)
    return bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | nan))


def neighbours(numbers: list[float]) -> Array:
    """Each number, the middle to the next one, and the fp32 numbers beside all of these."""
    exact = np.asarray(numbers, np.float32)
    middles = ((exact[1:].astype(np.float64) + exact[:-1]) / 2).astype(np.float32)
    points = np.concatenate([exact, middles])
    ends = np.float32(-np.inf), np.float32(np.inf)
    return np.concatenate([points, *(np.nextafter(points, end) for end in ends)])


@pytest.mark.parametrize("fmt", MX, ids=lambda f: f.label)
def test_all_elements_and_middles(fmt: Format) -> None:
    """All codes, what lies halfway between them, and what lies beside both, in both signs."""
    element, numbers = layout_of(fmt).element, numbers_of(fmt)
    x = neighbours([float(n) for n in numbers])
    x = np.concatenate([x, -x, [np.float32(4 * element.largest)]]).astype(np.float32)
    wanted = [signed(nearest(abs(Fraction(float(v))), numbers), v, fmt) for v in x]
    assert same(element.round(x), wanted)
    assert float(numbers[-1]) == element.largest
    assert len(numbers) == 2 ** (element.bits - 1) - {8: 1, 6: 0, 4: 0}[element.bits] * (
        {Format.MXFP8_E4M3: 1, Format.MXFP8_E5M2: 4}.get(fmt, 0)
    )


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.label)
def test_elements_are_those_of_ml_dtypes(fmt: Format) -> None:
    element = layout_of(fmt).element
    codes = np.arange(2**element.bits, dtype=np.uint8).view(element.dtype)
    every = codes.astype(np.float32)
    finite = every[np.isfinite(every)]
    assert same(element.round(finite), finite)
    x = neighbours(sorted({abs(float(n)) for n in finite}))
    x = np.clip(np.concatenate([x, -x]), -element.largest, element.largest)
    assert same(element.round(x), x.astype(element.dtype).astype(np.float32))


def edges(fmt: Format) -> list[list[float]]:
    """Blocks at the edges: of binades, of the scale's range, of fp32, with zeros and NaN."""
    powers = [-149, -148, -140, -127, -126, -125, -119, -112, -1, 0, 1, 100, 126, 127]
    draw = np.random.default_rng(0)
    found = [[0.0, -0.0, 0.0], [1.0, math.nan], [math.inf, 2.0, 0.0], [-math.inf], [-0.0]]
    for power in powers:
        top = np.ldexp(np.float32(1), power)
        with np.errstate(over="ignore"):
            beside = [np.nextafter(top, np.float32(0)), top, np.float32(1.75) * top]
        for largest in beside:
            rest = (largest * draw.uniform(-1, 1, 29)).astype(np.float32)
            found.append([float(largest), -0.0, *map(float, rest)])
    # Numbers that halve a step, under each largest number of a binade.
    for number in numbers_of(fmt)[1:]:
        for factor in (Fraction(1), Fraction(17, 16), Fraction(9, 8)):
            values = [float(number * factor), float(number / 3), float(-number / 2), 0.0]
            found.append([float(np.float32(v)) for v in values])
    return found


@pytest.mark.parametrize("fmt", MX, ids=lambda f: f.label)
def test_blocks_are_those_of_the_text(fmt: Format) -> None:
    for block in edges(fmt):
        row = np.asarray(block, np.float32)[None]
        assert same(layout_of(fmt).round(row, axis=1)[0], by_the_text(block, fmt)), block


@pytest.mark.parametrize("fmt", MX, ids=lambda f: f.label)
@pytest.mark.parametrize("count", [1, 31, 32, 33, 70])
def test_each_block_has_its_scale(fmt: Format, count: int) -> None:
    """A last block that is not whole is one; blocks lie along any axis."""
    x = np.random.default_rng(count).standard_normal((3, count)).astype(np.float32)
    x *= np.ldexp(np.float32(1), np.arange(count) // 7 - 5)
    wanted = [
        [
            v
            for i in range(0, count, 32)
            for v in by_the_text(list(map(float, r[i : i + 32])), fmt)
        ]
        for r in x
    ]
    assert same(layout_of(fmt).round(x, axis=1), wanted)
    assert same(layout_of(fmt).round(np.ascontiguousarray(x.T), axis=0).T, wanted)
    assert same(Dynamic(format=fmt, group=32).round(x[None]), [wanted])


def nv_by_the_text(x: Array) -> Array:
    """NVFP4 in numpy, by ml_dtypes' types, block by block."""
    of_tensor = np.float32(np.abs(x).max() / np.float32(6 * 448))
    if of_tensor == 0:
        return x
    out = np.empty_like(x)
    for row, numbers in enumerate(x):
        for start in range(0, numbers.size, 16):
            block = numbers[start : start + 16]
            scale = np.float32(np.float32(np.abs(block).max() / np.float32(6)) / of_tensor)
            stored = min(scale, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
            both = np.float32(np.float32(stored) * of_tensor)
            codes = np.clip(block / both, -6, 6) if both else np.copysign(np.float32(0), block)
            codes = codes.astype(ml_dtypes.float4_e2m1fn)
            out[row, start : start + 16] = codes.astype(np.float32) * both
    return out


def four_over_six_by_the_paper(x: Array) -> Array:
    """Rows of ``x`` with the better of two scales for each block, block by block.

    From the paper and its authors' reference: a tensor's scale is by 6 * 256, and 4 is taken
    if its squared error is less. Errors are in exact arithmetic.
    """
    of_tensor = np.float32(np.abs(x).max() / np.float32(6 * 256))
    out = np.zeros_like(x)
    for row, numbers in enumerate(x):
        for start in range(0, numbers.size, 16):
            block = numbers[start : start + 16]
            exact = np.float32(np.float32(np.abs(block).max() / np.float32(6)) / of_tensor)
            tried: list[tuple[Fraction, Array]] = []
            for factor in (1, 1.5):
                stored = np.float32(exact * np.float32(factor)).astype(ml_dtypes.float8_e4m3fn)
                both = np.float32(np.float32(stored) * of_tensor)
                codes = np.clip(block / both, -6, 6) if both else np.copysign(0 * block, block)
                near = codes.astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * both
                pairs = zip(map(float, near), map(float, block), strict=True)
                missed = ((Fraction(a) - Fraction(b)) ** 2 for a, b in pairs)
                tried.append((sum(missed, Fraction(0)), near))
            out[row, start : start + 16] = min(tried, key=lambda one: one[0])[1]
    return out


@pytest.mark.parametrize("count", [1, 15, 16, 17, 100])
def test_four_over_six_is_that_of_the_paper(count: int) -> None:
    draw = np.random.default_rng(count)
    x = draw.standard_normal((6, count)).astype(np.float32)
    x[2:4] *= np.ldexp(np.float32(1), draw.integers(-30, 8, (2, count)))
    x[4], x[5] = 0, -0.0
    layout = layout_of(Format.NVFP4_FOUR_OVER_SIX)
    assert same(layout.round(x, axis=1), four_over_six_by_the_paper(x))
    assert same(layout.round(x.T, axis=0).T, four_over_six_by_the_paper(x))


def test_four_over_six_keeps_what_lies_between_four_and_six() -> None:
    """The example of the paper: 10, 20, 30 and 40 are 1, 2, 3 and 4 times a scale of e4m3."""
    row = np.zeros((1, 32), np.float32)
    row[0, :4], row[0, 16] = (10, 20, 30, 40), 6 * 256
    exact = layout_of(Format.NVFP4_FOUR_OVER_SIX).round(row, axis=1)
    assert exact[0, :4].tolist() == [10, 20, 30, 40]
    assert layout_of(Format.NVFP4).round(row, axis=1)[0, 2] != 30


@pytest.mark.parametrize("power", [-80, 0, 100])
def test_the_choice_of_a_scale_is_that_of_other_magnitudes(power: int) -> None:
    """Squares of errors neither vanish nor overflow."""
    x = np.random.default_rng(5).standard_normal((4, 64)).astype(np.float32)
    layout = layout_of(Format.NVFP4_FOUR_OVER_SIX)
    moved = layout.round(np.ldexp(x, power), axis=1)
    assert same(moved, np.ldexp(layout.round(x, axis=1), power))


@pytest.mark.parametrize("count", [1, 15, 16, 17, 100])
def test_nvfp4_is_that_of_the_paper(count: int) -> None:
    draw = np.random.default_rng(count)
    x = draw.standard_normal((5, count)).astype(np.float32)
    x *= np.ldexp(np.float32(1), draw.integers(-30, 8, (5, count)))
    x[3] = 0
    x[4] = -0.0
    assert same(layout_of(Format.NVFP4).round(x, axis=1), nv_by_the_text(x))
    assert same(Dynamic(format=Format.NVFP4, group=16).round(x), nv_by_the_text(x))


def test_scales_of_nvfp4_are_e4m3() -> None:
    """Every scale from 0 to the largest, each number beside and between."""
    codes = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    x = neighbours(list(map(float, codes.astype(np.float32))))
    x = x[(x >= 0) & (x <= 448)]
    assert same(E4M3.round(x), x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    # A tensor's largest number has the largest scale, so that it becomes itself.
    row = np.zeros((1, 32), np.float32)
    row[0, 0], row[0, 20] = 6 * 448, 6 * 2.0**-10  # half of e4m3's smallest number
    assert layout_of(Format.NVFP4).round(row, axis=1)[0, [0, 20]].tolist() == [2688, 0]


def test_a_nan_is_in_all_that_share_its_scale() -> None:
    x = np.ones((2, 48), np.float32)
    x[0, 40] = np.nan
    nan = np.isnan(layout_of(Format.MXFP4).round(x, axis=1))
    assert nan[0, 32:].all()
    assert nan.sum() == 16
    assert np.isnan(layout_of(Format.NVFP4).round(x, axis=1)).all()


@pytest.mark.parametrize("fmt", BLOCKS, ids=lambda f: f.label)
def test_what_is_stored_is_what_is_read(fmt: Format) -> None:
    layout = layout_of(fmt)
    x = np.random.default_rng(3).standard_normal((70, 5)).astype(np.float32)
    stored = layout.stored(x, axis=0)
    assert stored.codes.dtype == layout.element.dtype
    assert stored.scales.dtype == layout.scale_dtype
    assert stored.scales.shape == (-(-70 // layout.size), 5)
    assert same(layout.decoded(stored, axis=0), layout.round(x, axis=0))
    encoding = stored_as(fmt, x, (1,))
    assert isinstance(encoding, Blocks)
    assert same(encoding.round(x), fmt.result.round(layout.round(x, axis=0)))
    (whole,) = stored_bytes(x, encoding, piece=64)
    assert len(whole) == (x.size // 2 if fmt.bits == 4 else x.size)


@pytest.mark.parametrize(
    "fmt", [f for f in BLOCKS if f is not Format.NVFP4], ids=lambda f: f.label
)
def test_rounding_twice_changes_nothing(fmt: Format) -> None:
    x = np.random.default_rng(4).standard_normal((6, 64)).astype(np.float32)
    once = layout_of(fmt).round(x, axis=1)
    if not layout_of(fmt).per_tensor:
        assert same(layout_of(fmt).round(once, axis=1), once)


def test_bits_count_scales() -> None:
    bits = {f.label: f.effective_bits for f in BLOCKS}
    assert bits["mxfp8_e4m3"] == bits["mxint8"] == 8.25
    assert bits["mxfp6_e2m3"] == 6.25
    assert bits["mxfp4"] == 4.25
    assert bits["nvfp4"] == bits["nvfp4_weights_bf16"] == 4.5
    assert bits["nvfp4_four_over_six"] == 4.5
    assert Format.INT8.effective_bits == 8
    assert Format.MXFP4.bytes_for(64) == 32 + 2
    assert Format.MXFP6_E3M2.bytes_for(33) == 25 + 2
    assert Format.NVFP4.bytes_for(32) == 16 + 2 + 4


def test_a_plan_keeps_the_axis() -> None:
    fmt = Format.MXFP4
    encodings = Encodings(
        operands={0: Dynamic(format=fmt, group=32)},
        constants={1: Blocks(format=fmt, axis=0)},
        result=Format.FP32,
    )
    assert Encodings.from_dict(fmt, encodings.to_dict()) == encodings
    with pytest.raises(ValueError, match="no blocks along axis -1"):
        Blocks(format=fmt, axis=-1)
    with pytest.raises(ValueError, match="no scales for groups of 16"):
        Dynamic(format=fmt, group=16)


@pytest.mark.parametrize("array", [np.zeros((0, 4)), np.zeros(4), np.full((2, 2), np.nan)])
def test_constants_without_blocks(array: NDArray[np.float64]) -> None:
    with pytest.raises(ValueError, match=r"blocks|empty|NaN"):
        stored_as(Format.MXFP4, array, (1,))


def test_an_element_is_described_once() -> None:
    """The facts that are read from ml_dtypes are those of the tables."""
    for fmt in FLOATS:
        element: Element = layout_of(fmt).element
        exponent_bits, mantissa_bits, bias, _ = OCP[fmt]
        assert element.mantissa_bits == mantissa_bits
        assert element.smallest_normal == 2.0 ** (1 - bias)
        assert element.bits == 1 + exponent_bits + mantissa_bits
