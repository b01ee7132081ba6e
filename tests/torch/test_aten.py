"""The tables of ATen's mixed types, against the schemas that PyTorch itself states."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from finecast.frontends.torch.aten import FIXED

STATISTICS = {
    *("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd"),
    *("mean", "rstd"),
}


@pytest.mark.parametrize("native", [n for n in FIXED if "norm" in n or "backward" in n])
def test_what_keeps_fp32_beside_low_inputs_are_statistics(native: str) -> None:
    kept = {"logsumexp"} if "attention" in native else STATISTICS
    schema = getattr(torch.ops.aten, native.removeprefix("aten::")).default._schema
    tensors = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
    assert {tensors[port] for port in FIXED[native][0]} == kept & {*tensors}
