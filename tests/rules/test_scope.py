"""Scopes: none, matmult, all, auto."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from finecast.numbers.formats import Format
from finecast.rules import Ruling
from finecast.rules.user_rules import SCOPE

Judged = Callable[..., dict[str, Ruling | None]]
GRAPH = """\
input %0 x fp32[4, 4]
node mm matmul onnx::MatMul fp32 (%0, %0) -> (%1 a fp32[4, 4])
node conv conv onnx::Conv fp32 (%1, %1) -> (%2 b fp32[4, 4])
node lstm lstm onnx::LSTM fp32 (%2) -> (%3 c fp32[4, 4])
node soft softmax onnx::Softmax fp32 (%3) -> (%4 d fp32[4, 4])
node odd unknown my::Op fp32 (%4) -> (%5 y fp32[4, 4])
"""


@pytest.mark.parametrize(
    ("scope", "kept"),
    [
        ("none", {"mm", "conv", "lstm", "soft", "odd"}),
        ("matmult", {"soft", "odd"}),
        ("all", set[str]()),
        ("auto", set[str]()),
    ],
)
def test_scopes(judged: Judged, scope: str, kept: set[str]) -> None:
    found = judged(SCOPE, GRAPH, policy=f"{scope}:bf16")
    assert {n for n, v in found.items() if v is not None} == kept
    assert all(v.permits == {Format.FP32} for v in found.values() if v is not None)
