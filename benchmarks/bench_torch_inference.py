"""Compiled PyTorch inference: finecast beside torch.autocast, in one run, by turns.

    python -m benchmarks.bench_torch_inference [NET ...] [--threads N] [--seconds S]

Compares with ``torch.compile`` under ``torch.autocast(bfloat16)``, with and without Inductor's
freezing. Needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

# First, as it exits with a message where PyTorch is not installed.
from benchmarks.torch_common import Case, ids, images, settled, under_autocast  # isort: skip

import torch
from torch import nn
from torch._inductor import config as inductor_config

import finecast.torch as ft
from benchmarks.torch_nets import Bert, Depthwise, PoolsAndNorms, ResNet50
from benchmarks.torch_published import (
    ConvNeXt,
    DenseNet121,
    EfficientNetB0,
    MobileNetV3,
    PoolFormer,
)
from benchmarks.torch_transformers import GPT2
from finecast.measure.racing import Effort, Race
from finecast.planning.plan import Plan

Output = torch.Tensor | tuple[torch.Tensor, ...]

CACHE = (12, 2, 1, 12, 1000, 64)

INFERENCE = {
    "bert6 1x32": Case(net=lambda: Bert(6, 1000), inputs=lambda: ids(1, 32)),
    "bert6 1x128": Case(net=lambda: Bert(6, 1000), inputs=lambda: ids(1, 128)),
    "bert6 8x128": Case(net=lambda: Bert(6, 1000), inputs=lambda: ids(8, 128)),
    "resnet50": Case(net=ResNet50, inputs=lambda: images(1)),
    "mobilenetv3": Case(net=MobileNetV3, inputs=lambda: images(1)),
    "efficientnet_b0": Case(net=EfficientNetB0, inputs=lambda: images(1)),
    "convnext_t": Case(net=ConvNeXt, inputs=lambda: images(1)),
    "poolformer_s12": Case(net=PoolFormer, inputs=lambda: images(1)),
    "densenet121": Case(net=DenseNet121, inputs=lambda: images(1)),
    # The token after 1,000 others.
    "gpt2 step": Case(
        net=GPT2, inputs=lambda: (*ids(1, 1), torch.randn(12, 2, 1, 12, 1000, 64))
    ),
    "depthwise": Case(net=Depthwise, inputs=lambda: images(2)),
    "pools": Case(net=PoolsAndNorms, inputs=lambda: images(4)),
}


def error(got: Output, want: Output) -> float:
    """Relative error of the output, of the first of several."""
    if isinstance(got, tuple) and isinstance(want, tuple):
        got, want = got[0], want[0]
    assert isinstance(got, torch.Tensor)
    assert isinstance(want, torch.Tensor)
    return float((got.float() - want).norm() / want.norm())


def inference(name: str, case: Case, seconds: float) -> None:
    """Report a row for each way of running ``case``."""
    torch.compiler.reset()  # else it stops compiling after a few nets
    torch.manual_seed(0)
    args = case.inputs()
    net = settled(case.net(), args)
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
            inductor_config.freezing = freezing
            compiled = torch.compile(call, options={"freezing": True} if freezing else {})
            errors[way] = error(compiled(*args), want)
            runs[way] = lambda c=compiled: c(*args)
        anchor = runs["autocast"]
        race = Race.of(anchor, runs, Effort(min_time_s=seconds, rounds=15))
    size = _bytes(low) / _bytes(net)
    plan: Plan = low.finecast_plan  # type: ignore[assignment]
    print(f"{name}: plan {plan.counts}, saved {size:.2f} of fp32")
    for way in runs:
        t, plain = race.latency(way), race.between("autocast", way).median
        frozen = race.between("autocast+freezing", way).median
        print(
            f"  {way:20s} {1e3 * t.median_s:9.2f} ms (p10 {1e3 * t.p10_s:9.2f})"
            f"  {plain:5.2f}x autocast  {frozen:5.2f}x frozen  error {errors[way]:.5f}"
        )


def _bytes(net: nn.Module) -> int:
    return sum(t.nbytes for t in net.state_dict().values())


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nets", nargs="*")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=6.0)
    chosen = parser.parse_args()
    for name in chosen.nets:
        if name not in INFERENCE:
            parser.error(f"no net {name!r}: use {', '.join(map(repr, INFERENCE))}")
    torch.set_num_threads(chosen.threads)
    warnings.simplefilter("ignore")
    for name in chosen.nets or INFERENCE:
        inference(name, INFERENCE[name], chosen.seconds)


if __name__ == "__main__":
    main()
