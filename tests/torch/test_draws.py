"""Programs that draw at random, and that give as many rows as numbers cross a threshold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import finecast
from finecast.engines import get_engine
from finecast.frontends.torch.draws import draws
from finecast.native.source import AS_IT_IS
from finecast.native.torch.model import TorchModel
from finecast.native.torch.workload import ModuleWorkload

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))


class Noisy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.dropout(self.linear(x), 0.3, training=True)
        chosen = torch.bernoulli(torch.sigmoid(y))
        return y + torch.randn_like(y) + chosen + torch.rand(16)


class Crossing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        kept = y[:, 0] > 0.1
        return y[kept], torch.nonzero(y > 0.2)


def saved(module: torch.nn.Module, folder: Path) -> Path:
    path = folder / "m.pt2"
    torch.export.save(torch.export.export(module.eval(), (X,)), path)
    return path


def test_draws_are_no_error(tmp_path: Path) -> None:
    """The error was 1.1: both programs drew anew, and bf16 draws other numbers than fp32."""
    model, low = saved(Noisy(), tmp_path), tmp_path / "low.pt2"
    done = finecast.convert(
        model, low, "all:bf16", data={"x": X.numpy()}, lock=True, progress=False
    )
    assert 0 < done.to_dict()["verified"]["relative_error"] < 0.02
    assert any("draws of" in text for text in done.warnings)
    assert max(finecast.verify(low).deviations.values()) == 0
    # Beside the ops of the fp32 program stand those of the low one, which drew in between.
    blamed = finecast.blame(model, low, data={"x": X.numpy()}, progress=False)
    assert 0 < blamed.value < 0.02


def test_a_part_of_a_program_draws_as_the_whole(tmp_path: Path) -> None:
    """The first op drew the numbers of the last where the others were left out."""
    model = finecast.load(saved(Noisy(), tmp_path))
    assert isinstance(model, TorchModel)
    prepared = model.prepare(AS_IT_IS)
    names = [n for n in prepared.observable() if n.startswith("rand")]
    assert len(names) == 2
    sessions = [get_engine("torch").load(prepared.with_outputs(part)) for part in
                (names, names[1:])]  # fmt: skip
    whole, part = (session.run({"x": X.numpy()}) for session in sessions)
    np.testing.assert_array_equal(whole[names[1]], part[names[1]])


def test_a_users_evaluation_sees_the_same_draws(tmp_path: Path) -> None:
    """Each evaluation of one module gave another metric."""
    model = finecast.load(saved(Noisy(), tmp_path))
    assert isinstance(model, TorchModel)
    session = model.reference()
    workload = ModuleWorkload(
        function=lambda module: float(module(X).sum()),
        name="sum",
        known=None,
        examples={"x": X.numpy()},
        signature=model.signature,
    )
    assert workload.evaluate(session, session) == workload.evaluate(session, session)


def test_a_run_leaves_the_generator_as_it_was(tmp_path: Path) -> None:
    session = finecast.load(saved(Noisy(), tmp_path)).reference()
    before = torch.random.get_rng_state()
    first, second = (session.run({"x": X.numpy()}) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])


@pytest.mark.parametrize("training", [False, True])
def test_dropout_draws_in_training_alone(training: bool) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5, training=training)

    module = torch.nn.Module()
    module.forward = forward
    assert draws(torch.export.export(module, (X,))) is training


def test_attention_without_dropout_draws_nothing() -> None:
    module = torch.nn.Module()
    module.forward = lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x)
    assert not draws(torch.export.export(module, (X[None],)))


def test_rows_are_compared_as_sets(tmp_path: Path) -> None:
    """The bounds of such sizes were refused as code that the file brings."""
    model, low = saved(Crossing(), tmp_path), tmp_path / "low.pt2"
    x = np.random.default_rng(1).standard_normal((64, 16)).astype(np.float32)
    done = finecast.convert(model, low, "all:bf16", data={"x": x}, lock=True, progress=False)
    found = done.to_dict()["verified"]
    assert len(found["outputs"]) == 2
    assert 0 < found["relative_error"] < 0.5
    assert max(finecast.verify(low).deviations.values()) == 0
    assert finecast.blame(model, low, data={"x": x}, progress=False).value < 0.5
