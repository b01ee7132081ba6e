"""The tiers of ops decide as long as nothing is measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from finecast.rules import Ruling
from finecast.rules.tier import DEPTH, TIER

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


POOL = """\
input %0 x fp32{shape}
node r relu onnx::Relu fp32 (%0) -> (%1 a fp32{shape})
node pool reduce_mean onnx::ReduceMean fp32 (%1) -> (%2 g fp32[2, 256]) {{"axes": {axes}}}
node end relu onnx::Relu fp32 (%2) -> (%3 y fp32[2, 256])
"""
IMAGE, SIGNAL = "[2, 256, 16, 16]", "[2, 256, 512]"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (POOL.format(shape=IMAGE, axes="[2, 3]"), False),
        (POOL.format(shape=IMAGE, axes="[-1, -2]"), False),
        (POOL.format(shape="[2, 16, 16, 256]", axes="[1, 2]"), False),
        (POOL.format(shape=IMAGE, axes="[2, 3]").replace("axes", "dim"), False),
        (POOL.format(shape=SIGNAL, axes="[2]"), False),
        # Over channels, samples, or all; of products; as part of a norm.
        (POOL.format(shape=IMAGE, axes="[1]"), True),
        (POOL.format(shape=IMAGE, axes="[0, 2, 3]"), True),
        (POOL.format(shape="[2, 65536]", axes="[1]"), True),
        (POOL.format(shape=SIGNAL, axes="[2]").replace("r relu", "r square"), True),
        (POOL.format(shape=IMAGE, axes="[2, 3]").replace("end relu", "end sub"), True),
    ],
)
def test_a_mean_over_all_positions_is_a_global_average_pool(
    judged: Judged, text: str, *, kept: bool
) -> None:
    """OpenVINO's IR, and PyTorch decomposed, have no other op for it."""
    assert (judged(TIER, text, policy="auto:bf16", measured=False)["pool"] is not None) == kept
    assert (judged(DEPTH, text, policy="all:bf16")["pool"] is not None) == kept
