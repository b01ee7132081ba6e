"""A module that a format spoils is refused, as models of other libraries are."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import finecast.torch as ft
from finecast.errors import WrongNumbersError


class Large(nn.Module):
    """Values beyond the range of fp16, by a factor: divided by their norm they are none."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.product, self.factor = nn.Linear(8, 8), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.product(x * self.factor) @ self.product.weight * self.factor
        return torch.nn.functional.normalize(y)


class Cancelling(nn.Module):
    """What is left of two numbers that bf16 does not tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.product(x)
        return (y + 10000.0) - 10000.0


def convert(module: nn.Module, policy: str, *, verify: bool = True) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no speed is gained here")
        return ft.convert(module.eval(), (torch.randn(4, 8),), policy, verify=verify)


def test_nan_where_fp32_has_none_is_refused() -> None:
    with pytest.raises(
        WrongNumbersError, match="has NaN or Inf where fp32 has none"
    ) as caught:
        convert(Large(1e4), "all:fp16")
    assert "first at" in caught.value.where
    convert(Large(1.0), "all:fp16")
    low = convert(Large(1e4), "all:fp16", verify=False)
    assert torch.isnan(low(torch.randn(4, 8))).any()


def test_outputs_without_a_right_digit_are_refused() -> None:
    with pytest.raises(WrongNumbersError, match="no digit of it is right") as caught:
        convert(Cancelling(), "all:bf16")
    assert "verify=False" in str(caught.value)
    convert(Cancelling(), "auto:bf16")
