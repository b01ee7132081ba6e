"""Training graphs whose ops do not give the types that their kernels do."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import finecast.torch as ft
from finecast.numbers.formats import Format

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Maximum(nn.Module):
    """The gradient of a maximum goes where a value equals it, divided by how often."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 32), nn.LayerNorm(32)
        self.last = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = (torch.arange(len(x)) % 3)[:, None].expand(-1, 32)
        tops = x.new_zeros(3, 32) - 9
        rows = self.norm(self.first(x))
        tops = tops.scatter_reduce(0, groups, rows, "amax")
        return self.last(tops + rows.amax(0)).square().mean()


@pytest.mark.parametrize("policy", ["auto:bf16", "all:bf16"])
def test_gradients_of_a_maximum_find_it(policy: str, op_by_op: None) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    net, x = Maximum(), torch.randn(30, 16)
    other = copy.deepcopy(net)
    for call in (ft.compile(net, policy), other):
        call(x).backward()
    # Another row may be the largest where two are equal but for a rounding: in few columns.
    got, want = net.norm.bias.grad, other.norm.bias.grad
    assert got is not None
    assert want is not None
    assert float((got - want).norm() / want.norm()) < 16 * Format.BF16.unit_roundoff


@pytest.mark.parametrize(
    "net",
    [
        # Statistics of the norm, and the gradient that is made of them.
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 3, 3)),
        # A gradient that names its type by position.
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.Softmax(1), nn.Conv2d(8, 3, 3)),
    ],
)
def test_a_training_graph_runs_with_everything_low(net: nn.Module, op_by_op: None) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    other, x = copy.deepcopy(net), torch.randn(2, 3, 16, 16)
    for call in (ft.compile(net, "all:bf16"), other):
        call(x).square().mean().backward()
    for got, want in zip(net.parameters(), other.parameters(), strict=True):
        assert got.grad is not None
        assert want.grad is not None
        error = (got.grad - want.grad).norm() / want.grad.norm()
        # About four roundings in turn, of operands, results and gradients; as much for slopes.
        assert float(error) < 16 * Format.BF16.unit_roundoff


def test_one_op_of_another_type_is_told_as_one() -> None:
    module = nn.Linear(4, 4).double()
    with pytest.warns(UserWarning, match="1 op computes in fp64 and keeps it"):
        ft.convert(module, (torch.randn(2, 4, dtype=torch.float64),), "all:bf16")
