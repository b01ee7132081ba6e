"""Long sums outside the matmul engine keep fp32, unless errors are measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from finecast.graph import ConstantStats
from finecast.numbers.formats import Format
from finecast.rules import Ruling
from finecast.rules.facts import ValueFacts
from finecast.rules.tier import DEPTH
from tests.graph.text import from_text

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


@pytest.mark.parametrize(
    ("op", "native", "shapes", "attributes", "kept"),
    [
        ("lp_norm", "LpNormalization", ("[n, 4096]", "[n, 4096]"), "", True),
        ("lp_norm", "LpNormalization", ("[2, 64]", "[2, 64]"), "", False),
        ("lp_norm", "LpNormalization", ("[4096, 2]", "[4096, 2]"), '{"axis": 0}', True),
        ("lp_norm", "LpNormalization", ("[4096, 2]", "[4096, 2]"), '{"axis": 1}', False),
        ("global_lp_pool", "GlobalLpPool", ("[1, 3, 64, 64]", "[1, 3, 1, 1]"), "", True),
        ("lp_pool", "LpPool", ("[1, 3, 64, 64]", "[1, 3, 32, 32]"), "", False),
        # Kernels keep their statistics in fp32; instance norms in IR are of the second kind.
        ("layer_norm", "LayerNormalization", ("[2, 4096]", "[2, 4096]"), "", False),
        ("mean_variance_norm", "MVN", ("[1, 3, 64, 64]", "[1, 3, 64, 64]"), "", False),
    ],
)
def test_norms_and_pools_of_powers(
    judged: Judged,
    op: str,
    native: str,
    shapes: tuple[str, str],
    attributes: str,
    *,
    kept: bool,
) -> None:
    given, result = shapes
    text = (
        f"input %0 x fp32{given}\n"
        f"node n {op} onnx::{native} fp32 (%0) -> (%1 y fp32{result}) {attributes}\n"
    )
    assert (judged(DEPTH, text, policy="all:fp16")["n"] is not None) == kept


def test_the_axes_of_a_norm_may_be_a_constant(judged: Judged) -> None:
    for axis, kept in ((0, True), (1, False)):
        text = (
            "input %0 x fp32[4096, 2]\nconstant %1 axes int64[1] size=1\n"
            "node n lp_norm NormalizeL2 fp32 (%0, %1) -> (%2 y fp32[4096, 2])\n"
        )
        graph = from_text(text)
        axes = ConstantStats(size=1, read=lambda axis=axis: np.array([axis]))
        values = [replace(v, constant=axes) if v.id == 1 else v for v in graph.values]
        found = judged(DEPTH, replace(graph, values=tuple(values)), policy="all:fp16")
        assert (found["n"] is not None) == kept
