"""Ops with bodies, and what ``torch.export`` says of attributes that a forward assigns."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import finecast.torch as ft
from finecast.numbers.formats import Format

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def of_many(y: torch.Tensor) -> torch.Tensor:
            return self.b(y).relu()

        def of_few(y: torch.Tensor) -> torch.Tensor:
            return self.b(y).tanh()

        y = self.a(x)
        return torch.cond(x.sum() > 0, of_many, of_few, (y,))


class Remembering(nn.Module):
    """Assigns an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.last = torch.zeros(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.last + self.linear(x)
        return self.last


def test_what_is_inside_of_branches_is_said_to_stay() -> None:
    x = torch.randn(3, 4)
    module = Branches().eval()
    with pytest.warns(UserWarning, match=r"inside of higher_order::cond keeps its types \(1"):
        low = ft.convert(module, (x,), "matmult:bf16")
    formats = {d.node: d.format for d in low.finecast_plan.decisions}  # type: ignore[union-attr]
    assert formats["a/linear"] is Format.BF16
    with torch.no_grad():
        assert torch.allclose(low(x), module(x), atol=0.05)


def test_the_predicate_of_branches_stays() -> None:
    class Deciding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.relu()
            return torch.cond((y - 1).amax() > 0, torch.sin, torch.cos, (y,))

    with pytest.warns(UserWarning, match="inside of higher_order::cond"):
        low = ft.convert(Deciding(), (torch.full((3, 4), 1.001),), "all:bf16")
    assert low.finecast_plan is not None
    formats = {d.op: d.format for d in low.finecast_plan.decisions}
    assert {formats[op] for op in ("sub", "reduce_max", "greater")} == {Format.FP32}
    assert formats["relu"] is Format.BF16


def test_weights_of_recurrent_layers_are_no_state() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.GRU(4, 4, num_layers=2, bidirectional=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ft.convert(Recurrent(), (torch.randn(3, 2, 4),), "all:bf16")


def test_state_that_is_no_buffer_is_told() -> None:
    with pytest.warns(UserWarning, match=r"self\.last was assigned during export"):
        ft.convert(Remembering(), (torch.randn(3, 4),), "all:bf16")
