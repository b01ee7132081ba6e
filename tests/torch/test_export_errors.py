"""Modules that ``torch.export`` cannot capture or save: one line that says what to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.export import Dim

import finecast.torch as ft
from finecast.errors import ModelError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Cache:
    """A result that torch knows nothing of."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@dataclass
class Outputs:
    """Registered by the test, without a name for files."""

    x: torch.Tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> object:
        y = self.linear(x)
        return y.relu() if x.shape[0] > 4 else y


class OfValues(Net):
    def forward(self, x: torch.Tensor) -> object:
        return self.linear(x) if x.sum() > 0 else x


class Caching(Net):
    def forward(self, x: torch.Tensor) -> object:
        return Cache(self.linear(x))


class Structured(Net):
    def forward(self, x: torch.Tensor) -> object:
        return Outputs(x=self.linear(x))


def test_sizes_that_the_code_depends_on() -> None:
    with pytest.raises(ModelError) as caught:
        ft.convert(Net(), (torch.randn(6, 4),), "all:bf16", ({0: Dim("b")},))
    assert caught.value.fix == "in dynamic_shapes, b = Dim('b', min=5)"
    assert "TORCH_LOGS" not in str(caught.value)


def test_values_that_the_code_depends_on(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match=r"test_export_errors\.py:\d+.*torch\.cond"):
        ft.convert(OfValues(), (torch.randn(6, 4),), "all:bf16")
    assert capfd.readouterr().err == ""


def test_a_result_that_torch_does_not_know() -> None:
    with pytest.raises(ModelError, match="use_cache=False") as caught:
        ft.convert(Caching(), (torch.randn(6, 4),), "all:bf16")
    assert "functorch" not in str(caught.value)


def test_inputs_that_the_module_does_not_take() -> None:
    with pytest.raises(ModelError, match="the module does not run on its example inputs"):
        ft.convert(Net(), (torch.randn(6, 4, dtype=torch.float64),), "all:bf16")


def test_a_result_without_a_name_for_files(tmp_path: Path) -> None:
    torch.export.register_dataclass(Outputs)
    x = torch.randn(6, 4)
    program = torch.export.export(Structured(), (x,))
    low = ft.convert(program, policy="all:bf16")
    with pytest.raises(ModelError, match=r"gives \S*Outputs.*serialized_type_name"):
        ft.save(ft.export(low, program), tmp_path / "low.pt2")
    assert not list(tmp_path.iterdir())
