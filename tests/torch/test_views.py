"""Views of memory that lies otherwise after casts, or after ops are taken apart."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import finecast.torch as ft

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)


class CastOfSlice(Layers):
    """The cast packs a slice; no cast is left where the slice is low anyway."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.first(x)[:, :8].to(torch.bfloat16).view(-1)
        return self.last(packed.float().view(-1, 16))


class CastOfExpanded(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.first(x)[:, :1].expand(-1, 16).to(torch.bfloat16).view(-1)
        return self.last(packed.float().view(-1, 16))


class JoinedToNothing(Layers):
    """What ``cat`` gives is contiguous, but not where Inductor drops its empty part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([torch.tensor([]), self.first(x).t()])
        return self.last(rows.view(-1).view(-1, 16))


class Strided(Layers):
    """Reads also what lies between the values of a slice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        some = self.first(x)[:, ::2]
        return self.last(some.as_strided((8, 16), (16, 1)) + some.relu().sum())


class StridedInput(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x[:, ::2].as_strided((4, 16), (32, 2))))


NETWORKS = [Strided, StridedInput, CastOfSlice, CastOfExpanded, JoinedToNothing]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("policy", ["auto:bf16", "all:bf16"])
def test_training(network: type[Layers], policy: str, op_by_op: None) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    net, x = network(), torch.randn(8, 32)[:, ::2]
    other = copy.deepcopy(net)
    for call in (ft.compile(net, policy), other):
        call(x).square().mean().backward()
    for got, want in zip(net.parameters(), other.parameters(), strict=True):
        assert got.grad is not None
        assert want.grad is not None
        assert (got.grad - want.grad).norm() < 0.05 * want.grad.norm()


@pytest.mark.parametrize("network", NETWORKS)
def test_conversion(network: type[Layers]) -> None:
    torch.manual_seed(0)
    net, x = network(), torch.randn(8, 32)[:, ::2]
    with torch.no_grad():
        got, want = ft.convert(net, (x,), "all:bf16")(x), net(x)
    assert (got - want).norm() < 0.05 * want.norm()
