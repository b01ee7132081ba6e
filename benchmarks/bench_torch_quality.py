"""Errors and memory of PyTorch plans against torch.autocast's, the same on any machine.

    python -m benchmarks.bench_torch_quality [errors|training] [NET ...] [--seeds N]

``errors``: the relative output error of eager modules against fp32, over autocast's. The
device's rates are stated, not measured (a CPU with bf16 products eight times as fast as
fp32's), so that plans are the same everywhere. ``training``: bytes that a compiled forward
pass leaves for the backward pass, the peak of both, and the error of the gradients, over
compiled autocast's. Needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final
from unittest import mock

# First, as it exits with a message where PyTorch is not installed.
from benchmarks.torch_common import Case, settled, under_autocast  # isort: skip

import torch
from torch import nn

import finecast.torch as ft
from benchmarks.torch_families import FAMILIES
from finecast.engines.torch import rates
from finecast.engines.torch.costs import KernelTimes
from finecast.numbers.formats import Format

POLICIES: Final = ("all:bf16", "auto:bf16")


def stated(device: str, fmt: Format, threads: int) -> rates.Rate:
    """Rates of a CPU core with a matrix unit for bf16, approximately those of AMX."""
    del device, threads
    speed = 8.0 if fmt is Format.BF16 else 1.0
    return rates.Rate(
        product_tflops=0.1 * speed, speed=speed, bandwidth_gb_s=10.0, overhead_s=2e-6
    )


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error."""
    return float((got.float() - want).norm() / want.norm())


def errors(name: str, case: Case, seeds: int) -> dict[str, float]:
    """The median over seeds of each policy's error over autocast's; prints them."""
    found: dict[str, list[float]] = {}
    counts = ""
    for seed in range(seeds):
        torch.manual_seed(seed)
        args = case.inputs()
        net = settled(case.net(), args)
        with torch.no_grad():
            want = net(*args)
            base = error(under_autocast(net)(*args), want)
            found.setdefault("autocast", []).append(base)
            for policy in POLICIES:
                low = ft.convert(net, args, policy)
                found.setdefault(policy, []).append(error(low(*args), want) / base)
                counts += f" {low.finecast_plan.counts}" if seed == 0 else ""  # type: ignore
    middle = {way: median(x) for way, x in found.items()}
    worst = " ".join(f"{max(found[p]):6.2f}" for p in POLICIES)
    ratios = " ".join(f"{middle[p]:6.2f}" for p in POLICIES)
    print(f"{name:10s} autocast {middle['autocast']:.5f}  {ratios}  worst {worst}{counts}")
    return middle


def training(name: str, case: Case, seeds: int) -> dict[str, float]:
    """Saved bytes, peak and gradients' error over autocast's; prints them."""
    torch.manual_seed(0)
    net, args = WithLoss(case.net()).train(), case.inputs()
    ways = {
        "fp32": lambda n: n,
        "autocast": lambda n: torch.compile(under_autocast(n)),
        "auto": ft.compile,
    }
    nets = {way: copy.deepcopy(net) for way in ways}
    calls: dict[str, Callable[..., Any]] = {}
    for way, make in ways.items():
        torch.compiler.reset()
        calls[way] = make(nets[way])
        gradients(nets[way], calls[way], args)
    off: dict[str, list[float]] = {"autocast": [], "auto": []}
    for seed in range(seeds):
        torch.manual_seed(seed + 1)
        args = case.inputs()
        want = gradients(nets["fp32"], calls["fp32"], args)
        for way, x in off.items():
            x.append(error(gradients(nets[way], calls[way], args), want))
    row = {
        "gradients": median(b / a for a, b in zip(off["autocast"], off["auto"], strict=True))
    }
    saved = {way: ft.saved_bytes(calls[way], args) for way in off}
    peak = {way: _peak(nets[way], calls[way], args) for way in off}
    row |= {
        "saved": saved["auto"] / saved["autocast"],
        "peak": peak["auto"] / peak["autocast"],
    }
    print(
        f"{name:10s} saved {saved['auto'] / 2**20:7.2f} MB {row['saved']:5.2f}"
        f"  peak {peak['auto'] / 2**20:7.2f} MB {row['peak']:5.2f}"
        f"  gradients {median(off['autocast']):.5f} {row['gradients']:5.2f}"
    )
    return row


class WithLoss(nn.Module):
    """A net with a loss, in fp32, that weighs all of its outputs alike."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """A scalar."""
        out = self.net(*args).float()
        signs = 1 - 2 * (torch.arange(out.numel(), device=out.device) % 7 % 2)
        return (out.flatten() * signs).mean()


def gradients(
    net: nn.Module, call: Callable[..., Any], args: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Of all parameters, in one vector."""
    net.zero_grad()
    call(*args).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def _peak(net: nn.Module, call: Callable[..., Any], args: Sequence[torch.Tensor]) -> int:
    net.zero_grad()
    return ft.activation_bytes(lambda: call(*args).backward())


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", default="errors", choices=("errors", "training"))
    parser.add_argument("nets", nargs="*")
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    work = errors if chosen.what == "errors" else training
    # No kernel is timed: the rates are those of a device that is not here.
    with (
        mock.patch.object(rates, "rate", stated),
        mock.patch.object(KernelTimes, "time_s", return_value=None),
    ):
        rows = [work(name, FAMILIES[name], chosen.seeds) for name in chosen.nets or FAMILIES]
    for key in rows[0]:
        print(f"median {key}: {median(row[key] for row in rows):.3f}")


if __name__ == "__main__":
    main()
