"""Inference and training on a CUDA GPU: finecast beside fp32, TF32 and torch.autocast.

    python -m benchmarks.bench_cuda [NAME ...] [--seconds S] [--target sm90]

Everything runs under ``torch.compile``. All nets are compiled at once, in a process each, and
then timed one after another, each net's ways in turns; nets that take longer than ``--within``
are not waited for. For inference the speed of each plan over fp32 stands beside the one that
the roofline of ``--target`` predicts; for training the memory that a forward and backward pass
takes for activations stands beside that of fp32. On GPUs with products in fp8 plans with them,
and with int8, stand beside torchao's configurations, where that is installed.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from threading import BrokenBarrierError
from time import perf_counter
from typing import Any, Final

# First, as it exits with a message where PyTorch is not installed.
from benchmarks.torch_common import Case, ids, images, settled  # isort: skip

import torch
from torch import multiprocessing, nn
from torch.utils._pytree import tree_leaves, tree_map

import finecast.torch as ft
from benchmarks.common import report, skip
from benchmarks.torch_nets import Bert, ResNet50, WithLoss
from benchmarks.torch_published import ConvNeXt
from benchmarks.torch_transformers import GPT2
from finecast.devices.emulation import explicit_casts
from finecast.measure.racing import Effort, Race
from finecast.native.device import plan_time_s
from finecast.native.torch.model import of_module
from finecast.planning.cost import RooflineCost
from finecast.planning.plan import Plan

_BENCH: Final = "cuda"
_POLICIES: Final = ("auto:bf16", "all:bf16")
# Policies with products on codes, by the first compute capability that has them.
_CODED: Final[Mapping[str, tuple[int, int]]] = {
    "auto:fp8_dynamic_row,bf16": (8, 9),
    "all:fp8_dynamic_row,bf16": (8, 9),
    "all:fp8,bf16": (8, 9),
    "all:int8_dynamic_row,bf16": (8, 0),
}

# Policies of training steps with formats of products alone, likewise.
_TRAINED: Final[Mapping[str, tuple[int, int]]] = {
    "auto:bf16,tf32": (8, 0),
    "auto:bf16,fp8_dynamic_row": (8, 9),
    "all:fp8_dynamic_row,bf16": (8, 9),
}

INFERENCE: Final[Mapping[str, Case]] = {
    "bert6 32x128": Case(net=lambda: Bert(6, 30522), inputs=lambda: ids(32, 128)),
    "resnet50 64": Case(net=ResNet50, inputs=lambda: images(64)),
    "convnext_t 64": Case(net=ConvNeXt, inputs=lambda: images(64)),
    "gpt2 step 8x1000": Case(
        net=GPT2, inputs=lambda: (*ids(8, 1), torch.randn(12, 2, 8, 12, 1000, 64))
    ),
}
TRAINING: Final[Mapping[str, Case]] = {
    "bert6 32x128, training": Case(
        net=lambda: WithLoss(Bert(6, 30522, head=True)),
        inputs=lambda: (*ids(32, 128), *ids(32, 128)),
    ),
}


@dataclass(slots=True, kw_only=True)
class Ways:
    """Calls of one net, by the name of the way in which it runs.

    Attributes:
        calls: Each computes on the GPU and waits for the result.
        facts: What else is known of each: errors, bytes.
    """

    calls: dict[str, Callable[[], object]] = field(default_factory=dict[str, Any])
    facts: dict[str, dict[str, Any]] = field(default_factory=dict[str, Any])

    def add(
        self, name: str, call: Callable[[], object], precision: str = "highest", **facts: Any
    ) -> None:
        """Add a way; ``precision`` is that of fp32's products while it runs."""

        def run() -> object:
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(precision)
            try:
                return call()
            finally:
                torch.cuda.synchronize()
                torch.set_float32_matmul_precision(before)

        start = perf_counter()
        run()  # compiles
        sys.stderr.write(f"{name}: compiled in {perf_counter() - start:.0f} s\n")
        self.calls[name], self.facts[name] = run, facts


def inference(case: Case, target: str) -> Ways:
    """All ways of running a net, with their errors beside fp32's exact products."""
    args = tree_map(torch.Tensor.cuda, case.inputs())
    net = settled(case.net().cuda(), args)
    found = Ways()
    with torch.no_grad():
        want = tree_leaves(net(*args))[0].float()

        def add(name: str, call: Callable[..., Any], precision: str = "highest", **more: Any):
            compiled = torch.compile(call)
            found.add(name, lambda: compiled(*args), precision, **more)
            got = tree_leaves(found.calls[name]())[0].float()
            found.facts[name]["error"] = round(float((got - want).norm() / want.norm()), 6)

        add("fp32", net)
        add("tf32", net, "high")
        add("autocast bf16", _under_autocast(net))
        capability = torch.cuda.get_device_capability()
        coded = (policy for policy, since in _CODED.items() if capability >= since)
        for policy in (*_POLICIES, *coded):
            low = ft.convert(net, args, policy)
            plan: Plan = low.finecast_plan  # type: ignore[assignment]
            coded_plan = any(f.multiplies_codes for f in plan.low_formats)
            predicted = (
                None if coded_plan else round(predicted_speed(net, args, plan, target), 3)
            )
            add(policy, low, predicted=predicted, counts=dict(plan.counts))
        for name, other in _by_torchao(net):
            add(name, other)
    return found


