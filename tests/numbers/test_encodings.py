"""Float formats are encodings without parameters; constants are encoded piece by piece."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from finecast.numbers.encodings import (
    Encoding,
    Encodings,
    Scaled,
    packed,
    stored_bytes,
)
from finecast.numbers.formats import FLOATS, Format
from tests import toy_encoding

BY_CHANNEL = Scaled(
    format=Format.FP8_E4M3, grid=toy_encoding.VALUES, scale=(0.5, 0.25, 4.0), axis=1
)


@pytest.mark.parametrize("fmt", FLOATS)
def test_a_float_format_is_an_encoding_without_parameters(fmt: Format) -> None:
    x = np.array([1.0001, -1e-9, 1e9, np.inf, np.nan], np.float32)
    assert fmt.format is fmt
    assert np.array_equal(fmt.round(x), fmt.encode(x).astype(np.float32), equal_nan=True)
    assert not fmt.has_scales
    assert Encodings.from_dict(fmt, {}) == Encodings()


@given(st.integers(1, 40), st.sampled_from([Format.BF16, Format.TF32, BY_CHANNEL]))
def test_pieces_are_the_codes_in_order(piece: int, encoding: Encoding) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 5)).astype(np.float32)
    parts = list(stored_bytes(x, encoding, piece=piece))
    assert all(len(p) <= piece * encoding.dtype.itemsize for p in parts)
    whole = encoding.encode(x)
    assert b"".join(parts) == whole.tobytes()
    assert encoding.dtype == whole.dtype


@given(hnp.arrays(np.int8, st.integers(0, 9), elements=st.integers(-8, 7)))
def test_codes_of_4_bits_are_packed_in_pairs(codes: NDArray[np.int8]) -> None:
    stored = packed(codes, 4)
    assert stored.size == (codes.size + 1) // 2
    halves = stored.view(np.uint8).repeat(2)[: codes.size]
    halves[1::2] >>= 4
    assert np.array_equal(halves & 0xF, codes.view(np.uint8) & 0xF)


def test_one_number_is_a_piece() -> None:
    one = Scaled(format=Format.FP8_E4M3, grid=toy_encoding.VALUES, scale=(0.5,))
    (part,) = stored_bytes(np.array(1.2, np.float32), one, piece=4)
    assert part == b"\x02"


INT8 = Format.INT8
VALUE = Scaled(format=INT8, grid=INT8.grid(constant=False), scale=(0.5,), zero_point=3)


def test_a_result_may_be_stored_as_codes() -> None:
    for result in (Format.FP32, VALUE):
        one = Encodings(operands={0: VALUE}, result=result)
        assert Encodings.from_dict(Format.INT8, one.to_dict()) == one


def test_constants_alone_have_no_codes_of_values() -> None:
    weights = Format.INT8_WEIGHTS
    one = Scaled(format=weights, grid=INT8.grid(constant=True), scale=(0.5, 1.0), axis=1)
    found = Encodings(constants={1: one})
    assert Encodings.from_dict(weights, found.to_dict()) == found
    stored = Encodings()  # by an earlier conversion
    assert Encodings.from_dict(weights, stored.to_dict()) == stored
    with pytest.raises(ValueError, match="int8_weights encodes constants alone, not operands"):
        Encodings.from_dict(weights, Encodings(operands={0: VALUE}).to_dict())
    with pytest.raises(ValueError, match="int8_weights ops give fp32"):
        Encodings.from_dict(weights, Encodings(constants={1: one}, result=VALUE).to_dict())
    with pytest.raises(ValueError, match="int8 needs the parameters of an input"):
        Encodings.from_dict(Format.INT8, stored.to_dict())


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31), st.sampled_from([0, 1]))
def test_the_least_error_of_a_group_is_no_larger(seed: int, channel: int) -> None:
    draw = np.random.default_rng(seed)
    array = draw.standard_normal((128, 128)).astype(np.float32)
    array[: draw.integers(1, 64)] = 0
    fmt = Format.INT4_WEIGHTS
    plain = Scaled.of_constant(fmt, array, (channel,))
    best = Scaled.of_constant(fmt, array, (channel,), least_error=True)
    squares = [
        np.square(e.round(array) - array)
        .reshape(e.split(array.shape))
        .sum(axis=(e.axis or 0) + 1)
        for e in (plain, best)
    ]
    assert (squares[1] <= squares[0] * (1 + 1e-5)).all()
    assert squares[1].sum() < 0.95 * squares[0].sum()


@pytest.mark.parametrize("fmt", [Format.INT8_WEIGHTS, Format.INT4_WEIGHTS])
def test_moved_codes_stand_for_the_same_numbers(fmt: Format) -> None:
    array = np.random.default_rng(0).standard_normal((128, 4)).astype(np.float32)
    found = Scaled.of_constant(fmt, array, (1,))
    other = found.moved(-1)
    assert np.array_equal(other.round(array), found.round(array))
    assert np.array_equal(other.encode(array).astype(int), found.encode(array).astype(int) - 1)
    assert found.moved(0) == found
    with pytest.raises(ValueError, match="does not have the integers"):
        found.moved(1)
