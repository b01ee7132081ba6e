"""Results of ``fit`` for modules are copied and moved, and say how they are saved."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from finecast.errors import UsageError, UserCodeError
from finecast_neural_compressor import (
    MixedPrecisionConfig,
    mix_precision,
)
from finecast_neural_compressor.torch_models import TorchResult

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_BF16", "1")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def planned() -> TorchResult:
    settings = MixedPrecisionConfig(example_inputs=torch.randn(2, 8))
    found = mix_precision.fit(net(), settings)
    assert isinstance(found, TorchResult)
    return found


def by_modules() -> TorchResult:
    found = mix_precision.fit(net(), MixedPrecisionConfig())
    assert isinstance(found, TorchResult)
    return found


def test_copies_compute_the_same() -> None:
    x = torch.randn(3, 8)
    for result in (planned(), by_modules()):
        other = copy.deepcopy(result)
        assert torch.equal(other(x), result(x))
        assert (other.lowered, other.products) == (result.lowered, result.products)
    assert torch.equal(pickle.loads(pickle.dumps(result))(x), result(x))


def test_a_copy_of_a_planned_graph_can_be_saved(tmp_path: object) -> None:
    copy.deepcopy(planned()).save(str(tmp_path))


def test_a_planned_graph_says_how_it_is_saved() -> None:
    with pytest.raises(UsageError, match=r"use result\.save\(folder\)"):
        pickle.dumps(planned())


@pytest.mark.parametrize("change", ["half", "float"])
def test_types_stay_those_of_the_conversion(change: str) -> None:
    x = torch.randn(3, 8)
    for result in (planned(), by_modules()):
        before = [t.dtype for t in result.parameters()]
        with pytest.raises(UsageError, match="its types are those of its plan"):
            getattr(result, change)()
        assert [t.dtype for t in result.parameters()] == before
        result(x)


def test_an_evaluation_that_fails_is_one_error() -> None:
    def failing(model: nn.Module) -> float:
        raise KeyError("accuracy")

    def leaving(model: nn.Module) -> float:
        sys.exit(3)

    for function, why in ((failing, "KeyError: 'accuracy'"), (leaving, r"calls sys\.exit")):
        with pytest.raises(UserCodeError, match=f"the evaluation failed: .*{why}") as caught:
            mix_precision.fit(net(), MixedPrecisionConfig(), eval_func=function)
        assert function.__name__ in str(caught.value)
        assert "given a Sequential" in str(caught.value)


def test_a_metric_that_fails_is_one_error() -> None:
    class Metric:
        def reset(self) -> None:
            """Nothing is kept."""

        def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
            raise ValueError("shapes differ")

        def result(self) -> float:
            return 0.0

    batches = [(torch.randn(2, 8), torch.zeros(2))]
    with pytest.raises(UserCodeError, match="eval_metric failed: ValueError: shapes differ"):
        mix_precision.fit(
            net(), MixedPrecisionConfig(), eval_dataloader=batches, eval_metric=Metric()
        )
