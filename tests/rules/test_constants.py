"""Ops keep fp32 for constants that the low format cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from finecast.numbers.formats import Format
from finecast.rules import Ruling
from finecast.rules.constants import CARRIED, CONSTANTS
from tests.frontends import tools

Judged = Callable[..., dict[str, Ruling | None]]
LOWEST = float(np.finfo(np.float32).max)


def graph(constant: str) -> str:
    return (
        f"input %0 x fp32[4]\nconstant %1 c fp32 {constant}\n"
        "node add add onnx::Add fp32 (%0, %1) -> (%2 y fp32[4])\n"
    )


@pytest.mark.parametrize(
    ("constant", "low", "kept"),
    [
        ("size=1 largest=1.0 smallest_nonzero=1.0", "bf16", False),
        # fp32's lowest, the usual mask, becomes bf16's lowest but fp16's infinity.
        (f"size=1 largest={LOWEST!r} smallest_nonzero=1.0", "bf16", False),
        (f"size=1 largest={LOWEST!r} smallest_nonzero=1.0", "fp16", True),
        ("size=9999 largest=70000.0 smallest_nonzero=1.0", "fp16", True),
        ("size=1 largest=65504.0 smallest_nonzero=1.0", "fp16", False),
        # 65536 is one unit in the last place beyond the largest.
        ("size=1 largest=65535.0 smallest_nonzero=1.0", "fp16", False),
        ("size=1 largest=65536.0 smallest_nonzero=1.0", "fp16", True),
        ("size=1 largest=1e-12 smallest_nonzero=1e-12", "fp16", True),
        ("size=1 largest=1e-12 smallest_nonzero=1e-12", "bf16", False),
        # A few tiny elements of a large matrix vanish without harm; sixteen are few.
        ("size=16 largest=1.0 smallest_nonzero=1e-12", "fp16", True),
        ("size=17 largest=1.0 smallest_nonzero=1e-12", "fp16", False),
        ("size=9999 largest=1.0 smallest_nonzero=1e-12", "fp16", False),
        ("size=1 largest=0.0 smallest_nonzero=0.0", "fp16", False),
        ("size=0", "fp16", False),
    ],
)
def test_what_the_format_can_hold(judged: Judged, constant: str, low: str, kept: bool) -> None:
    verdict = judged(CONSTANTS, graph(constant), policy=f"all:{low}")["add"]
    assert (verdict is not None) == kept
    if verdict is not None:
        assert verdict.permits == {Format.FP32}
        assert "constant c" in verdict.text
        assert verdict.evidence["limit"] in (Format.FP16.max, Format.FP16.smallest_normal)


@pytest.mark.parametrize(
    ("largest", "low", "kept"),
    [("5e-6", "fp16", True), ("5e-6", "bf16", False), ("2e-5", "fp16", False)],
)
def test_weights_may_not_all_lose_their_digits(
    judged: Judged, largest: str, low: str, kept: bool
) -> None:
    """Of a bias as small nothing is lost beside what it is added to."""
    text = (
        "input %0 x fp32[4, 64]\n"
        f"constant %1 w fp32[64, 64] size=4096 largest={largest} smallest_nonzero=1e-7\n"
        "constant %2 b fp32[64] size=64 largest=1e-7 smallest_nonzero=1e-8\n"
        "node product gemm onnx::Gemm fp32 (%0, %1, %2) -> (%3 y fp32[4, 64])\n"
        "node bias add onnx::Add fp32 (%3, %2) -> (%4 z fp32[4, 64])\n"
    )
    verdicts = judged(CONSTANTS, text, policy=f"all:{low}")
    assert (verdicts["product"] is not None) == kept
    assert verdicts["bias"] is None


@pytest.mark.parametrize(
    ("op", "order", "kept"), [("div", "%0, %1", True), ("div", "%1, %0", False)]
)
def test_no_element_of_a_divisor_may_vanish(
    judged: Judged, op: str, order: str, kept: bool
) -> None:
    large = graph("size=9999 largest=1.0 smallest_nonzero=1e-10")
    text = large.replace("add onnx::Add", f"{op} onnx::Div").replace("%0, %1", order)
    assert (judged(CONSTANTS, text, policy="all:fp16")["add"] is not None) == kept


@pytest.mark.parametrize(
    ("opset", "op"),
    [
        (10, "y = Clip<min=-3.4028234663852886e38>(x)"),
        (10, "y = Pad<pads=[0,0],value=-3.4028234663852886e38>(x)"),
        (17, "s = Shape(x)\n y = ConstantOfShape<value=float[1] {-3.4028234663852886e38}>(s)"),
    ],
)
def test_attributes_that_are_operands(
    judged: Judged, tmp_path: Path, opset: int, op: str
) -> None:
    model = tools.parse(f"g (float[4] x) => (float[4] y) {{ {op} }}", opset=opset)
    read = tools.graph_of(model, tmp_path, "all:fp16")
    for low, kept in (("bf16", False), ("fp16", True)):
        found = judged(CONSTANTS, read, policy=f"all:{low}")
        assert any(v is not None for v in found.values()) == kept


def test_constants_read_in_their_own_type_do_not_count(judged: Judged) -> None:
    own = graph("size=1 largest=1e30 smallest_nonzero=1.0").replace("%0, %1", "%0, ~%1")
    assert judged(CONSTANTS, own, policy="all:fp16")["add"] is None


@pytest.mark.parametrize(
    ("scalar", "low", "kept"),
    [
        (-LOWEST, "bf16", False),
        (-LOWEST, "fp16", True),
        (1e-12, "fp16", True),
        (2, "fp16", False),
    ],
)
def test_a_scalar_is_a_constant(judged: Judged, scalar: float, low: str, kept: bool) -> None:
    attributes = f'{{"finecast.scalars": [{scalar!r}]}}'
    text = (
        "input %0 x fp32[4]\n"
        f"node a add aten::add fp32 (%0) -> (%1 y fp32[4]) {attributes}\n"
        "node b softmax aten::softmax fp32 (%1) -> (%2 z fp32[4])\n"
    )
    assert (judged(CONSTANTS, text, policy=f"all:{low}")["a"] is not None) == kept
    carried = judged(CARRIED, text, policy=f"all:{low}")["b"] is not None
    assert carried == (kept and abs(scalar) > 1)
