"""What the compiler leaves as it was is compiled around, counted, and said once."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import finecast.torch as ft
from finecast.numbers.formats import Format
from finecast.rules import NodeView


@pytest.fixture(autouse=True)
def _fresh(op_by_op: None) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def said(call: Callable[[], object]) -> list[str]:
    """What finecast and its users' rules warn of; torch warns of torch's own code."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    texts = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    return [t for t in texts if t.startswith(("finecast", "fp16 runs", "a rule"))]


class Tagger(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.recurrent = getattr(nn, kind)(16, 16, batch_first=True)
        self.head = nn.Linear(16, 9)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(self.words(ids))
        return self.head(states)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_recurrent_layer_is_compiled_around_and_named(kind: str) -> None:
    net, ids = Tagger(kind), torch.randint(0, 50, (4, 12))
    compiled = ft.compile(net, "all:bf16")
    (text,) = said(lambda: compiled(ids))
    assert re.search(r"planned \d+% of the FLOPs; recurrent stay fp32.*allow_rnn", text)
    assert said(lambda: compiled(ids)) == []  # once is enough
    decisions = [d for p in compiled.finecast_plans for d in p.decisions]
    formats = {d.format for d in decisions if d.node.startswith("head/")}
    assert formats == {Format.BF16}
    assert 0 < compiled.finecast_coverage.share < 0.5
    got, want = compiled(ids), net(ids)
    assert 0 < float((got - want).detach().norm() / want.detach().norm()) < 0.02


def test_more_nets_of_a_class_are_planned_than_dynamo_keeps_graphs_of_one_function() -> None:
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        pytest.skip("this PyTorch counts the graphs of all compilations together")
    x = torch.randn(4, 8)
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        compiled = ft.compile(nn.Linear(8, 8), "all:bf16", fullgraph=True)
        compiled(x)
        assert len(compiled.finecast_plans) == 1


def stopped(net: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    y = net[0](x)
    torch._dynamo.graph_break()
    return net[1](y)


def test_a_break_that_costs_nothing_is_not_worth_a_word() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    compiled = ft.compile(lambda x: stopped(net, x), "all:bf16")
    assert said(lambda: compiled(torch.randn(4, 8))) == []
    assert compiled.finecast_coverage.share == 1
    assert len(compiled.finecast_plans) == 2


def test_code_that_is_left_out_is_named_with_the_reason() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    untraced: Any = torch.compiler.disable(net[1])
    compiled = ft.compile(lambda x: untraced(net[0](x)), "all:bf16")
    (text,) = said(lambda: compiled(torch.randn(4, 8)))
    guessed = " (by the weights of 1, whose code was not captured)"
    assert f"planned 50% of the FLOPs{guessed}; 1 stay fp32: " in text
    assert compiled.finecast_coverage.uncounted == ("1",)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("packed", [False, True])
def test_flops_of_a_recurrent_layer_are_counted(kind: str, packed: bool) -> None:
    """A head over the last step alone: a small share of FLOPs, whatever its weights are."""
    recurrent = getattr(nn, kind)(16, 16, num_layers=2, bidirectional=True, batch_first=True)
    head = nn.Linear(32, 1024)
    nn.ModuleList([recurrent, head]).requires_grad_(False)

    def function(x: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([12, 12, 6, 6])
        given = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        states = recurrent(given if packed else x)[1]
        last = states[0] if kind == "LSTM" else states
        return head(torch.cat([last[-1], last[-2]], -1))

    compiled = ft.compile(function, "all:bf16")
    (text,) = said(lambda: compiled(torch.randn(4, 12, 16)))
    coverage = compiled.finecast_coverage
    steps = 36 if packed else 48
    matrices = sum(p.numel() for p in recurrent.parameters() if p.dim() > 1)
    assert coverage.recurrent_flops == 2 * steps * matrices
    product = 2 * 4 * 32 * 1024
    assert product <= coverage.planned_flops < 1.1 * product
    assert coverage.uncounted == ()
    counted = coverage.planned_flops + coverage.recurrent_flops
    assert coverage.share == pytest.approx(coverage.planned_flops / counted)
    assert f"planned {coverage.share:.0%} of the FLOPs; " in text


def test_gradients_of_a_recurrent_layer_count_twice_its_forward_pass() -> None:
    net = Tagger("GRU")
    compiled = ft.compile(net, "all:bf16")
    assert said(lambda: compiled(torch.randint(0, 50, (4, 12))).sum().backward())
    matrices = sum(p.numel() for p in net.recurrent.parameters() if p.dim() > 1)
    once = 2 * 4 * 12 * matrices
    assert compiled.finecast_coverage.recurrent_flops == 3 * once
    compiled(torch.randint(0, 50, (4, 12)))  # nothing is compiled: nothing is counted
    assert compiled.finecast_coverage.recurrent_flops == 3 * once


def test_warnings_of_planning_are_the_users_to_see() -> None:
    def rule(node: NodeView) -> None:
        if node.op == "addmm":
            warnings.warn("a rule", stacklevel=1)

    compiled = ft.compile(nn.Linear(8, 8), "all:fp16", user_rules={"rule": rule})
    texts = said(lambda: compiled(torch.randn(4, 8)).sum().backward())
    assert "a rule" in texts
    assert sum("of fp32's speed" in text for text in texts) == 1
