"""A module that a format spoils is handed out with a warning."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import finecast.torch as ft


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


def told(module: nn.Module, policy: str) -> list[str]:
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ft.convert(module.eval(), (torch.randn(4, 8),), policy)
    return [
        str(one.message) for one in caught if "of the converted module" in str(one.message)
    ]


def test_nan_where_fp32_has_none_is_told() -> None:
    (text,) = told(Large(1e4), "all:fp16")
    assert "has NaN or Inf where fp32 has none, on the example inputs" in text
    assert not told(Large(1.0), "all:fp16")


def test_outputs_without_a_right_digit_are_told() -> None:
    (text,) = told(Cancelling(), "all:bf16")
    assert "has a relative error of" in text
    assert not told(Cancelling(), "auto:bf16")
