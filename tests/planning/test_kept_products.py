"""The largest product that a plan leaves in fp32 is named with what keeps it."""

from __future__ import annotations

import pytest

from finecast.graph import Graph
from finecast.planning.kept_products import KeptProducts, kept_products
from finecast.planning.planner import Planner
from finecast.rules import Context, permit
from finecast.rules.policy import Policy
from tests.graph.text import from_text

SMALL = """
input %0 x fp32[4, 16, 64]
constant %1 w fp32[64, 64] size=4096 largest=1 smallest_nonzero=1
node small matmul onnx::MatMul fp32 (%0, %1) -> (%2 a fp32[4, 16, 64])
"""


def kept(text: str, policy: str = "auto:bf16") -> KeptProducts | None:
    graph, asked = from_text(text), Policy.parse(policy)
    return kept_products(graph, planner_of(graph, asked).lowest())


def planner_of(graph: Graph, policy: Policy) -> Planner:
    permissions = permit(Context(graph=graph, policy=policy, measured=True))
    return Planner(graph=graph, policy=policy, permissions=permissions)


@pytest.mark.parametrize(
    ("line", "native", "why"),
    [
        pytest.param(
            "node p einsum onnx::Einsum fp32 (%2, %1) -> (%3 y fp32[4, 64])"
            ' {"equation": "bsd,dd->bd"}',
            "Einsum",
            "onnx::Einsum has no bf16 in its definition, and it is no MatMul",
            id="einsum",
        ),
        pytest.param(
            "constant %3 k fp32[64, 16, 9] size=9216 largest=1 smallest_nonzero=1\n"
            "node p conv aten::convolution fp32 (~%2, ~%3)"
            " -> (%4 y fp32[4, 64, 64]) admits=(fp32)",
            "convolution",
            "aten::convolution has no bf16 in its definition",
            id="torch convolution",
        ),
        pytest.param(
            "node p attention openvino::ScaledDotProductAttention fp32 (%2, %2, %2)"
            " -> (%3 y fp32[4, 16, 64]) admits=(fp32)",
            "ScaledDotProductAttention",
            "openvino::ScaledDotProductAttention has no bf16 in its definition",
            id="attention",
        ),
        pytest.param(
            "constant %3 k fp32[1, 256, 64] size=16384 largest=1 smallest_nonzero=1\n"
            "node p lstm onnx::LSTM fp32 (%2, %3, %3)"
            " -> (%4 y fp32[4, 1, 16, 64]) admits=(fp32)",
            "LSTM",
            "onnx::LSTM has no bf16 in its definition",
            id="recurrent cell",
        ),
        pytest.param(
            "constant %3 k fp32[512, 512] size=262144 largest=1 smallest_nonzero=1\n"
            "node p unknown custom::Rotate fp32 (%2, %3)"
            " -> (%4 y fp32[4, 16, 64]) admits=(fp32)",
            "Rotate",
            "custom::Rotate has no bf16 in its definition",
            id="unknown",
        ),
    ],
)
def test_it_is_named_with_what_keeps_it(line: str, native: str, why: str) -> None:
    last = 4 if "constant" in line else 3
    found = kept(f"{SMALL}{line}\noutput %{last}\n")
    assert found is not None
    assert (found.count, found.node, found.native) == (1, "p", native)
    assert why in found.why
    assert found.text.startswith(f"1 product stays fp32, 'p' ({native}")


def test_a_large_product_hides_one_that_is_small() -> None:
    large = "constant %3 u fp32[64, 65536] size=4194304 largest=1 smallest_nonzero=1\n"
    large += "node large matmul onnx::MatMul fp32 (%2, %3) -> (%4 y fp32[4, 16, 65536])\n"
    fp32_alone = " admits=(fp32)\n"
    small = SMALL.removesuffix("\n") + fp32_alone
    assert kept(f"{small}{large}output %4\n") is None
    found = kept(f"{SMALL}{large.removesuffix(chr(10))}{fp32_alone}output %4\n")
    assert found is not None
    assert found.is_largest
    assert "100% of the products' operations" in found.text


def test_nothing_is_said_where_all_are_low() -> None:
    assert kept(f"{SMALL}output %2\n") is None
