"""Compiled PyTorch: finecast beside torch.autocast, in one run, by turns.

    python -m benchmarks.bench_torch [inference|training|accumulation] [NET ...] [--threads N]

Inference compares with ``torch.compile`` under ``torch.autocast(bfloat16)``, with and without
Inductor's freezing; training with ``torch.compile`` and autocast. Needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.common import skip

if importlib.util.find_spec("torch") is None:
    skip("torch", "PyTorch is not installed: pip install 'finecast[torch]'")
    sys.exit()

import torch
from torch import nn

import finecast.torch as ft
from benchmarks.torch_nets import Bert, Depthwise, PoolsAndNorms, ResNet50, WithLoss
from finecast.measure.timing import latency, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A network and its inputs."""

    net: Callable[[], nn.Module]
    inputs: Callable[[], tuple[torch.Tensor, ...]]


def ids(batch: int, tokens: int) -> tuple[torch.Tensor]:
    """Random tokens."""
    return (torch.randint(0, 1000, (batch, tokens)),)


def images(batch: int) -> tuple[torch.Tensor]:
    """Random images."""
    return (torch.randn(batch, 3, 224, 224),)


INFERENCE = {
    "bert6 1x32": Case(net=lambda: Bert(6, 1000), inputs=lambda: ids(1, 32)),
    "bert6 1x128": Case(net=lambda: Bert(6, 1000), inputs=lambda: ids(1, 128)),
    "bert6 8x128": Case(net=lambda: Bert(6, 1000), inputs=lambda: ids(8, 128)),
    "resnet50": Case(net=ResNet50, inputs=lambda: images(1)),
    "depthwise": Case(net=Depthwise, inputs=lambda: images(2)),
    "pools": Case(net=PoolsAndNorms, inputs=lambda: images(4)),
}
TRAINING = {
    "layer 8x128": Case(
        net=lambda: WithLoss(Bert(1, 30522, head=True)),
        inputs=lambda: (*ids(8, 128), *ids(8, 128)),
    ),
    "bert6 4x128": Case(
        net=lambda: WithLoss(Bert(6, 1000, head=True)),
        inputs=lambda: (*ids(4, 128), *ids(4, 128)),
    ),
}


def under_autocast(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` inside bf16 autocast on the CPU."""

    def run(*args: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return call(*args)

    return run


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error of the output."""
    return float((got.float() - want).norm() / want.norm())


def inference(name: str, case: Case, seconds: float) -> None:
    """One row a way of running ``case``."""
    torch.manual_seed(0)
    net, args = case.net().eval(), case.inputs()
    with torch.no_grad():
        want = net(*args)
        low = ft.convert(net, args)
        ways = {
            "fp32+freezing": (net, True),
            "autocast": (under_autocast(net), False),
            "autocast+freezing": (under_autocast(net), True),
            "finecast": (low, False),
            "finecast+freezing": (low, True),
        }
        runs: dict[str, Callable[[], object]] = {}
        errors: dict[str, float] = {}
        for way, (call, freezing) in ways.items():
            torch._inductor.config.freezing = freezing
            compiled = torch.compile(call, options={"freezing": True} if freezing else {})
            errors[way] = error(compiled(*args), want)
            runs[way] = lambda c=compiled: c(*args)
        times = latency(runs, min_time_s=seconds, repeats=15)
    size = _bytes(low) / _bytes(net)
    print(f"{name}: plan {low.finecast_plan.counts}, saved {size:.2f} of fp32")
    for way, t in times.items():
        plain = ratio(times["autocast"], t).median
        frozen = ratio(times["autocast+freezing"], t).median
        print(
            f"  {way:20s} {1e3 * t.median_s:9.2f} ms (p10 {1e3 * t.p10_s:9.2f})"
            f"  {plain:5.2f}x autocast  {frozen:5.2f}x frozen  error {errors[way]:.5f}"
        )


def training(name: str, case: Case, seconds: float, *, micro: int = 1) -> None:
    """One step (forward, backward, SGD) by fp32, autocast and finecast."""
    torch.manual_seed(0)
    net, args = case.net().train(), case.inputs()
    nets = {way: copy.deepcopy(net) for way in ("fp32", "autocast", "finecast")}
    calls = {
        "fp32": torch.compile(nets["fp32"]),
        "autocast": torch.compile(under_autocast(nets["autocast"])),
        "finecast": ft.compile(nets["finecast"], cache_weights=micro > 1),
    }
    steps = {way: _step(nets[way], call, args, micro) for way, call in calls.items()}
    times = latency(steps, min_time_s=seconds, repeats=7, warmup=2)
    print(f"{name}, {micro} microbatches:")
    for way, t in times.items():
        forward = ft.peak_bytes(lambda w=way: calls[w](*args))
        print(
            f"  {way:10s} {1e3 * t.median_s:9.1f} ms (p10 {1e3 * t.p10_s:9.1f})"
            f"  {ratio(times['autocast'], t).median:5.2f}x autocast"
            f"  step peak {ft.peak_bytes(steps[way]) / 2**20:7.1f} MB"
            f"  forward peak {forward / 2**20:7.1f} MB"
        )


def _step(
    net: nn.Module, call: Callable[..., Any], args: tuple[torch.Tensor, ...], micro: int
) -> Callable[[], object]:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        for _ in range(micro):
            call(*args).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _bytes(net: nn.Module) -> int:
    return sum(t.nbytes for t in net.state_dict().values())


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "what",
        nargs="?",
        default="inference",
        choices=("inference", "training", "accumulation"),
    )
    parser.add_argument("nets", nargs="*")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=6.0)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    warnings.simplefilter("ignore")
    if chosen.what == "accumulation":
        case = Case(
            net=lambda: WithLoss(Bert(6, 1000, head=True)),
            inputs=lambda: (*ids(1, 128), *ids(1, 128)),
        )
        training("bert6 1x128", case, chosen.seconds, micro=8)
        return
    table = INFERENCE if chosen.what == "inference" else TRAINING
    for name in chosen.nets or table:
        if chosen.what == "inference":
            inference(name, table[name], chosen.seconds)
        else:
            training(name, table[name], chosen.seconds)


if __name__ == "__main__":
    main()
