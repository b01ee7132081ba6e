"""Ops whose results are the model's outputs keep fp32 in the scope of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from finecast.numbers.formats import Format
from finecast.rules import Ruling
from finecast.rules.ends import ENDS
from finecast.rules.policy import Policy

Judged = Callable[..., dict[str, Ruling | None]]
GRAPH = """\
input %0 x fp32[4, 4]
node mm matmul onnx::MatMul fp32 (%0, %0) -> (%1 a fp32[4, 4])
node inside softmax onnx::Softmax fp32 (%1) -> (%2 b fp32[4, 4])
node last matmul onnx::MatMul fp32 (%2, %2) -> (%3 logits fp32[4, 4])
node end softmax onnx::Softmax fp32 (%3) -> (%4 shares fp32[4, 4])
output %3
output %4
"""
ALONE = """\
input %0 x fp32[4, 4]
node end softmax onnx::Softmax fp32 (%0) -> (%1 shares fp32[4, 4])
output %1
"""
ALL = Policy.parse("all:bf16")
LIKE = Policy.parse("like-grappler:bf16")
# A residual stream that is an output, one that is transposed first, and a branch that is read.
RESIDUAL = """\
input %0 x fp32[4, 4]
constant %1 w fp32[4, 4] size=16 largest=1.0 smallest_nonzero=0.1
node first matmul onnx::MatMul fp32 (%0, %1) -> (%2 a fp32[4, 4])
node mean reduce_mean onnx::ReduceMean fp32 (%2) -> (%3 m fp32[4, 1])
node half mul onnx::Mul fp32 (%2, %3) -> (%4 h fp32[4, 4])
node sum add onnx::Add fp32 (%2, %4) -> (%5 s fp32[4, 4])
node scaled mul onnx::Mul fp32 (%2, %3) -> (%6 c fp32[4, 4])
node turned transpose onnx::Transpose fp32 (%6) -> (%7 t fp32[4, 4])
node product matmul onnx::MatMul fp32 (%2, %1) -> (%8 p fp32[4, 4])
node bias add onnx::Add fp32 (%8, %1) -> (%9 b fp32[4, 4])
node act relu onnx::Relu fp32 (%9) -> (%10 r fp32[4, 4])
node pooled reduce_mean onnx::ReduceMean fp32 (%2) -> (%11 q fp32[4, 1])
output %5
output %7
output %10
output %11
"""


@pytest.mark.parametrize(
    ("policy", "measured", "kept"),
    [
        (LIKE, False, {"end"}),
        (LIKE, True, set[str]()),  # its error on real data decides
        (Policy.parse("auto:bf16"), False, set[str]()),  # its tier decides
        (
            Policy.parse("like-grappler:fp8_e4m3"),
            False,
            set[str](),
        ),  # results are not stored in it
        (replace(LIKE, io={"shares": Format.BF16}), False, set[str]()),
        (replace(LIKE, io_low=True), False, set[str]()),
    ],
)
def test_the_last_softmax_keeps_fp32(
    judged: Judged, policy: Policy, measured: bool, kept: set[str]
) -> None:
    found = judged(ENDS, GRAPH, policy=policy, measured=measured)
    assert {n for n, v in found.items() if v is not None} == kept


def test_what_ends_the_model_keeps_fp32_but_in_the_kernels_of_products(judged: Judged) -> None:
    found = judged(ENDS, RESIDUAL, policy=LIKE)
    kept = {n for n, v in found.items() if v is not None}
    assert kept == {"sum", "scaled", "turned", "pooled"}


def test_an_op_that_stands_alone_is_what_was_asked_for(judged: Judged) -> None:
    assert judged(ENDS, ALONE, policy=LIKE) == {"end": None}


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime", "tensorflow", "emulator:trn1"])
def test_all_is_every_op_whatever_the_engine(judged: Judged, engine: str) -> None:
    assert not any(judged(ENDS, GRAPH, policy=ALL, engine=engine).values())
