"""Regions where a module turns autocast off keep fp32, and ops of regions their scopes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import finecast.torch as ft
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.rules import NodeView
from tests.torch.planned import plan_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x).relu()


class Regions(nn.Module):
    """A product outside of regions, one where autocast is off, one where it is on in that."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.free, self.exact, self.low = nn.Linear(16, 16), Inner(), Inner()
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.free(x)
        with torch.autocast(self.device, enabled=False):
            y = self.exact(x.float())
            with torch.autocast("cpu", dtype=torch.bfloat16):
                z = self.low(y)
        return z.float() + y


X = torch.randn(4, 16)


def products(plan: Plan) -> dict[str, Format]:
    return {d.node.split("/")[0]: d.format for d in plan.decisions if "linear" in d.node}


def formats(low: nn.Module) -> dict[str, Format]:
    """The format of each product, by the scope that it was written in."""
    return _formats(plan_of(low))


def _formats(plan: Plan) -> dict[str, Format]:
    return {d.node.split("/")[0]: d.format for d in plan.decisions if "linear" in d.node}


@pytest.mark.parametrize("policy", ["matmult:bf16", "all:bf16"])
def test_a_region_without_autocast_keeps_fp32(policy: str) -> None:
    module = Regions().eval()
    low = ft.convert(module, (X,), policy)
    assert formats(low) == {"free": Format.BF16, "exact.product": Format.FP32}
    decision = next(d for d in plan_of(low).decisions if "exact.product" in d.node)
    assert "the model turns autocast off around it" in str(decision.reasons)
    with torch.no_grad():
        torch.testing.assert_close(low(X), module(X), atol=0.1, rtol=0.1)


@pytest.mark.filterwarnings("ignore:.*CUDA:UserWarning")
def test_the_region_may_be_of_another_device() -> None:
    low = ft.convert(Regions("cuda").eval(), (X,), "matmult:bf16")
    assert formats(low)["exact.product"] is Format.FP32


def test_a_users_rule_is_above_the_modules_word() -> None:
    def products_low(node: NodeView) -> str | None:
        return "bf16" if node.info.matmul_engine else None

    low = ft.convert(Regions().eval(), (X,), "auto:bf16", user_rules={"low": products_low})
    assert set(formats(low).values()) == {Format.BF16}


def test_a_program_of_the_users_stays_as_it_was(tmp_path: Path) -> None:
    program = torch.export.export(Regions().eval(), (X,))

    def state() -> list[Any]:
        graphs = [m for m in program.graph_module.modules() if isinstance(m, GraphModule)]
        nodes = [n for g in graphs for n in g.graph.nodes]
        return [
            (str(n), n.meta.get("custom"), "forward" in vars(g)) for g in graphs for n in nodes
        ]

    before, wanted = state(), program.module()(X)
    ft.convert(program, policy="matmult:bf16")
    assert state() == before
    assert torch.equal(program.module()(X), wanted)
    ft.save(program, tmp_path / "m.pt2")
    again = ft.convert(ft.load(tmp_path / "m.pt2"), policy="matmult:bf16")
    assert formats(again) == {"free": Format.BF16, "exact.product": Format.FP32}


@pytest.mark.parametrize("again", [False, True])
def test_training_keeps_the_region_in_fp32_both_ways(op_by_op: None, *, again: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = Regions()

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(module, x, use_reentrant=False) if again else module(x)
        assert isinstance(y, torch.Tensor)
        return y.square().mean()

    step = ft.compile(loss, policy="all:bf16")
    step(X).backward()
    (plan,) = step.finecast_plans
    kept = [
        d for d in plan.decisions if any("turns autocast off" in r.text for r in d.reasons)
    ]
    assert {d.format for d in kept} == {Format.FP32}
    # The product of the region, and those of its gradients by its input and its weight.
    assert [d.op for d in kept if d.op in ("addmm", "matmul")] == ["addmm", *["matmul"] * 2]
    assert any(d.op == "matmul" and d.format is Format.BF16 for d in plan.decisions)
