"""The estimate of a model's memory, against sums by hand."""

from __future__ import annotations

import pytest

from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.pricing import alive_at_peak, peak_bytes, rest_in_memory
from tests.graph.text import from_text

FP32, BF16, INT8 = Format.FP32, Format.BF16, Format.INT8

CHAIN = """
input %0 x fp32[100]
constant %1 w fp32[100] size=100
node first matmul onnx::MatMul fp32 (%0, %1) -> (%2 a fp32[1000])
node middle relu onnx::Relu fp32 (%2) -> (%3 b fp32[1000])
node last matmul onnx::MatMul fp32 (%3) -> (%4 y fp32[10])
output %4
"""
# A reshape's result shares its source's memory, which lives until the last reader of either.
VIEWED = """
input %0 x fp32[100]
node first relu onnx::Relu fp32 (%0) -> (%1 a fp32[100])
node view reshape onnx::Reshape fp32 (%1) -> (%2 b fp32[10, 10])
node second relu onnx::Relu fp32 (%2) -> (%3 c fp32[10, 10])
node third add onnx::Add fp32 (%2, %3) -> (%4 y fp32[10, 10])
output %4
"""


def at_peak(graph: Graph, formats: dict[int, Format], kernels: dict[int, int]) -> int:
    return peak_bytes(graph, formats, {}, kernels, 0)


@pytest.mark.parametrize(
    ("formats", "elements"),
    [
        ({}, 8000),  # a and b
        ({0: BF16, 1: BF16, 2: BF16}, 4000),
        ({0: BF16}, 4000 + 4000),  # the copy of a in fp32, and b
        ({0: BF16, 1: BF16}, 2000 + 4000),  # b, and its copy for the last
        # Results are stored in fp32, operands are read as codes.
        ({0: INT8, 1: INT8, 2: INT8}, 4000 + 1000),
    ],
)
def test_a_chain(formats: dict[int, Format], elements: int) -> None:
    graph = from_text(CHAIN)
    assert at_peak(graph, formats, {}) == elements


def test_a_cast_to_a_format_that_is_widened_makes_no_copy() -> None:
    graph, mixed = from_text(CHAIN), {0: BF16, 2: INT8}
    found = rest_in_memory(graph, mixed, {}, {}, lambda fmt: FP32 if fmt is BF16 else fmt)
    assert found == rest_in_memory(graph, {2: INT8}, {}, {})
    assert {one.fmt for one in rest_in_memory(graph, mixed, {}, {})} == {FP32, BF16, INT8}
    assert {one.fmt for one in found} == {FP32, INT8}


def test_what_stays_in_a_kernel_takes_nothing() -> None:
    graph = from_text(CHAIN)
    assert at_peak(graph, {}, {0: 7, 1: 7}) == 4000 + 40  # b and y
    assert peak_bytes(graph, {}, {}, {}, 123) == 8123


def test_a_view_is_no_second_value() -> None:
    graph = from_text(VIEWED)
    found = rest_in_memory(graph, {}, {}, {})
    assert [(one.value, one.first, one.last) for one in found] == [
        (0, 0, 1),
        (1, 1, 7),
        (3, 5, 7),
        (4, 7, 8),
    ]
    assert {one.value for one in alive_at_peak(found)} == {1, 3, 4}
    assert at_peak(graph, {}, {}) == 3 * 400


def test_shapes_that_were_seen_count_and_unknown_ones_do_not() -> None:
    graph = from_text(CHAIN.replace("1000", "n"))
    assert peak_bytes(graph, {}, {}, {}, 0) == 400
    assert peak_bytes(graph, {}, {2: (5, 1000), 3: (5, 1000)}, {}, 0) == 40000
