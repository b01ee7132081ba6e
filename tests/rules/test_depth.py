"""Long sums outside the matmul engine keep fp32, unless errors are measured."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from finecast.numbers.formats import Format
from finecast.rules import Ruling
from finecast.rules.facts import ValueFacts
from finecast.rules.tier import DEPTH

Judged = Callable[..., dict[str, Ruling | None]]


def graph(op: str, native: str, taken: str, given: str) -> str:
    return (
        f"input %0 x fp32{taken}\nnode n {op} onnx::{native} fp32 (%0) -> (%1 y fp32{given})\n"
    )


@pytest.mark.parametrize(
    ("depth", "low", "kept"),
    [
        # n * u reaches 1 at 256 terms of bf16 (u = 2**-8) and 2048 of fp16 (u = 2**-11).
        (255, "bf16", False),
        (256, "bf16", True),
        (2047, "fp16", False),
        (2048, "fp16", True),
    ],
)
def test_sums_keep_fp32_from_the_depth_at_which_the_bound_is_1(
    judged: Judged, depth: int, low: str, kept: bool
) -> None:
    text = graph("reduce_sum", "ReduceSum", f"[3, {depth}]", "[3, 1]")
    verdict = judged(DEPTH, text, policy=f"all:{low}")["n"]
    assert (verdict is not None) == kept
    if verdict is not None:
        assert verdict.permits == {Format.FP32}
        assert verdict.evidence["depth"] == depth


def test_the_matmul_engine_accumulates_in_fp32(judged: Judged) -> None:
    assert judged(DEPTH, graph("matmul", "MatMul", "[3, 4096]", "[3, 1]"))["n"] is None


def test_observed_shapes_replace_symbols(judged: Judged) -> None:
    text = graph("reduce_sum", "ReduceSum", "[batch, 512]", "[batch, 1]")
    assert judged(DEPTH, text)["n"] is None
    ones = (np.ones(s, np.float32) for s in ((2, 512), (2, 1)))
    facts = {i: ValueFacts.of(x) for i, x in enumerate(ones)}
    assert judged(DEPTH, text, facts=facts)["n"] is not None


def test_measured_errors_know_better(judged: Judged) -> None:
    text = graph("reduce_sum", "ReduceSum", "[512]", "[1]")
    assert judged(DEPTH, text)["n"] is not None
    assert judged(DEPTH, text, measured=True)["n"] is None
