"""Exponentials that the model undoes keep fp32 until data shows their range."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from finecast.rules import Ruling
from finecast.rules.exponentials import EXPONENTIALS
from finecast.rules.facts import ValueFacts

Judged = Callable[..., dict[str, Ruling | None]]
INPUT = "input %0 x fp32[4, 4]\nconstant %1 one fp32 size=1 largest=1.0 smallest_nonzero=1.0\n"
EXP = "node e exp onnx::Exp fp32 (%0) -> (%2 a fp32[4, 4])\n"
SOFTPLUS = (
    f"{INPUT}{EXP}"
    "node s add onnx::Add fp32 (%2, %1) -> (%3 b fp32[4, 4])\n"
    "node l log onnx::Log fp32 (%3) -> (%4 c fp32[4, 4])\n"
    "node r relu onnx::Relu fp32 (%4) -> (%5 y fp32[4, 4])\n"
)
SOFTMAX = (
    f"{INPUT}{EXP}"
    "node s reduce_sum aten::sum fp32 (%2) -> (%3 b fp32[4, 1])\n"
    "node l div aten::div fp32 (%2, %3) -> (%4 y fp32[4, 4])\n"
)
# 1 / (1 + exp(x)): of an Inf it gives 0, as of the number in fp32.
SIGMOID = (
    f"{INPUT}{EXP}"
    "node s add onnx::Add fp32 (%2, %1) -> (%3 b fp32[4, 4])\n"
    "node l div onnx::Div fp32 (%1, %3) -> (%4 y fp32[4, 4])\n"
)
# exp(x - max(x)) is at most 1.
STABLE = (
    f"{INPUT}"
    "node m reduce_max aten::amax fp32 (%0) -> (%2 m fp32[4, 1])\n"
    "node d sub aten::sub fp32 (%0, %2) -> (%3 d fp32[4, 4])\n"
    "node e exp aten::exp fp32 (%3) -> (%4 a fp32[4, 4])\n"
    "node s reduce_sum aten::sum fp32 (%4) -> (%5 b fp32[4, 1])\n"
    "node l log aten::log fp32 (%5) -> (%6 y fp32[4, 1])\n"
)
# log(1 + exp(-abs(x)))
NEGATIVE = (
    f"{INPUT}"
    "node m abs onnx::Abs fp32 (%0) -> (%2 m fp32[4, 4])\n"
    "node n neg onnx::Neg fp32 (%2) -> (%3 n fp32[4, 4])\n"
    "node e exp onnx::Exp fp32 (%3) -> (%4 a fp32[4, 4])\n"
    "node s add onnx::Add fp32 (%4, %1) -> (%5 b fp32[4, 4])\n"
    "node l log onnx::Log fp32 (%5) -> (%6 y fp32[4, 4])\n"
)


@pytest.mark.parametrize(
    ("graph", "policy", "kept"),
    [
        (SOFTPLUS, "all:fp16", {"e", "s", "l"}),
        (SOFTPLUS, "auto:fp16", {"e", "s", "l"}),
        (SOFTPLUS, "all:bf16", set[str]()),  # fp32's own range
        (SOFTMAX, "all:fp16", {"e", "s", "l"}),
        (SIGMOID, "all:fp16", set[str]()),
        (STABLE, "all:fp16", set[str]()),
        (NEGATIVE, "all:fp16", set[str]()),
    ],
)
def test_what_an_overflow_would_spoil_keeps_fp32(
    judged: Judged, graph: str, policy: str, kept: set[str]
) -> None:
    found = judged(EXPONENTIALS, graph, policy=policy)
    assert {n for n, v in found.items() if v is not None} == kept
    if kept and (reason := found["s"]):
        assert reason.text == (
            "l undoes e, whose result may leave fp16: no data showed its range"
        )


def test_observed_numbers_decide_by_themselves(judged: Judged) -> None:
    facts = {2: ValueFacts.of(np.ones((4, 4), np.float32))}
    found = judged(EXPONENTIALS, SOFTPLUS, policy="all:fp16", facts=facts)
    assert not any(found.values())
