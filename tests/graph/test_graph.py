"""Statistics of constants, and what a graph tells of its values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.graph import ConstantStats
from finecast.numbers.formats import Format
from finecast.numbers.rounding import round_to
from tests.graph.text import from_text

NUMBERS = st.lists(st.floats(width=32), max_size=8)


@given(NUMBERS)
def test_magnitudes_are_those_of_the_finite_elements(numbers: list[float]) -> None:
    array = np.array(numbers, np.float32)
    stats = ConstantStats(size=array.size, read=lambda: array)
    finite = [abs(x) for x in numbers if math.isfinite(x)]
    assert stats.largest == max(finite, default=0.0)
    assert stats.smallest_nonzero == min((x for x in finite if x), default=0.0)
    assert math.copysign(1.0, stats.largest) == 1.0


@given(NUMBERS)
def test_numbers_are_all_of_a_format_once_they_were_rounded(numbers: list[float]) -> None:
    array = np.array(numbers, np.float32)
    for fmt in (Format.TF32, Format.BF16, Format.FP16):
        low = round_to(array, fmt)
        assert ConstantStats(size=low.size, read=lambda low=low: low).all_in(fmt)
        same = np.array_equal(low, array, equal_nan=True)
        assert ConstantStats(size=array.size, read=lambda: array).all_in(fmt) == same


def test_the_last_of_many_numbers_counts() -> None:
    array = np.ones((3, 1 << 17), np.float32)
    stats = ConstantStats(size=array.size, read=lambda: array)
    assert stats.all_in(Format.TF32)
    array[-1, -1] += 2.0**-11
    assert not stats.all_in(Format.TF32)


def test_a_constant_is_read_when_asked_and_once_for_each_magnitude() -> None:
    reads: list[int] = []

    def read() -> np.ndarray:
        reads.append(1)
        return np.ones(2, np.float32)

    stats = ConstantStats(size=2, read=read)
    assert not reads
    assert [stats.largest, stats.largest, stats.smallest_nonzero] == [1.0] * 3
    assert len(reads) == 2


def test_find() -> None:
    graph = from_text("node a relu onnx::Relu - () -> (%0 x int64)")
    assert graph.find("a").id == 0
    with pytest.raises(KeyError, match="b"):
        graph.find("b")


def test_a_scalar_has_a_known_shape() -> None:
    graph = from_text(
        "input %0 x fp32[n, 4]\n"
        "node total reduce_sum onnx::ReduceSum fp32 (%0) -> (%1 total fp32[])\n"
        "node rows reduce_sum onnx::ReduceSum fp32 (%0) -> (%2 rows fp32[4])\n"
        "node any relu onnx::Relu fp32 (%0) -> (%3 any fp32)\n"
        "output %1\n"
    )
    ids = {v.name: v.id for v in graph.values}
    assert graph.static_shapes(ids) == {"total": (), "rows": (4,)}
