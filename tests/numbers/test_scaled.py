"""Encodings with parameters: rounding, ranges, channels, and parameters from files."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from finecast.numbers.encodings import Dynamic, Encodings, Scaled
from finecast.numbers.formats import WHOLE_ROW, Format, Grid
from tests import toy_encoding

Array = NDArray[np.float32]

UNSIGNED = Grid(dtype=np.dtype(np.uint8), lowest=0, highest=255)
SYMMETRIC = Grid(dtype=np.dtype(np.int8), lowest=-127, highest=127, symmetric=True)
GRIDS = [toy_encoding.VALUES, toy_encoding.CONSTANTS, UNSIGNED, SYMMETRIC]
FP32 = Format.FP32
# Any format: the codes are the grid's.
ANY = Format.FP8_E4M3

# Steps are normal numbers, so that a quotient and its product are off by FP32's epsilon.
NORMAL, MOST = 2.0**-100, 2.0**100
NUMBERS = st.floats(-MOST, MOST, width=32, allow_subnormal=False)


@st.composite
def encodings(draw: st.DrawFn, channels: int | None = None) -> Scaled:
    grid = draw(st.sampled_from(GRIDS))
    scale = st.floats(NORMAL, MOST, width=32)
    count = 1 if channels is None else channels
    scales = draw(st.lists(scale, min_size=count, max_size=count))
    zero = 0 if grid.symmetric else draw(st.integers(grid.lowest, grid.highest))
    axis = None if channels is None else 0
    return Scaled(format=ANY, grid=grid, scale=tuple(scales), zero_point=zero, axis=axis)


def arrays(shape: tuple[int, ...] = (7,)) -> st.SearchStrategy[Array]:
    return hnp.arrays(np.float32, shape, elements=NUMBERS)


def bounds(encoding: Scaled) -> tuple[float, float]:
    low, high = encoding.range
    return float(low[0]), float(high[0])


@given(encodings(), hnp.arrays(np.float32, (9,)))
def test_rounding_is_idempotent_monotone_and_within_the_range(
    encoding: Scaled, x: Array
) -> None:
    rounded = encoding.round(x)
    assert np.array_equal(encoding.round(rounded), rounded)
    low, high = bounds(encoding)
    assert (rounded >= low).all()
    assert (rounded <= high).all()
    ordered = encoding.round(np.sort(x[~np.isnan(x)]))
    assert (np.diff(ordered) >= 0).all()


@given(encodings(), arrays())
def test_what_is_in_range_moves_by_half_a_step_at_most(encoding: Scaled, x: Array) -> None:
    low, high = bounds(encoding)
    inside = x[(x >= low) & (x <= high)].astype(np.float64)
    moved = np.abs(encoding.round(inside.astype(np.float32)) - inside)
    step = encoding.scale[0]
    # The quotient and the product are rounded to fp32 themselves.
    assert (moved <= step / 2 + 2 * FP32.epsilon * np.abs(inside)).all()


@given(encodings())
def test_what_is_beyond_becomes_the_end_and_nan_zero(encoding: Scaled) -> None:
    low, high = encoding.range
    beyond = np.array([-np.inf, -FP32.max, np.inf, FP32.max, np.nan], np.float32)
    wanted = np.array([low[0], low[0], high[0], high[0], 0], np.float32)
    assert np.array_equal(encoding.round(beyond), wanted)


@given(encodings())
def test_every_code_is_read_back_as_a_number_that_it_stores(encoding: Scaled) -> None:
    codes = np.arange(encoding.grid.lowest, encoding.grid.highest + 1).astype(encoding.dtype)
    assert np.array_equal(encoding.encode(encoding.decode(codes)), codes)
    assert encoding.decode(codes).dtype == np.float32


@given(encodings(channels=3), arrays((3, 4)), st.integers(0, 1))
def test_by_channel_is_each_channel_by_itself(encoding: Scaled, x: Array, axis: int) -> None:
    turned = np.moveaxis(x, 0, axis)
    by_axis = Scaled(
        format=ANY,
        grid=encoding.grid,
        scale=encoding.scale,
        zero_point=encoding.zero_point,
        axis=axis,
    )
    got = np.moveaxis(by_axis.round(turned), axis, 0)
    for number, scale in enumerate(encoding.scale):
        alone = Scaled(
            format=ANY, grid=encoding.grid, scale=(scale,), zero_point=encoding.zero_point
        )
        assert np.array_equal(got[number], alone.round(x[number]))


@given(arrays((6, 3)))
def test_scales_and_numbers_of_codes_that_are_decoded_to_bf16_are_in_bf16(x: Array) -> None:
    low, fmt = Format.BF16, Format.INT8_WEIGHTS_BF16
    encoding = Scaled.of_constant(fmt, x, (1,))
    scale = np.asarray(encoding.scale, np.float32)
    assert np.array_equal(low.round(scale), scale)
    rounded = encoding.round(x)
    assert np.array_equal(low.round(rounded), rounded)
    assert np.array_equal(encoding.round(rounded), rounded)
    assert (np.abs(rounded - x) <= scale / 2 + low.epsilon * np.abs(x)).all()
    with pytest.raises(ValueError, match="is no scale of int8_weights_bf16"):
        Scaled(format=fmt, grid=fmt.grid(constant=True), scale=(0.1,))


@given(st.sampled_from(GRIDS), arrays())
def test_a_fitted_range_covers_what_it_was_fitted_to(grid: Grid, x: Array) -> None:
    encoding = Scaled.fitted(ANY, grid, x.min(), x.max())
    assert encoding.round(np.zeros(1, np.float32)) == 0
    step = encoding.scale[0]
    moved = np.abs(encoding.round(x).astype(np.float64) - x)
    assert (moved <= step / 2 * (1 + 4 * (grid.highest - grid.lowest) * FP32.epsilon)).all()
    codes = grid.highest - grid.lowest
    spread = 2 * np.abs(x).max() if grid.symmetric else max(0, x.max()) - min(0, x.min())
    assert step <= max(spread / codes * (1 + FP32.epsilon), 1.0 if not spread else 0, 2e-38)


def test_zeros_alone_have_a_scale_and_what_is_not_finite_has_none() -> None:
    zeros = Scaled.fitted(ANY, UNSIGNED, np.array(0.0), np.array(0.0))
    assert zeros.scale == (1.0,)
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="not finite"):
            Scaled.fitted(ANY, UNSIGNED, np.array(0.0), np.array(bad))
    wide = np.array([-FP32.max]), np.array([FP32.max])
    with pytest.raises(ValueError, match="no scale"):
        Scaled.fitted(ANY, UNSIGNED, *wide)


@pytest.mark.parametrize("grid", GRIDS)
def test_numbers_too_small_for_a_scale_of_theirs_become_zero(grid: Grid) -> None:
    """A channel that was trained to nothing does not keep its op from being encoded."""
    tiny = np.array([FP32.smallest_normal / 8], np.float32)
    encoding = Scaled.fitted(ANY, grid, -tiny, tiny)
    assert encoding.scale == (FP32.smallest_normal,)
    assert encoding.round(tiny) == 0


def test_a_tensor_without_a_channel_for_each_scale_is_refused() -> None:
    two = Scaled(format=ANY, grid=UNSIGNED, scale=(1.0, 2.0), axis=1)
    for shape in ((2,), (2, 3), (2, 1)):
        with pytest.raises(ValueError, match="2 scales along axis 1"):
            two.round(np.zeros(shape, np.float32))


@given(encodings(channels=6), arrays((2, 3, 4)))
def test_channels_may_lie_along_several_axes(encoding: Scaled, x: Array) -> None:
    """As those of a convolution by groups: each is encoded by itself."""
    flat = encoding.round(x.reshape(6, 4))
    np.testing.assert_array_equal(encoding.round(x), flat.reshape(x.shape))
    assert encoding.spread(x.shape).shape == (2, 3, 1)


@given(encodings(channels=2))
def test_json_round_trip(encoding: Scaled) -> None:
    content = json.loads(json.dumps(encoding.to_dict()))
    assert Scaled.from_dict(ANY, encoding.grid, content) == encoding


GOOD: dict[str, Any] = {"scale": [0.5], "zero_point": 3, "axis": None}


@pytest.mark.parametrize(
    "change",
    [
        *({"scale": s} for s in ([], [0.0], [-1.0], [1e-45], [1e39], [3e38], [0.1])),
        *({"scale": s} for s in ([float("nan")], [float("inf")], ["1"], [True], 0.5, None)),
        *({"scale": [0.5, 0.5], "axis": a} for a in (None, -1, 1.0, True, "0")),
        *({"zero_point": z} for z in (-1, 256, 1.0, True, None, 10**400)),
    ],
)
def test_parameters_that_store_no_numbers_are_refused(change: dict[str, Any]) -> None:
    assert Scaled.from_dict(ANY, UNSIGNED, GOOD).zero_point == 3
    with pytest.raises((ValueError, TypeError)):
        Scaled.from_dict(ANY, UNSIGNED, GOOD | change)


def test_symmetric_codes_have_no_zero_point() -> None:
    with pytest.raises(ValueError, match="no zero point 3"):
        Scaled.from_dict(ANY, SYMMETRIC, GOOD)


@pytest.mark.parametrize(
    ("fmt", "order", "channel"),
    [
        (Format.INT8_WEIGHTS, (1, 0), 1),
        (Format.INT8_WEIGHTS, (2, 0, 1), 0),
        (Format.INT8_WEIGHTS, (1, 2, 0), 2),
        (Format.INT4_WEIGHTS, (1, 0), 0),
        (Format.INT4_WEIGHTS, (1, 0), 1),
    ],
)
def test_what_is_transposed_has_the_same_codes_transposed(
    fmt: Format, order: tuple[int, ...], channel: int
) -> None:
    sizes = (128, 192, 64)[: len(order)]
    source = np.random.default_rng(0).standard_normal(sizes).astype(np.float32)
    result = source.transpose(order)
    encoding = Scaled.of_constant(fmt, result, (channel,))
    before = encoding.before(order, result.shape)
    assert before is not None
    assert np.array_equal(before.encode(source).transpose(order), encoding.encode(result))
    assert np.array_equal(before.round(source).transpose(order), encoding.round(result))
    whole = Scaled.of_constant(Format.INT8, result)
    assert whole.before(order, result.shape) == whole
    every = tuple(range(len(order)))
    several = Scaled.of_constant(Format.INT8, result, every)
    assert several.before(order, result.shape) is None


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("axis", [-1, -2])
def test_fp8_by_rows_or_columns_has_the_codes_of_its_type(axis: int, gradient: bool) -> None:
    """Numbers that are codes times a power of two, the largest code among them, stay."""
    dtype = ml_dtypes.float8_e5m2 if gradient else ml_dtypes.float8_e4m3fn
    codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    codes = codes[np.isfinite(codes)]
    rows = np.stack([codes * 2.0**power for power in (-30, 0, 7)]).astype(np.float32)
    to = Dynamic(format=Format.FP8_DYNAMIC_ROW, group=WHOLE_ROW, axis=axis, gradient=gradient)
    x = rows if axis == -1 else rows.T
    np.testing.assert_array_equal(to.round(x), x)
    x = np.random.default_rng(0).standard_normal((32, 48)).astype(np.float32)
    ends = np.abs(x).max(axis, keepdims=True)
    scale = ends / np.float32(ml_dtypes.finfo(dtype).max)
    np.testing.assert_array_equal(
        to.round(x), (x / scale).astype(dtype).astype(np.float32) * scale
    )
    held = Encodings(operands={1: to})
    content = json.loads(json.dumps(held.to_dict()))
    assert Encodings.from_dict(to.format, content) == held


def test_scales_lie_along_the_last_two_axes_and_gradients_are_in_fp8() -> None:
    with pytest.raises(ValueError, match="has no such scales along axis 0"):
        Dynamic(format=Format.FP8_DYNAMIC_ROW, group=WHOLE_ROW, axis=0)
    with pytest.raises(ValueError, match="has no such scales"):
        Dynamic(format=Format.INT8_DYNAMIC_ROW, group=WHOLE_ROW, gradient=True)
