"""What errors the formats explain, and which outputs hinge on decisions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from finecast.data.deviation import ROUNDINGS_PER_OP, deviation, expected
from finecast.numbers.formats import Format
from tests.graph.text import from_text

CHAIN = """input %0 x fp32[4]
node a relu onnx::Relu fp32 (%0) -> (%1 a fp32[4])
node b exp onnx::Exp fp32 (%1) -> (%2 b fp32[4])
node c exp onnx::Exp fp32 (%2) -> (%3 c fp32[4])
node d floor onnx::Floor fp32 (%3) -> (%4 d fp32[4])
node e exp onnx::Exp fp32 (%4) -> (%5 e fp32[4])
output %5
"""


def test_squared_roundings_add_up_along_a_path_and_moves_add_none() -> None:
    low = Format.BF16
    one = math.sqrt(ROUNDINGS_PER_OP) * low.unit_roundoff
    found = expected(from_text(CHAIN), dict.fromkeys((0, 1, 2), low)).relative
    assert [found[i] for i in (1, 2, 3)] == pytest.approx(
        [one, math.sqrt(2) * one, math.sqrt(3) * one]
    )


def test_only_decisions_on_rounded_numbers_count() -> None:
    graph = from_text(CHAIN)
    assert expected(graph, {}).decided == frozenset()
    assert expected(graph, {2: Format.FP16}).decided == {4, 5}
    assert expected(graph, {2: Format.FP16}).stepped == {4}
    assert expected(graph, {4: Format.FP16}).decided == frozenset()


def test_only_what_fp32_determines_is_compared() -> None:
    wanted = np.array([3, np.inf, np.nan, 4], np.float32)
    found = deviation(np.array([3, 1, 1, 4.5], np.float32), wanted)
    assert found.relative == pytest.approx(0.1)
    assert found.largest == 0.5
    for bad in (np.nan, np.inf, -np.inf):
        found = deviation(np.array([bad, 1, 1, 4], np.float32), wanted)
        assert found.nonfinite
        assert (found.largest, found.relative) == (math.inf, math.inf)
    assert not deviation(wanted, wanted).nonfinite
    assert not deviation(np.zeros(3, np.float32), wanted).comparable
    assert deviation(np.array([1, 2]), np.array([7, 2])).relative == 0.5  # the share


def test_signalling_nans_are_named_and_not_warned_of() -> None:
    """Memory that an engine leaves unwritten may hold them; numpy warns of such a cast."""
    unwritten = np.full((4, 8), 0x7F800001, np.uint32).view(np.float32)
    assert deviation(unwritten, np.ones((4, 8), np.float32)).nonfinite
    assert deviation(unwritten, unwritten).relative == 0
