"""What the model itself keeps in fp32 is kept, whatever the scope."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from finecast.rules import Ruling
from finecast.rules.stated import STATED_FP32


@pytest.mark.parametrize("policy", ["auto:bf16", "matmult:bf16", "all:int8,bf16"])
def test_a_stated_op_keeps_fp32(
    judged: Callable[..., dict[str, Ruling | None]], policy: str
) -> None:
    graph = """
    input %0 x fp32[8, 8]
    node kept matmul aten::mm fp32 (%0, %0) -> (%1 a fp32[8, 8]) {"finecast.stated": 1}
    node free matmul aten::mm fp32 (%1, %0) -> (%2 b fp32[8, 8])
    output %2
    """
    found = judged(STATED_FP32, graph, policy=policy)
    assert found["free"] is None
    assert found["kept"] is not None
    assert [f.label for f in found["kept"].permits] == ["fp32"]
