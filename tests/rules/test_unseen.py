"""Ops of which the data shows nothing keep fp32, but for codes of 8 bits of constants."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from finecast.numbers.formats import Format
from finecast.rules import Ruling
from finecast.rules.facts import ValueFacts
from finecast.rules.unseen import UNSEEN

Judged = Callable[..., dict[str, Ruling | None]]
GRAPH = """input %0 x fp32[?,4]
input %1 z fp32[?,4]
node n concat onnx::Concat fp32 (%0, %1) -> (%2 y fp32[?,4])
node s reduce_sum onnx::ReduceSum fp32 (%0) -> (%3 t fp32[])
"""


def facts(*counts: int) -> dict[int, ValueFacts]:
    return {i: ValueFacts.of(np.ones(n, np.float32)) for i, n in enumerate(counts)}


@pytest.mark.parametrize(
    ("counts", "kept"),
    [
        ((0, 0, 0, 1), {"n", "s"}),
        ((0, 5, 5, 1), {"s"}),  # a sum of no element shows nothing of other sums
        ((5, 0, 5, 1), set[str]()),
        ((5, 5, 0), {"n"}),  # what gives no element, whatever it reads
        ((), set[str]()),  # without data nothing is known
    ],
)
def test_ops_without_elements_keep_fp32(
    judged: Judged, counts: tuple[int, ...], kept: set[str]
) -> None:
    verdicts = judged(UNSEEN, GRAPH, policy="all:bf16", facts=facts(*counts))
    assert {name for name, verdict in verdicts.items() if verdict is not None} == kept
    assert all(v.permits == {Format.FP32} for v in verdicts.values() if v is not None)


@pytest.mark.parametrize("fmt", Format)
def test_codes_of_eight_bits_of_constants_need_no_data(judged: Judged, fmt: Format) -> None:
    if fmt is Format.FP32:
        return
    verdicts = judged(UNSEEN, GRAPH, policy=f"all:{fmt.label}", facts=facts(0, 0, 0, 1))
    assert (verdicts["n"] is None) == (fmt is Format.INT8_WEIGHTS)


def test_an_unseen_value_has_its_static_sizes() -> None:
    seen = ValueFacts.unseen((4, "rows", 2))
    assert (seen.shape, seen.count, seen.largest) == ((4, 0, 2), 0, 0.0)
    other = ValueFacts.of(np.ones((4, 3, 2), np.float32))
    assert seen.merge(other) == other
