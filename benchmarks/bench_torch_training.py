"""Compiled PyTorch training: finecast beside torch.autocast, in one run, by turns.

    python -m benchmarks.bench_torch_training [steps|accumulation|curves|memory] [NET ...]

``activations`` is the peak of memory that a forward and backward pass allocates and frees
again. It has no parameters, gradients and optimizer state, but low copies of weights, also
those that finecast keeps from call to call. ``curves`` trains two small nets with several
seeds, and compares finecast's distance from fp32 with the spread of fp32's own seeds.
``memory`` has the peak of forward and backward pass, gradients among it, by each policy,
beside compiled autocast's. Needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

# First, as it exits with a message where PyTorch is not installed.
from benchmarks.torch_common import Case, ids, under_autocast  # isort: skip

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import finecast.torch as ft
from benchmarks.torch_nets import Bert, WithLoss
from benchmarks.training_tasks import Task, characters, pictures
from finecast.measure.racing import Effort, Race

WHAT = ("steps", "accumulation", "curves", "memory")
STEPS = {
    "layer 8x128": Case(
        net=lambda: WithLoss(Bert(1, 30522, head=True)),
        inputs=lambda: (*ids(8, 128), *ids(8, 128)),
    ),
    "bert6 4x128": Case(
        net=lambda: WithLoss(Bert(6, 1000, head=True)),
        inputs=lambda: (*ids(4, 128), *ids(4, 128)),
    ),
}
ACCUMULATION = {
    "bert6 1x128": Case(
        net=lambda: WithLoss(Bert(6, 1000, head=True)),
        inputs=lambda: (*ids(1, 128), *ids(1, 128)),
    ),
}
MEMORY = {
    f"{width} wide, {batch}x128": Case(
        net=lambda width=width: WithLoss(Bert(1, 1000, width=width, heads=4, head=True)),
        inputs=lambda batch=batch: (*ids(batch, 128), *ids(batch, 128)),
    )
    for width, batch in ((64, 8), (256, 8), (64, 32))
}
POLICIES: dict[str, dict[str, Any]] = {
    "auto": {},
    "matmult": {"policy": "matmult:bf16"},
    "all": {"policy": "all:bf16"},
    "raf": {"rule_set": "raf"},
}
TASKS = {"characters": characters, "pictures": pictures}


def training(name: str, case: Case, seconds: float, *, micro: int = 1) -> None:
    """One step (forward, backward, SGD) by fp32, autocast and finecast."""
    torch.manual_seed(0)
    net, args = case.net().train(), case.inputs()
    nets = {way: copy.deepcopy(net) for way in ("fp32", "autocast", "finecast")}
    calls = {
        "fp32": torch.compile(nets["fp32"]),
        "autocast": torch.compile(under_autocast(nets["autocast"])),
        "finecast": ft.compile(nets["finecast"], accumulation=micro > 1),
    }
    steps = {way: _step(nets[way], call, args, micro) for way, call in calls.items()}
    effort = Effort(min_time_s=seconds, rounds=7, warmup=2)
    race = Race.of(steps["fp32"], steps, effort)
    kept = dict.fromkeys(calls, 0) | {
        "finecast": calls["finecast"].finecast_backend.kept_bytes  # type: ignore[attr-defined]
    }
    peaks = {
        way: kept[way] + ft.activation_bytes(lambda c=call: c(*args).backward())
        for way, call in calls.items()
    }
    print(f"{name}, {micro} microbatch{'es' if micro > 1 else ''}:")
    for way in steps:
        t = race.latency(way)
        print(
            f"  {way:10s} {1e3 * t.median_s:9.1f} ms (p10 {1e3 * t.p10_s:9.1f})"
            f"  {race.between('autocast', way).median:5.2f}x autocast"
            f"  activations {peaks[way] / 2**20:7.1f} MB"
            f" ({peaks[way] / peaks['fp32']:.2f} of fp32's),"
            f" {kept[way] / 2**20:.1f} MB of them kept"
        )


def memory(name: str, case: Case) -> None:
    """The peak of forward and backward pass by each policy."""
    torch.manual_seed(0)
    net, args = case.net().train(), case.inputs()
    calls: dict[str, Callable[[], Any]] = {
        "fp32": lambda: torch.compile(net),
        "autocast": lambda: torch.compile(under_autocast(net)),
    }
    for policy, options in POLICIES.items():
        for kept in ("autocast", "least"):
            way = policy if kept == "autocast" else f"{policy}, least"
            calls[way] = partial(ft.compile, net, memory=kept, **options)
    peaks: dict[str, int] = {}
    for way, prepare in calls.items():
        torch.compiler.reset()
        call = prepare()
        call(*args).backward()
        net.zero_grad()
        peaks[way] = ft.peak_bytes(lambda c=call: c(*args).backward())
        net.zero_grad()
        print(f"{name}: {way:14s} {peaks[way] / 1e6:8.2f} MB", end="")
        print(f" ({peaks[way] / peaks['autocast']:.3f})" if "autocast" in peaks else "")


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


def curves(task: Task, steps: int, seeds: int) -> None:
    """Losses of fp32's seeds and finecast's, averaged over sixths of the run."""
    net = task.net().train()
    ways: dict[str, Callable[..., Any]] = {"fp32": net, "finecast": ft.compile(net)}
    found = {
        way: np.array([_losses(task, net, call, steps, seed) for seed in range(seeds)])
        for way, call in ways.items()
    }
    sixths = {way: x.reshape(seeds, 6, -1).mean(2) for way, x in found.items()}
    plain, low = sixths["fp32"], sixths["finecast"]
    print(f"{task.name}, {steps} steps, {seeds} seeds; loss by sixths of the run:")
    for way, x in sixths.items():
        rows = (f"{a:.3f} to {b:.3f}" for a, b in zip(x.min(0), x.max(0), strict=True))
        print(f"  {way:9s}", "  ".join(rows))
    spread = plain.max(0) - plain.min(0)
    print("  spread of fp32's seeds      ", "  ".join(f"{x:.4f}" for x in spread))
    print("  finecast off the same seed  ", "  ".join(f"{x:.4f}" for x in _rms(low - plain)))


def _rms(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sqrt((x**2).mean(0))


def _losses(
    task: Task, net: nn.Module, call: Callable[..., Any], steps: int, seed: int
) -> list[float]:
    torch.manual_seed(seed)
    net.load_state_dict(task.net().state_dict())
    optimizer = torch.optim.AdamW(net.parameters(), lr=task.learning_rate)
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    for _ in range(steps):
        loss = call(*task.draw(generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", default="steps", choices=WHAT)
    parser.add_argument("nets", nargs="*")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--steps", type=int, default=240, help="of curves; a multiple of 6")
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    warnings.simplefilter("ignore")
    if chosen.what == "curves":
        for name in chosen.nets or TASKS:
            curves(TASKS[name](), chosen.steps, chosen.seeds)
        return
    if chosen.what == "memory":
        for name in chosen.nets or MEMORY:
            memory(name, MEMORY[name])
        return
    table, micro = (ACCUMULATION, 8) if chosen.what == "accumulation" else (STEPS, 1)
    for name in chosen.nets or table:
        training(name, table[name], chosen.seconds, micro=micro)


if __name__ == "__main__":
    main()