def _by_torchao(net: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Configurations of torchao, of the net in bf16; none where it is not installed.

    One whose kernels this GPU lacks is left out, with its message.
    """
    try:
        from torchao import quantization as ao  # pyright: ignore[reportMissingImports]
    except ImportError:
        sys.stderr.write("torchao is not installed: no rows of it\n")
        return
    fp8 = ao.Float8DynamicActivationFloat8WeightConfig
    configs = {
        "torchao fp8, by row": lambda: fp8(granularity=ao.PerRow()),
        "torchao fp8, by tensor": lambda: fp8(granularity=ao.PerTensor()),
        "torchao int8, by row": ao.Int8DynamicActivationInt8WeightConfig,
    }
    for name, config in configs.items():
        own = copy.deepcopy(net).to(torch.bfloat16)
        try:
            ao.quantize_(own, config())
        except (AssertionError, RuntimeError) as error:
            sys.stderr.write(f"{name}: {error}\n")
            continue
        yield name, _in_bf16(own)


def _in_bf16(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: torch.Tensor) -> Any:
        return call(*(a.to(torch.bfloat16) if a.is_floating_point() else a for a in args))

    return run


def predicted_speed(net: nn.Module, args: Any, plan: Plan, target: str) -> float:
    """The time of fp32 over that of ``plan``, by the device's roofline."""
    emulation = explicit_casts(target)
    model = of_module(net, (args, {}))
    program = model.program(emulation)
    shapes = {i: facts.shape for i, facts in program.observe([model.examples]).items()}
    cost = RooflineCost(target=emulation.target, shapes=shapes)
    low, fp32 = (
        plan_time_s(program.graph, cost, emulation, formats)
        for formats in (program.formats(plan), {})
    )
    return fp32 / low


def training(case: Case) -> Ways:
    """All ways of a step: forward, backward, SGD; with the memory of activations."""
    args = tree_map(torch.Tensor.cuda, case.inputs())
    net = case.net().cuda().train()
    found = Ways()

    def add(name: str, made: Callable[[nn.Module], Any], precision: str = "highest") -> None:
        own = copy.deepcopy(net)
        call, optimizer = made(own), torch.optim.SGD(own.parameters(), lr=1e-3)

        def step() -> None:
            call(*args).backward()
            optimizer.step()
            optimizer.zero_grad()

        found.add(name, step, precision)
        peak = ft.activation_bytes(lambda: call(*args).backward())
        found.facts[name]["activation_mb"] = round(peak / 1e6)

    add("fp32", torch.compile)
    add("tf32", torch.compile, "high")
    add("autocast bf16", lambda m: torch.compile(_under_autocast(m)))
    add("auto:bf16", ft.compile)
    add("auto:bf16, least memory", lambda m: ft.compile(m, memory="least"))
    capability = torch.cuda.get_device_capability()
    for policy, since in _TRAINED.items():
        if capability >= since:
            add(policy, lambda m, policy=policy: ft.compile(m, policy))
    return found


def _under_autocast(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: torch.Tensor) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return call(*args)

    return run


def run(name: str, chosen: argparse.Namespace, compiled: Any, turn: Any) -> None:
    """Compile one net's ways, wait for the other nets, and report the times."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    case = {**INFERENCE, **TRAINING}[name]
    try:
        found = training(case) if name in TRAINING else inference(case, chosen.target)
    except BaseException:
        compiled.abort()
        raise
    with suppress(BrokenBarrierError):  # another net failed, which says so itself, or is late
        compiled.wait(chosen.within)
    lock: AbstractContextManager[Any] = turn
    with lock:
        effort = Effort(min_time_s=chosen.seconds, rounds=15)
        race = Race.of(found.calls["fp32"], found.calls, effort)
        for way in found.calls:
            speed = round(race.speed(way).median, 3)
            milliseconds = round(1e3 * race.latency(way).median_s, 3)
            report(_BENCH, f"{name}, {way}", speed, "x", ms=milliseconds, **found.facts[way])


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*INFERENCE, *TRAINING])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--target", default="sm90")
    parser.add_argument("--within", type=float, default=600.0, help="seconds to compile in")
    chosen = parser.parse_args()
    known = [*INFERENCE, *TRAINING]
    for name in chosen.names:
        if name not in known:
            parser.error(f"no net {name!r}: use {', '.join(map(repr, known))}")
    if not torch.cuda.is_available():
        skip(_BENCH, "there is no CUDA GPU here")
        return
    gpus = torch.cuda.device_count()
    report(_BENCH, torch.cuda.get_device_name(), gpus, "GPUs", torch=torch.__version__)
    context = multiprocessing.get_context("spawn")
    compiled, turn = context.Barrier(len(chosen.names)), context.Lock()
    processes = [
        context.Process(target=run, args=(name, chosen, compiled, turn))
        for name in chosen.names
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
