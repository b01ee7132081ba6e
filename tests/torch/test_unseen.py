"""Experts that no example gives a token keep fp32, in every format."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import finecast.torch as ft
from finecast.native import observing


class Experts(nn.Module):
    """Rows whose first number is positive go to the first expert, the others to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for expert, taken in ((self.first, x[:, 0] > 0), (self.second, x[:, 0] <= 0)):
            rows = taken.nonzero().squeeze(-1)
            result = result.index_add(0, rows, expert(x.index_select(0, rows)))
        return result


def converted(
    module: nn.Module, x: torch.Tensor, policy: str
) -> tuple[dict[str, str], list[str]]:
    """The formats of the products, and what was said of ops that no sample runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = ft.convert(module.eval(), (x,), policy).finecast_plan
    assert plan is not None
    found = {d.node: d.format.label for d in plan.decisions if d.op == "linear"}
    return found, [t for w in caught if "no sample" in (t := str(w.message))]


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_an_expert_without_a_token_keeps_fp32(low: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    x[:, 0] = x[:, 0].abs() + 0.1
    found, said = converted(Experts(), x, f"all:{low}")
    assert found == {"first/linear": low, "second/linear_1": "fp32"}
    assert "'second/linear_1'" in said[0]
    x[0, 0] = -1
    found, said = converted(Experts(), x, f"all:{low}")
    assert found == {"first/linear": low, "second/linear_1": low}
    assert not said


def test_models_of_known_sizes_are_not_run_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def session(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(observing, "exact_session", session)
    found, _ = converted(nn.Linear(8, 8), torch.randn(2, 8), "all:bf16")
    assert found == {"linear": "bf16"}
