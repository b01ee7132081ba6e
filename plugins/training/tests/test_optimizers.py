"""An optimizer in the compiled step updates as it does outside of it, in fp32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn, optim

import finecast.torch as ft
from finecast.rules import override

pytestmark = [
    # torch's own code warns about torch's own code.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

# Dynamo runs fused forms and Adafactor op by op, as they are.
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-2, foreach=True),
    "adam": lambda p: optim.Adam(p, torch.tensor(1e-2), amsgrad=True),
    "rmsprop": lambda p: optim.RMSprop(p, 1e-2, momentum=0.9, centered=True),
}
# A few roundings of fp32: Inductor writes a division as a product with the reciprocal.
ROUNDINGS = 32 * 2.0**-24


@pytest.fixture(autouse=True)
def _fresh(op_by_op: None) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def training(name: str, net: nn.Module) -> Callable[[], None]:
    """A step of the optimizer; the first one clips gradients and averages weights."""
    optimizer = OPTIMIZERS[name](list(net.parameters()))
    averaged = copy.deepcopy(net)
    net.__dict__["averaged"] = averaged  # not an attribute: it is no part of the net

    def step() -> None:
        optimizer.step()

    def longer_step() -> None:
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for mean, p in zip(averaged.parameters(), net.parameters(), strict=True):
                mean.lerp_(p, 0.01)

    return longer_step if name == "momentum" else step


def trained(step: Callable[[], None], net: nn.Module) -> list[torch.Tensor]:
    """Parameters and their averages after two steps on the same gradients."""
    torch.manual_seed(1)
    for _ in range(2):
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        step()
    return [*net.parameters(), *net.__dict__["averaged"].parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_in_the_step_is_that_of_fp32(name: str) -> None:
    net = nn.Linear(16, 32)
    other = copy.deepcopy(net)
    compiled = ft.compile(training(name, net), "all:bf16")
    got, want = trained(compiled, net), trained(training(name, other), other)
    for a, b in zip(got, want, strict=True):
        assert float((a - b).norm() / b.norm()) < ROUNDINGS
    assert compiled.finecast_plans
    assert all(set(plan.counts) <= {"fp32"} for plan in compiled.finecast_plans)


def test_what_the_user_names_goes_low_all_the_same() -> None:
    net = nn.Linear(16, 4)
    with override({"addcmul": lambda node: "bf16"}):
        compiled = ft.compile(training("momentum", net), "all:bf16")
        trained(compiled, net)
    lowered = {
        d.op for p in compiled.finecast_plans for d in p.decisions if d.format.label == "bf16"
    }
    assert lowered == {"addcmul"}


class Running(nn.Module):
    """A batch norm written out, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return (y - self.mean).square().mean()


def test_running_statistics_are_summed_and_kept_in_fp32() -> None:
    net, x = Running(), torch.randn(64, 16)
    compiled = ft.compile(net, "all:bf16")
    compiled(x).backward()
    formats = {d.node: d.format.label for d in compiled.finecast_plans[0].decisions}
    assert [formats[n] for n in ("mean", "mul", "add")] == ["fp32"] * 3
    assert formats["layer/addmm"] == "bf16"


def test_gradients_of_a_loss_are_low_up_to_the_parameters() -> None:
    net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4))

    def step(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> int:
        def loss(given: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(net, given, (x,)).square().mean()

        gradients = torch.func.grad(loss)(parameters)
        with torch.no_grad():
            for name, p in parameters.items():
                p.sub_(0.1 * gradients[name])
        return 0

    compiled = ft.compile(step, "all:bf16")
    compiled({n: p.detach().clone() for n, p in net.named_parameters()}, torch.randn(64, 16))
    decisions = compiled.finecast_plans[0].decisions
    assert all(d.format.label == "bf16" for d in decisions if d.op in ("matmul", "addmm"))
    assert all(d.format.label == "fp32" for d in decisions if d.node.startswith("sub"))
