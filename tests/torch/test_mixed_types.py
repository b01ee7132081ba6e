"""Training graphs whose ops do not give the types that their kernels do."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import finecast.torch as ft  # noqa: E402
from finecast.formats import Format  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


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
