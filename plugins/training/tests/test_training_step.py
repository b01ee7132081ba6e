"""A training step as a module: its gradients, and the ops of it that leave fp16's range."""

from __future__ import annotations

import copy
import inspect

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import finecast
from finecast.diagnosis.blaming import Blame
from finecast.errors import UsageError
from finecast.torch import TrainingStep

_SCALE = 2.0**18


class Net(nn.Module):
    """Two layers with a norm between them, and statistics that training updates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.Linear(16, 4),
        )
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.norm(self.first(x)))
        return self.last(hidden)


def plain(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(net(x), y)


def scaled(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss scale that is too large for fp16's range."""
    return _SCALE * plain(net, x, y)


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(8, 8, generator=draw), torch.arange(8) % 4


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def test_gradients_are_those_of_backward_and_nothing_is_updated(
    net: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    before = copy.deepcopy(net.state_dict())
    step = TrainingStep(net, plain, batch)
    step(*batch)
    found = step(*batch)
    assert all(torch.equal(before[n], t) for n, t in net.state_dict().items())
    loss = plain(net, *batch)
    loss.backward()
    assert torch.equal(found["loss"], loss)
    for name, parameter in net.named_parameters():
        wanted = torch.zeros(2) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[f"grad_{name}"], wanted)


def blamed(step: nn.Module, batch: tuple[Tensor, Tensor], target: str, fmt: str) -> Blame:
    x, y = batch
    data = {"batch_0": np.asarray(x), "batch_1": np.asarray(y)}
    return finecast.blame(
        step, target, policy=f"all:{fmt}", example_inputs=batch, data=data, batch=8,
        progress=False, check=lambda _, low, fp32: bool(np.isfinite(low).all()),
    )  # fmt: skip


def test_a_loss_scale_that_overflows_is_named_with_its_line(
    net: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    found = blamed(TrainingStep(net, scaled, batch), batch, "sm70", "fp16")
    assert not found.passed
    assert any("overflow: mul" in text for c in found.culprits for text in c.reasons)
    assert found.first is not None
    assert found.first.source.startswith(f"{__file__}:")
    assert " in scaled" in found.first.source
    assert blamed(TrainingStep(net, scaled, batch), batch, "sm80", "bf16").passed


def test_an_op_of_the_backward_pass_has_the_line_of_its_forward_op(
    net: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    graph = finecast.load(TrainingStep(net, plain, batch), example_inputs=batch).read_graph()
    lines, first = inspect.getsourcelines(Net.forward)
    (backward,) = (n for n in graph.nodes if "gelu_backward" in n.native)
    at = first + next(i for i, line in enumerate(lines) if "gelu" in line)
    assert backward.source.startswith(f"{__file__}:{at} in forward: hidden = ")


@pytest.mark.parametrize("loss", [lambda net, x, _: net(x), lambda _, x, __: x.sum()])
def test_what_is_no_loss_is_refused(
    net: nn.Module, batch: tuple[Tensor, Tensor], loss: object
) -> None:
    with pytest.raises(UsageError, match="return one number that depends on a parameter"):
        TrainingStep(net, loss, batch)  # type: ignore[arg-type]
