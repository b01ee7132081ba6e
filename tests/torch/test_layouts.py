"""Sparse tensors of a module stay as they are, and the rest is converted."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import finecast.torch as ft
from finecast.errors import ModelError
from finecast.numbers.formats import Format
from tests.torch.planned import plan_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),
]


class Graphs(nn.Module):
    """A layer on a graph, whose edges are a sparse matrix, between two dense ones."""

    edges: torch.Tensor

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.register_buffer("edges", (2 * torch.eye(16)).to_sparse(layout=layout))
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.edges @ self.first(x))
        return y


LAYOUTS = pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])


@LAYOUTS
@pytest.mark.parametrize("policy", ["none", "all:bf16", "auto:bf16"])
def test_what_reads_a_sparse_tensor_keeps_its_type(layout: torch.layout, policy: str) -> None:
    module, x = Graphs(layout).eval(), torch.randn(16, 16)
    low = ft.convert(module, (x,), policy)
    with torch.no_grad():
        torch.testing.assert_close(low(x), module(x), atol=0.05, rtol=0.05)
    assert low.get_buffer("edges").dtype is torch.float32
    if policy == "all:bf16":
        products = [d for d in plan_of(low).decisions if "linear" in d.node]
        assert {d.format for d in products} == {Format.BF16}
    assert torch.equal(pickle.loads(pickle.dumps(low))(x), low(x))


@LAYOUTS
def test_it_is_tuned(layout: torch.layout) -> None:
    module, x = Graphs(layout).eval(), torch.randn(16, 16)
    outcome = ft.tune(
        module,
        (x,),
        evaluate=lambda m: 16 + float(m(x).mean()),
        options=ft.TuneOptions(prepare=lambda m: m, steps=2),
    )
    with torch.no_grad():
        assert outcome.baseline.metric == pytest.approx(16 + float(module(x).mean()))


@LAYOUTS
def test_a_file_of_it_is_refused_in_one_error(layout: torch.layout, tmp_path: Path) -> None:
    x = torch.randn(16, 16)
    low = ft.convert(Graphs(layout).eval(), (x,), "all:bf16")
    with pytest.raises(ModelError, match=r"does not write 'edges', which is torch.sparse"):
        ft.save(torch.export.export(low, (x,)), tmp_path / "low.pt2")
    assert not list(tmp_path.iterdir())


def test_a_sparse_module_is_copied() -> None:
    low = ft.convert(Graphs(torch.sparse_coo).eval(), (torch.randn(16, 16),), "all:bf16")
    assert copy.deepcopy(low).get_buffer("edges").is_sparse


@pytest.mark.parametrize("call", [torch.relu, nn.Linear(4, 4).forward])
def test_what_is_no_module_is_told_to_be_one(call: object) -> None:
    with pytest.raises(Exception, match=r"give an nn.Module whose forward calls it"):
        ft.convert(call, (torch.ones(4),))  # type: ignore[arg-type]
