"""The tiers of ops decide as long as nothing is measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from finecast.rules import Ruling
from finecast.rules.tier import TIER

Judged = Callable[..., dict[str, Ruling | None]]
GRAPH = """\
input %0 x fp32[4, 4]
node mm matmul onnx::MatMul fp32 (%0, %0) -> (%1 a fp32[4, 4])
node relu relu onnx::Relu fp32 (%1) -> (%2 b fp32[4, 4])
node sensitive exp onnx::Exp fp32 (%2) -> (%3 c fp32[4, 4])
node odd unknown my::Op fp32 (%3) -> (%4 y fp32[4, 4])
"""


@pytest.mark.parametrize(
    ("policy", "measured", "kept"),
    [
        ("auto:bf16", False, {"sensitive", "odd"}),
        ("auto:bf16", True, {"odd"}),
        ("all:bf16", False, {"odd"}),
        ("all:bf16", True, {"odd"}),
    ],
)
def test_tiers(judged: Judged, policy: str, measured: bool, kept: set[str]) -> None:
    found = judged(TIER, GRAPH, policy=policy, measured=measured)
    assert {n for n, v in found.items() if v is not None} == kept
    odd = found["odd"]
    assert odd is not None
    assert "not known here" in odd.text


def test_a_division_by_a_constant_is_a_product(judged: Judged) -> None:
    found = judged(
        TIER,
        "input %0 x fp32[4]\nconstant %1 c fp32 size=1 largest=8.0 smallest_nonzero=8.0\n"
        "node scaled div onnx::Div fp32 (%0, %1) -> (%2 a fp32[4])\n"
        "node by_number div aten::div fp32 (%2) -> (%3 b fp32[4])"
        ' {"finecast.scalars": [8.0]}\n'
        "node inverse div onnx::Div fp32 (%1, %3) -> (%4 d fp32[4])\n"
        "node both div onnx::Div fp32 (%4, %0) -> (%5 y fp32[4])\n",
        policy="auto:bf16",
        measured=False,
    )
    assert {n for n, v in found.items() if v is not None} == {"inverse", "both"}
