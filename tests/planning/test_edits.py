"""Edits are the fewest: numbers that are in a format already are not rounded to it again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from finecast.graph import ROUNDS, ConstantStats, Graph
from finecast.numbers.formats import Format
from finecast.planning.edits import (
    ConvertConstant,
    InsertCast,
    RoundTrip,
    SetFormat,
    cast_count,
    edits,
)
from tests.graph.text import from_text

TF32, FP8 = Format.TF32, Format.FP8_E4M3

CHAIN = from_text("""\
input %0 x fp32[4]
node first relu onnx::Relu fp32 (%0) -> (%1 a fp32[4])
node second matmul onnx::MatMul fp32 (%1) -> (%2 y fp32[4])
output %2
""")


def rounded(graph: Graph, formats: dict[str, Format]) -> set[str]:
    """Names of the values that are rounded for operands."""
    by_id = {n.id: formats[n.name] for n in graph.nodes if n.name in formats}
    found = edits(graph, by_id)
    return {graph.values[e.value].name for e in found if isinstance(e, RoundTrip)}


@pytest.mark.parametrize(
    ("first", "second", "again"),
    [
        (Format.BF16, TF32, False),  # 8 and 7 bits fit tf32's 8 and 10
        (Format.FP16, TF32, False),  # 5 and 10 bits fit exactly
        (Format.FP32, TF32, True),
        # Values in 8-bit formats are stored in 8 bits, whatever their numbers are.
        (Format.BF16, FP8, True),
        (Format.FP16, FP8, True),
    ],
)
def test_numbers_that_fit_a_format_are_not_rounded_to_it(
    first: Format, second: Format, again: bool
) -> None:
    assert rounded(CHAIN, {"first": first, "second": second}) == ({"a"} if again else set())


@pytest.mark.parametrize(
    ("middle", "again"),
    [
        ("cast onnx::Cast", False),
        # The format of its operand says nothing about its result.
        ("unknown my::Op", True),
        ("dequantize onnx::DequantizeLinear", True),
    ],
)
def test_only_a_cast_passes_numbers_on_unchanged(middle: str, again: bool) -> None:
    graph = from_text(
        f"input %0 x fp8_e4m3[4]\nnode middle {middle} - (~%0) -> (~%1 a fp32[4])\n"
        "node product matmul onnx::MatMul fp32 (%1) -> (%2 y fp32[4])\noutput %2\n"
    )
    assert rounded(graph, {"product": FP8}) == ({"a"} if again else set())


def test_what_was_rounded_already_is_not_rounded_again() -> None:
    by_hand = from_text(
        "input %0 x fp32[4]\n"
        f'node by_hand mul onnx::Mul - (~%0) -> (~%1 a fp32[4]) {{"{ROUNDS}": "tf32"}}\n'
        "node product matmul onnx::MatMul fp32 (%1) -> (%2 y fp32[4])\noutput %2\n"
    )
    assert rounded(by_hand, {"product": TF32}) == set()
    assert rounded(by_hand, {"product": FP8}) == {"a"}


@pytest.mark.parametrize(("number", "again"), [(1.5, False), (1.0 + 2.0**-12, True)])
def test_a_constant_of_the_format_s_own_numbers_is_not_rounded(
    number: float, again: bool
) -> None:
    graph = _product_with(np.array([number, 2.0], np.float32))
    assert rounded(graph, {"product": TF32}) == ({"w"} if again else set())


def _product_with(weight: NDArray[np.float32]) -> Graph:
    graph = from_text(
        "input %0 x fp32[2]\nconstant %1 w fp32[2] size=2\n"
        "node product matmul onnx::MatMul fp32 (%1) -> (%2 y fp32[2])\noutput %2\n"
    )
    stats = ConstantStats(size=2, read=lambda: weight)
    values = [replace(v, constant=stats) if v.name == "w" else v for v in graph.values]
    return replace(graph, values=tuple(values))


def test_the_plan_that_changes_nothing_gives_no_edits() -> None:
    assert edits(CHAIN, {n.id: Format.FP32 for n in CHAIN.nodes}) == ()
    kinds = {type(e) for e in edits(CHAIN, {0: Format.BF16, 1: Format.BF16})}
    assert kinds == {SetFormat, InsertCast}
    assert ConvertConstant not in kinds


@pytest.mark.parametrize(
    ("formats", "count"),
    [
        ({}, 0),
        ({"first": Format.BF16}, 1),  # the cast of a; the input's does not count
        ({"second": Format.BF16}, 1),
        ({"first": Format.BF16, "second": Format.BF16}, 0),
        ({"second": FP8}, 2),  # there and back
        ({"second": TF32}, 0),  # arithmetic is no cast
    ],
)
def test_casts_inside_are_counted(formats: dict[str, Format], count: int) -> None:
    by_id = {n.id: formats[n.name] for n in CHAIN.nodes if n.name in formats}
    assert cast_count(CHAIN, edits(CHAIN, by_id)) == count
