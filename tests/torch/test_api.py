"""``finecast.convert`` and ``tune`` of modules and programs in memory, as of any model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.export import ExportedProgram

import finecast
import finecast.torch as ft
from finecast.errors import UsageError
from tests.torch.planned import plan_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
X = torch.linspace(-1, 1, 64).reshape(4, 16)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.fixture
def net() -> nn.Module:
    return Net().eval()


def test_a_module_gives_a_module_and_a_program_a_program(net: nn.Module) -> None:
    done = finecast.convert(net, policy="all:bf16", example_inputs=(X,))
    assert isinstance(done.model, nn.Module)
    assert done.verified.relative_error
    assert torch.bfloat16 in {t.dtype for t in done.model.state_dict().values()}
    assert {t.dtype for t in net.state_dict().values()} == {torch.float32}
    torch.testing.assert_close(done.model(X), ft.convert(net, (X,), "all:bf16")(X))
    program = torch.export.export(net, (X,))
    low = finecast.convert(program, policy="all:bf16")
    assert isinstance(low.model, ExportedProgram)
    torch.testing.assert_close(low.model.module()(X), done.model(X))
    assert isinstance(finecast.apply(done.plan, net, example_inputs=(X,)).model, nn.Module)


def test_what_is_written_is_what_a_file_gives(net: nn.Module, tmp_path: Path) -> None:
    done = finecast.convert(net, tmp_path / "low.pt2", "all:bf16", example_inputs=(X,))
    assert done.output == tmp_path / "low.pt2"
    low = torch.export.load(tmp_path / "low.pt2").module()
    again = finecast.convert(net, policy="all:bf16", example_inputs=(X,))
    torch.testing.assert_close(low(X), again.model(X))
    again.save(tmp_path / "again.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "again.pt2").module()(X), low(X))


def test_a_metric_on_data_and_one_of_the_module(net: nn.Module) -> None:
    data = {"x": np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)}
    by_size: Any = {"objective": "size", "policy": "all:bf16", "example_inputs": (X,)}
    found = finecast.tune(net, data=data, metric="cosine", batch=4, **by_size)
    assert found.baseline.metric == 1
    seen: list[type] = []

    def evaluate(module: nn.Module) -> float:
        seen.append(type(module))
        return float(module(X).sum())

    other = finecast.tune(net, evaluate=evaluate, tolerance="50%", **by_size)
    assert other.baseline.metric == pytest.approx(float(net(X).detach().sum()))
    assert all(issubclass(one, nn.Module) for one in seen)
    for one in (found, other):
        assert isinstance(one.model, nn.Module)
        assert one.improved
        assert plan_of(one.model).digest == one.plan.digest


def test_example_inputs_are_for_modules(net: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs example inputs"):
        finecast.convert(net, policy="all:bf16")
    with pytest.raises(UsageError, match="example_inputs captures a PyTorch module"):
        finecast.convert(tmp_path / "m.onnx", example_inputs=(X,))
    with pytest.raises(UsageError, match="did you mean example_inputs"):
        finecast.convert(net, example_input=(X,))  # pyright: ignore[reportCallIssue]
