"""Reasons why an op adds error: the terms of its sums, whatever the layout of its weight."""

from __future__ import annotations

import pytest

from finecast.diagnosis.emulating import reasons
from finecast.numbers.formats import Format
from tests.graph.text import from_text

X, IMAGE = "fp32[4, 64]", "fp32[2, 6, 10, 10]"


@pytest.mark.parametrize(
    ("op", "x", "weight", "result", "terms"),
    [
        ("matmul", X, "fp32[64, 16]", "fp32[4, 16]", 64),
        ("linear", X, "fp32[16, 64]", "fp32[4, 16]", 64),
        ("conv", IMAGE, "fp32[8, 6, 3, 3]", "fp32[2, 8, 8, 8]", 54),
        ("group_conv", IMAGE, "fp32[2, 4, 3, 3, 3]", "fp32[2, 8, 8, 8]", 27),
    ],
)
def test_an_op_sums_as_many_terms_as_its_product_is_deep(
    op: str, x: str, weight: str, result: str, terms: int
) -> None:
    graph = from_text(
        f"graph 0123456789abcdef\ninput %0 x {x}\n"
        f"constant %1 w {weight} size=64 largest=0.5 smallest_nonzero=0.25\n"
        f"node op {op} onnx::Op fp32 (%0, %1) -> (%2 y {result})\noutput %2\n"
    )
    assert reasons(graph, graph.nodes[0], Format.BF16, {}) == (
        f"adds up the rounding errors of {terms} numbers",
    )


def test_an_op_of_several_products_has_no_single_number_of_terms() -> None:
    graph = from_text(
        "graph 0123456789abcdef\ninput %0 q fp32[1, 2, 8, 16]\n"
        "node op attention onnx::Op fp32 (%0, %0, %0) -> (%1 y fp32[1, 2, 8, 16])\noutput %1\n"
    )
    (reason,) = reasons(graph, graph.nodes[0], Format.BF16, {})
    assert reason.startswith("digits: bf16")


def test_an_einsum_of_one_operand_sums_an_axis() -> None:
    graph = from_text(
        "graph 0123456789abcdef\ninput %0 x fp32[4, 64]\n"
        "node op einsum onnx::Op fp32 (%0) -> (%1 y fp32[4])"
        ' {"equation": "ij->i"}\noutput %1\n'
    )
    assert reasons(graph, graph.nodes[0], Format.BF16, {}) == (
        "adds up the rounding errors of 64 numbers",
    )
