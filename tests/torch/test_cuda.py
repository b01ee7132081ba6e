"""On a CUDA GPU: conversion, tuning, files and training; skipped where there is none."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import finecast
import finecast.torch as ft
from finecast.data.criterion import Criterion, CriterionKind
from finecast.errors import UsageError
from finecast.native.torch.model import of_module
from tests.torch.planned import plan_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Net(nn.Module):
    """A convolution, a batch norm, attention and products."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, stride=2)
        self.norm = nn.BatchNorm2d(width)
        self.heads = nn.MultiheadAttention(width, 4, batch_first=True)
        self.last = nn.Linear(width, 10)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        return self.last(x + self.scale * self.heads(x, x, x, need_weights=False)[0]).mean(1)


@pytest.fixture(name="net", scope="module")
def _net() -> nn.Module:
    torch.manual_seed(0)
    return Net().cuda().eval()


@pytest.fixture(name="x", scope="module")
def _x() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, 16, 16, generator=generator).cuda()


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("policy", ["all:bf16", "all:fp16", "like-autocast:bf16", "auto:bf16"])
def test_a_converted_module_stays_on_its_device_and_near_fp32(
    net: nn.Module, x: torch.Tensor, policy: str
) -> None:
    low = ft.convert(net, (x,), policy)
    with torch.no_grad():
        got, want = low(x), net(x)
    assert got.device == x.device
    assert got.dtype is torch.float32
    assert off(got, want) < 8 * 2.0**-8
    assert all(p.device.type == "cuda" for p in low.parameters())


def test_the_engine_is_that_of_the_models_device(net: nn.Module, x: torch.Tensor) -> None:
    model = of_module(net, ((x,), {}))
    assert [one.spec for one in model.runners(None)] == ["torch:CUDA"]
    assert [one.spec for one in model.runners("torch-eager")] == ["torch-eager:CUDA"]
    with pytest.raises(UsageError, match="on cuda"):
        model.runners("torch:CPU")


def test_int8_is_refused(net: nn.Module, x: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="int8 on cuda"):
        ft.convert(net, (x,), "matmult:int8")


# ----------------------------------------------------- products of codes, in fp8 and int8

CODED = ["fp8", "fp8_dynamic_row", "int8_dynamic_row"]


def layers() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))
    return module.eval(), torch.randn(40, 64)


def check_kernels(label: str) -> None:
    if "fp8" in label and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products in fp8")


@pytest.mark.parametrize("label", CODED)
@pytest.mark.parametrize("rows", [3, 40])
def test_numbers_of_codes_are_those_of_a_cpu(label: str, rows: int) -> None:
    check_kernels(label)
    module, x = layers()
    on_cpu = finecast.convert(module, policy=f"matmult:{label}", example_inputs=(x[:rows],))
    there = copy.deepcopy(module).cuda()
    low = ft.convert(there, (x[:rows].cuda(),), f"matmult:{label}")
    assert low.finecast_plan is not None
    assert low.finecast_plan.counts[label] == 2
    with torch.no_grad():
        got, want = low(x[:rows].cuda()).cpu(), on_cpu.model(x[:rows])
    # GELU's last digits may move a number to the next code.
    assert off(got, want) < 2.0**-8


@pytest.mark.parametrize("label", CODED)
def test_codes_mix_with_bf16_and_compile(label: str) -> None:
    check_kernels(label)
    module, x = layers()
    module, x = module.cuda(), x.cuda()
    low = ft.convert(module, (x,), f"all:{label},bf16")
    with torch.no_grad():
        want = module(x)
        assert off(low(x), want) < 0.06
        assert off(torch.compile(low)(x), want) < 0.06


def test_a_dynamic_batch_may_be_small() -> None:
    """Kernels on integers take no fewer than 17 rows."""
    module, x = layers()
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    program = torch.export.export(module.cuda(), (x.cuda(),), dynamic_shapes=(batch,))
    low = finecast.convert(program, policy="matmult:int8_dynamic_row").model.module()
    for rows in (2, 16, 17, 40):
        some = x[:rows].cuda()
        with torch.no_grad():
            assert off(low(some), module(some)) < 0.05


def test_fp8_is_as_accurate_as_torchaos() -> None:
    quantization = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    check_kernels("fp8")
    module, x = layers()
    module, x = module.cuda(), x.cuda()
    low = ft.convert(module, (x,), "all:fp8_dynamic_row,bf16")
    theirs = copy.deepcopy(module).to(torch.bfloat16)
    config = quantization.Float8DynamicActivationFloat8WeightConfig(
        granularity=quantization.PerRow()
    )
    quantization.quantize_(theirs, config)
    with torch.no_grad():
        want = module(x)
        own, other = off(low(x), want), off(theirs(x.to(torch.bfloat16)).float(), want)
    assert own < 1.25 * other


