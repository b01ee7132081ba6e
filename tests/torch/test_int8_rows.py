"""Linear layers of codes whose results are read as rows."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from finecast.engines.torch.integers import compiled_frozen
from finecast.measure.environment import environment
from tests.torch.test_int8 import converted, relative

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


class Normed(nn.Module):
    """A linear layer with a batch norm of its rows behind; ``also`` reads it with its axes."""

    def __init__(self, width: int, *, also: bool = False) -> None:
        super().__init__()
        self.product = nn.Linear(width, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.also = also

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.product(x)
        normed = self.norm(x.flatten(0, -2)).reshape_as(x)
        return normed + torch.relu(x) if self.also else normed


class Rows(nn.Module):
    """Two such layers."""

    def __init__(self, *, also: bool) -> None:
        super().__init__()
        self.one = Normed(16, also=also)
        self.two = Normed(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(nn.functional.hardswish(self.one(x)))


@pytest.fixture(params=[False, True], ids=["rows alone", "its axes, too"])
def net(request: pytest.FixtureRequest) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Rows(also=request.param).eval(), torch.randn(2, 3, 5, 16)


def linears(made: torch.fx.GraphModule) -> list[torch.fx.Node]:
    linear = torch.ops.aten.linear.default
    return list(made.graph.find_nodes(op="call_function", target=linear))


@pytest.mark.parametrize("policy", ["all:int8", "all:int8,bf16"])
def test_what_is_read_as_rows_is_computed_as_rows(
    net: tuple[nn.Module, torch.Tensor], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor takes a reshape to rows and its own out together, and finds no pattern then."""
    module, x = net
    made, _ = converted(monkeypatch, net, policy)
    assert made.finecast_plan.counts["int8"] == 2
    for product in linears(made):
        assert product.meta["val"].shape == (30, 16)
        assert product.all_input_nodes[0].meta["val"].shape == (30, 16)
    with torch.no_grad():
        assert made(x).shape == x.shape
        assert 0 < relative(made(x), module(x)) < 0.05


def test_rows_of_free_sizes(
    net: tuple[nn.Module, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = net
    free = {0: torch.export.Dim("batch"), 2: torch.export.Dim("length")}
    made, _ = converted(monkeypatch, net, dynamic_shapes=({**free},))
    assert all(product.meta["val"].ndim == 2 for product in linears(made))
    torch.manual_seed(1)
    for shape in ((1, 3, 9, 16), (7, 3, 2, 16)):
        other = torch.randn(shape).clamp(x.min(), x.max())
        with torch.no_grad():
            assert 0 < relative(made(other), module(other)) < 0.05


def test_what_is_read_with_its_axes_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows is fused with the product there, and a reshape would stand between."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).eval()
    made, _ = converted(monkeypatch, (module, torch.randn(2, 3, 16)))
    assert [product.meta["val"].ndim for product in linears(made)] == [3, 3]


@pytest.mark.slow
@pytest.mark.skipif(
    not {"avx512_vnni", "avx_vnni"} & set(environment().flags), reason="needs VNNI"
)
@pytest.mark.parametrize("policy", ["all:int8", "all:int8,bf16"])
def test_rows_run_on_integers(
    net: tuple[nn.Module, torch.Tensor], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = converted(monkeypatch, net, policy)
    run: Any
    run, left_out = compiled_frozen(made, (net[1],), {})
    assert not left_out
    with torch.no_grad():
        assert relative(run(net[1]), made(net[1])) < 0.03
