from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import finecast.torch as ft
from finecast.engines.torch import costs
from finecast.engines.torch.costs import KernelTimes
from finecast.frontends import torch as frontend
from finecast.numbers.formats import Format
from tests.torch.planned import plan_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Attending(nn.Module):
    def __init__(self, width: int = 64, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=width)
        self.output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        split = (batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(x).view(split).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return self.output(mixed + self.conv(mixed.transpose(1, 2)).transpose(1, 2))


def test_kernels_are_measured_and_packed_products_are_not() -> None:
    args = (torch.randn(2, 16, 64),)
    captured = frontend.capture(Attending().eval(), args)
    times = KernelTimes(
        graph=captured.graph,
        binding=captured.binding,
        device="cpu",
        formats=(Format.FP32, Format.BF16),
        threads=2,
    )
    found = {
        n.op: (times.time_s(n, Format.FP32, 1e-6), times.time_s(n, Format.BF16, 1e-6))
        for n in captured.graph.float_nodes
    }
    for op in ("attention", "conv"):
        assert all(t is not None and 0 < t < 1 for t in found[op])
    assert found["linear"] == (None, None)
    assert found["reshape"] == (None, None)


def test_long_kernels_are_left_to_the_rates_and_equal_ones_run_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = (torch.randn(2, 16, 64),)
    captured = frontend.capture(nn.Sequential(Attending(), Attending()).eval(), args)
    monkeypatch.setattr(costs, "_seen", {})
    runs: list[int] = []

    def best(calls: list[object], device: str, **options: object) -> list[float]:
        del device, options
        runs.append(len(calls))
        return [3.0, 4.0]

    monkeypatch.setattr(costs, "least_times", best)
    times = KernelTimes(
        graph=captured.graph,
        binding=captured.binding,
        device="cpu",
        formats=(Format.FP32, Format.BF16),
        threads=2,
    )
    attention = [n for n in captured.graph.nodes if n.op == "attention"]
    assert len(attention) == 2
    assert [times.time_s(n, Format.BF16, 1.0) for n in attention] == [None, None]
    assert runs == []
    assert [times.time_s(n, Format.BF16, 1e-3) for n in attention] == [2.0, 2.0]
    assert times.time_s(attention[0], Format.FP32, 1e-3) == 1.5
    assert runs == [2]


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, "fp32"), (1e-9, "bf16")])
def test_the_plan_follows_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, seconds: float, expected: str
) -> None:
    def best(calls: list[object], device: str, **options: object) -> list[float]:
        del calls, device, options
        return [1e-4, seconds]

    monkeypatch.setattr(costs, "_seen", {})
    monkeypatch.setattr(costs, "least_times", best)
    plan = plan_of(ft.convert(Attending().eval(), (torch.randn(2, 16, 64),)))
    formats = {d.op: d.format.label for d in plan.decisions}
    assert formats["attention"] == expected
    assert formats["linear"] == "bf16"
