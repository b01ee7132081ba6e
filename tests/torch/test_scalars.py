"""Scalar arguments beyond a format's range: saturated, or their op stays fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import finecast.torch as ft
from finecast.numbers.formats import Format

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

LOWEST = torch.finfo(torch.float32).min
Function = Callable[[torch.Tensor], torch.Tensor]


def written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 0] = LOWEST
    return y


FUNCTIONS: dict[str, Function] = {
    "masked_fill": lambda x: x.masked_fill(x > 0.5, LOWEST).softmax(-1),
    "a row of nothing else": lambda x: x.masked_fill(x < 99, LOWEST).softmax(-1),
    "where": lambda x: torch.where(x > 0, x, LOWEST).relu(),
    "clamp": lambda x: x.clamp(min=LOWEST, max=-LOWEST),
    "full_like": lambda x: torch.full_like(x, LOWEST) * 1e-38 + x,
    "pad": lambda x: F.pad(x, (1, 1), value=LOWEST).relu(),
    "nan_to_num": lambda x: torch.nan_to_num(x, posinf=1e30, neginf=LOWEST),
    "scalar first": lambda x: (100_000 - x) / 100_000,
    "triangle": lambda x: (x + torch.full((8, 8), LOWEST).triu(1)).softmax(-1),
    "written": lambda x: written(x).relu(),
    "no norm": lambda x: F.normalize(x * 0, eps=1e-12) + x,
}


class Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x @ x.T)


@pytest.mark.parametrize("low", [Format.BF16, Format.FP16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_computes_what_fp32_does(name: str, low: Format) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    module = Module(FUNCTIONS[name])
    with torch.no_grad():
        want = module(x)
        got = ft.convert(module, (x,), f"all:{low.label}")(x)
    assert torch.isfinite(got).all()
    assert float((got - want).norm() / want.norm()) < 8 * low.unit_roundoff


@pytest.mark.parametrize("name", ["masked_fill", "written"])
def test_so_it_does_compiled(name: str, op_by_op: None) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    x = torch.randn(8, 16)
    module = Module(FUNCTIONS[name])
    compiled = ft.compile(module, "all:bf16")
    with torch.no_grad():
        got, want = compiled(x), module(x)
    assert float((got - want).norm() / want.norm()) < 8 * Format.BF16.unit_roundoff
    (plan,) = compiled.finecast_plans
    # What decides reads fp32; the op with the scalar, and all after it, are low.
    assert {d.op for d in plan.decisions if d.format is Format.FP32} <= {"greater"}
