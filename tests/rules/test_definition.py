"""An op takes only formats of its definition; one that is low already keeps its format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from finecast.numbers.formats import Format
from finecast.rules import Ruling
from finecast.rules.policy import Policy
from finecast.rules.support import DEFINITION

Judged = Callable[..., dict[str, Ruling | None]]
GRAPH = """\
input %0 x fp32[4]
input %1 h bf16[4]
node both add onnx::Add fp32 (%0, %0) -> (%2 a fp32[4])
node half conv onnx::Conv fp32 (%0, %0) -> (%3 b fp32[4]) admits=(fp16, fp32)
node none cumsum onnx::CumSum fp32 (%0) -> (%4 c fp32[4]) admits=(fp32)
node already relu onnx::Relu bf16 (%1) -> (%5 d bf16[4])
"""


def test_formats_of_the_definition(judged: Judged) -> None:
    found = judged(DEFINITION, GRAPH, policy="all:bf16")
    assert found["both"] is None
    for name in ("half", "none"):
        verdict = found[name]
        assert verdict is not None
        assert verdict.permits == {Format.FP32}
        assert "has no bf16 in its definition" in verdict.text


def test_the_low_format_decides(judged: Judged) -> None:
    found = judged(DEFINITION, GRAPH, policy="all:fp16")
    assert found["half"] is None
    assert found["none"] is not None


def test_what_is_low_already_is_kept(judged: Judged) -> None:
    verdict = judged(DEFINITION, GRAPH, policy="all:fp16")["already"]
    assert verdict is not None
    assert verdict.permits == {Format.BF16}
    assert "already bf16" in verdict.text


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "tf32"])
def test_formats_for_operands_need_ops_that_round(judged: Judged, fmt: str) -> None:
    found = judged(
        DEFINITION, GRAPH, policy=f"all:{fmt}", casts_around=frozenset({Format.parse(fmt)})
    )
    assert found["half"] is found["none"] is None
    verdict = judged(DEFINITION, GRAPH, policy=f"all:{fmt}")["half"]
    assert verdict is not None
    assert verdict.permits == {Format.FP32}
    assert "and the model's opset has no op that rounds to it" in verdict.text


@pytest.mark.parametrize("low", ["bf16", "fp8_e4m3"])
def test_where_nothing_is_lowered_the_opset_is_no_reason(judged: Judged, low: str) -> None:
    """It is raised for what is lowered alone, and would admit more then."""
    found = judged(DEFINITION, GRAPH, policy=f"none:{low}")
    assert found["half"] is found["none"] is None
    assert found["already"] is not None
    one = replace(Policy.parse(f"none:{low}"), op_formats={"CumSum": Format.parse(low)})
    assert judged(DEFINITION, GRAPH, policy=one)["none"] is not None


def test_it_cannot_be_waived() -> None:
    assert DEFINITION.hard