@pytest.mark.parametrize("probing", [False, True])
def test_tune_keeps_the_criterion(net: nn.Module, x: torch.Tensor, probing: bool) -> None:
    with torch.no_grad():
        want = net(x)

    def agreement(module: Any) -> float:
        with torch.no_grad():
            return 1.0 - off(module(x), want)

    result = ft.tune(
        net,
        (x,),
        evaluate=agreement,
        criterion=Criterion(tolerance=0.02, kind=CriterionKind.ABSOLUTE),
        options=ft.TuneOptions(prepare=lambda m: m, probing=probing),
    )
    assert result.tuned.metric >= 0.98
    with torch.no_grad():
        assert result.model(x).device == x.device


def test_a_program_is_converted_tuned_and_profiled_from_its_file(
    net: nn.Module, x: torch.Tensor, tmp_path: Path
) -> None:
    source, low = tmp_path / "net.pt2", tmp_path / "low.pt2"
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    torch.export.save(torch.export.export(net, (x,), dynamic_shapes=(batch,)), source)
    done = finecast.convert(source, low, policy="all:bf16")
    assert done.verified is not None
    assert done.verified.relative_error is not None
    assert done.verified.relative_error < 8 * 2.0**-8
    found = ft.load(low).module()(x)
    assert found.device == x.device
    assert off(found, net(x)) < 8 * 2.0**-8
    with torch.no_grad():
        labels = net(x).argmax(1).cpu().numpy()
    np.savez(tmp_path / "data.npz", x=x.cpu().numpy(), label=labels)
    tuned = finecast.tune(
        source, tmp_path / "tuned.pt2", data=tmp_path / "data.npz", metric="top1",
        engine="torch-eager", tolerance=0.2,
    )  # fmt: skip
    assert tuned.tuned.metric >= 0.8
    command = [sys.executable, "-m", "finecast", "profile", source, low]
    command += ["--engine", "torch-eager", "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert told


@pytest.mark.parametrize("memory", ["autocast", "least"])
def test_gradients_of_training_are_near_fp32s(
    net: nn.Module, x: torch.Tensor, memory: str
) -> None:
    pytest.importorskip("finecast_training")
    plain, low = copy.deepcopy(net).train(), copy.deepcopy(net).train()
    step = ft.compile(low, "auto:bf16", memory=memory)
    plain(x).square().mean().backward()
    step(x).square().mean().backward()
    for (name, a), b in zip(plain.named_parameters(), low.parameters(), strict=True):
        assert b.grad is not None, name
        assert b.grad.device == a.device
    got, want = (
        torch.cat([p.grad.flatten() for p in one.parameters() if p.grad is not None])
        for one in (low, plain)
    )
    assert off(got, want) < 16 * 2.0**-8
    assert step.finecast_plans[0].counts.get("bf16")


@pytest.mark.parametrize("label", ["fp8_dynamic_row", "tf32"])
def test_gradients_in_formats_of_products_are_those_of_a_cpu(label: str) -> None:
    pytest.importorskip("finecast_training")
    check_kernels(label)
    module, x = layers()
    gradients: list[torch.Tensor] = []
    for device in ("cpu", "cuda"):
        own = copy.deepcopy(module).to(device).train()
        step = ft.compile(own, f"matmult:{label}")
        step(x[:32].to(device)).square().mean().backward()
        assert step.finecast_plans[0].counts[label] == 5
        gradients.append(torch.cat([p.grad.cpu().flatten() for p in own.parameters()
                                    if p.grad is not None]))  # fmt: skip
    on_cpu, on_gpu = gradients
    # Codes of a value between two of them may differ; GPUs may cut off the digits beyond tf32.
    assert off(on_gpu, on_cpu) < {"tf32": 4 * 2.0**-10}.get(label, 2.0**-5)


def test_a_step_is_tuned_with_the_formats_of_the_gpu() -> None:
    pytest.importorskip("finecast_training")
    check_kernels("fp8")
    module, x = layers()
    net = module.cuda().train()

    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return net(x).square().mean()

    result = ft.tune_step(net, loss, [(x[:32].cuda(),)], moments=1, timeout_s=60.0)
    names = [c.plan.name for c in result.candidates]
    assert {"products in fp8_dynamic_row", "products in tf32"} <= {*names}
    autocast = next(c for c in result.candidates if c.plan.name == "torch.autocast")
    assert result.best.compiled is not None
    assert autocast.compiled is not None
    assert result.best is autocast or not result.best.compiled.beyond(autocast.compiled)


def test_the_peak_of_a_call_is_the_allocators() -> None:
    def call(y: torch.Tensor) -> torch.Tensor:
        return (y @ y.T).sum()

    y = torch.zeros(1024, 256, device="cuda")
    assert 4 * 1024**2 <= ft.peak_bytes(call, (y,)) <= 3 * 4 * 1024**2
    found = ft.profile(call, (y,), repeats=3, warmup=1)
    assert found.ms > 0


def test_the_emulator_takes_programs_of_gpus(net: nn.Module, x: torch.Tensor) -> None:
    low = ft.convert(net, (x,), "all:bf16", target="trn1")
    assert plan_of(low).counts.get("bf16")
