"""A constant that keeps a divisor from 0 protects the division in fp16, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from finecast.rules import Ruling
from finecast.rules.constants import GUARDED

Judged = Callable[..., dict[str, Ruling | None]]


def normalized(floor: str, division: str) -> str:
    return f"""
    input %0 x fp32[4, 8]
    input %1 norm fp32[4, 1]
    constant %2 floor fp32[] size=1 largest={floor} smallest_nonzero={floor}
    node clip clip onnx::Clip fp32 (%1, %2) -> (%3 a fp32[4, 1])
    node wide expand onnx::Expand fp32 (%3) -> (%4 b fp32[4, 8])
    node divide {division} onnx::Div fp32 (%0, %4) -> (%5 c fp32[4, 8])
    node after relu onnx::Relu fp32 (%5) -> (%6 d fp32[4, 8])
    output %6
    """


@pytest.mark.parametrize(
    ("floor", "division", "low", "kept"),
    [
        ("1e-12", "div", "fp16", {"wide", "divide"}),
        ("1e-12", "mul", "fp16", set()),  # nothing divides
        ("0.001", "div", "fp16", set()),
        ("1e-12", "div", "bf16", set()),
    ],
)
def test_what_lies_between_keeps_fp32(
    judged: Judged, floor: str, division: str, low: str, kept: set[str]
) -> None:
    found = judged(GUARDED, normalized(floor, division), policy=f"all:{low}")
    assert {name for name, verdict in found.items() if verdict is not None} == kept


def test_a_root_is_on_the_way(judged: Judged) -> None:
    graph = """
    input %0 v fp32[4]
    node add add aten::add fp32 (%0) -> (%1 a fp32[4]) {"finecast.scalars": [1e-12]}
    node root sqrt aten::sqrt fp32 (%1) -> (%2 b fp32[4])
    node turn reciprocal aten::reciprocal fp32 (%2) -> (%3 c fp32[4])
    output %3
    """
    found = judged(GUARDED, graph, policy="all:fp16")
    assert {name for name, verdict in found.items() if verdict is not None} == {"root", "turn"}
