"""Products on codes beside those of the fp32 module: which of them to blame."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import finecast
from finecast.frontends.torch.native import decoded
from finecast.native.source import AS_IT_IS
from finecast.native.torch.model import of_module

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:fp8(_dynamic_row)? runs at:UserWarning"),
]

LAYERS = ["a/linear", "b/linear_1", "c/linear_2"]


class Net(nn.Module):
    """Three layers, the second of which has one weight that is far larger than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 64)
        self.norm, self.c = nn.LayerNorm(64), nn.Linear(64, 16, bias=False)
        with torch.no_grad():
            self.b.weight[3, 5] = 300.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.gelu(self.a(x))
        return self.c(x + self.b(self.norm(x)) * x.sigmoid())


@pytest.fixture
def net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Net().eval(), torch.randn(2, 5, 32)


FORMS = [
    ("fp8", None, "fp8_e4m3"),
    ("fp8_dynamic_row", None, "fp8_e4m3"),
    ("fp8_dynamic_row,bf16", None, "fp8_e4m3"),
    ("int8_dynamic_row", "sm90", "int8"),
    ("int8_dynamic_row", None, "int8"),
]


@pytest.mark.parametrize(("formats", "target", "label"), FORMS)
def test_layers_on_codes_are_paired(
    formats: str, target: str | None, label: str, net: tuple[nn.Module, torch.Tensor]
) -> None:
    module, x = net
    low: Any = finecast.convert(
        module, policy=f"all:{formats}", example_inputs=(x,), target=target
    ).model
    found = finecast.blame(module, low, example_inputs=(x,), data={"x": x}, max_error=1e-4)
    assert not found.passed
    assert not any("without a partner" in text for text in found.warnings)
    culprits = {one.node: one.format for one in found.culprits}
    if not found.spread:
        assert {n: culprits[n] for n in LAYERS if n in culprits}
        assert {culprits[n] for n in LAYERS if n in culprits} == {label}
    layers = decoded(of_module(low, ((x,), {})).prepare(AS_IT_IS).captured)
    assert [n.op for n in layers.graph.nodes].count("linear") == 3
    with torch.no_grad():
        exact, got, same = module(x), low(x), tree_leaves(layers.module(x))[0]
    assert float((same.reshape(got.shape) - got).norm() / got.norm()) < 2.0**-12
    assert found.value == pytest.approx(float((got - exact).norm() / exact.norm()), rel=0.02)


def test_modules_without_codes_stay(net: tuple[nn.Module, torch.Tensor]) -> None:
    module, x = net
    captured = of_module(module, ((x,), {})).prepare(AS_IT_IS).captured
    assert decoded(captured) is captured
