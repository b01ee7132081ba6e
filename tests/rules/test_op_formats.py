"""The user's formats by op."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from finecast.numbers.formats import Format
from finecast.rules import Ruling
from finecast.rules.policy import Policy
from finecast.rules.user_rules import OP_FORMATS

Judged = Callable[..., dict[str, Ruling | None]]
GRAPH = """\
input %0 x fp32[4]
node a softmax onnx::Softmax fp32 (%0) -> (%1 p fp32[4])
node b relu onnx::Relu fp32 (%1) -> (%2 y fp32[4])
"""


@pytest.mark.parametrize("name", ["softmax", "Softmax", "onnx::Softmax"])
def test_canonical_and_native_names(judged: Judged, name: str) -> None:
    policy = Policy(op_formats={name: Format.FP32})
    found = judged(OP_FORMATS, GRAPH, policy=policy)
    assert found["b"] is None
    verdict = found["a"]
    assert verdict is not None
    assert verdict.permits == {Format.FP32}
    assert verdict.waives
