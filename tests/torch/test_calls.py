"""Calls of ``finecast.torch`` with what they do not take are refused before any work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import finecast
import finecast.torch as ft
from finecast.errors import UsageError, UserCodeError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def error(module: nn.Module) -> float:
    return float(module(X).square().mean())


def tune(prepare: Any = lambda module: module, **more: Any) -> Any:
    options = ft.TuneOptions(prepare=prepare, steps=2)
    return ft.tune(net(), (X,), evaluate=error, options=options, progress=False, **more)


def test_the_direction_and_the_tolerance_are_keywords_as_of_finecast_tune() -> None:
    outcome = tune(lower_is_better=True, tolerance=0.1)
    assert outcome.conditions["higher_is_better"] is False
    assert outcome.conditions["target_metric"] == pytest.approx(1.1 * outcome.baseline.metric)


def test_a_criterion_states_the_direction_in_every_library() -> None:
    criterion = finecast.Criterion(tolerance=0.1, higher_is_better=False)
    assert tune(criterion=criterion).conditions["higher_is_better"] is False
    with pytest.raises(UsageError, match=r"of agreement more is better"):
        finecast.tune(
            net(), example_inputs=(X,), data={"input": X.numpy()}, criterion=criterion
        )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"criterion": finecast.Criterion(), "tolerance": 0.2},
            "tolerance is given beside Crit",
        ),
        ({"criterion": 5}, "a Criterion is expected for criterion"),
        ({"polciy": "all:bf16"}, "unknown argument of tune 'polciy': did you mean policy"),
        ({"example_kwargs": [1]}, "a dict is expected for example_kwargs"),
    ],
)
def test_it_is_refused_before_the_module_is_captured(
    more: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: pytest.fail("exported"))
    with pytest.raises(UsageError, match=said):
        tune(**more)


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda _: None, "prepare returns a NoneType, which cannot be called"),
        (lambda _: 1 / 0, "prepare failed: ZeroDivisionError"),
    ],
)
def test_what_prepare_gives_is_called(prepare: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(UserCodeError, match=said):
        tune(prepare)


def test_further_calls_are_pairs_of_inputs() -> None:
    with pytest.raises(UsageError, match=r"a Tensor is no pair of positional and keyword"):
        ft.convert(net(), (X,), "all:bf16", calibration=[X])  # type: ignore[list-item]
