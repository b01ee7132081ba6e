"""Linear layers in fp8 on GPUs that are not here: planned by rates, emulated exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")

import onnx
import torch
from numpy.typing import NDArray

import finecast
import finecast.torch as ft
from finecast import api
from finecast.data.options import DataOptions
from finecast.data.sources import workload_of
from finecast.devices.emulation import explicit_casts
from finecast.devices.targets import EngineRole, load_target
from finecast.errors import UsageError
from finecast.native.emulated import OnDevice
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.progress import silent
from finecast.rules.policy import Policy
from tests.frontends.tools import parse, tensor
from tests.torch.quantized_layers import Array, layers, relative

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:fp8(_dynamic_row)? runs at:UserWarning"),
]

FP8 = ("fp8", "fp8_dynamic_row")


@pytest.mark.parametrize("name", ["sm89", "sm90", "sm100", "sm120"])
@pytest.mark.parametrize("label", FP8)
def test_rates_are_those_of_e4m3(label: str, name: str) -> None:
    engine = load_target(name).engine(EngineRole.MATMUL)
    assert engine.rate_tflops(Format(label)) == engine.rate_tflops(Format.FP8_E4M3)


@pytest.mark.parametrize("label", FP8)
def test_converted_for_a_gpu_it_is_the_module_of_here(label: str, tmp_path: Path) -> None:
    net, x = layers()
    source, low = tmp_path / "net.pt2", tmp_path / "low.pt2"
    torch.export.save(torch.export.export(net, (x,)), source)
    done = api.convert(source, low, f"matmult:{label}", target="sm90")
    assert done.plan.counts[label] == 4
    here: Any = ft.convert(net, (x,), f"matmult:{label}")
    with torch.no_grad():
        assert torch.equal(ft.load(low).module()(x), here(x))
    with pytest.raises(UsageError, match=f"{label} with target sm80"):
        api.convert(source, tmp_path / "no.pt2", f"matmult:{label}", target="sm80")


def emulated(
    net: torch.nn.Module, x: torch.Tensor, policy: str, folder: Path
) -> tuple[Plan, Any, Any]:
    """The lowest plan of a search for the device, what the device gives, and the module."""
    torch.export.save(torch.export.export(net, (x,)), folder / "net.pt2")
    model, device = finecast.load(folder / "net.pt2"), explicit_casts("sm90")
    (name,) = (i.name for i in model.reference().inputs)
    options = DataOptions(data={name: x.numpy()}, metric="snr_db", batch=len(x))
    workload = workload_of(options, model.reference())
    subject = model.subject(None, device)
    examined = subject.examine(Policy.parse(policy), (), workload, silent)
    assert isinstance(examined, OnDevice)
    plan, on_gpu = examined.planner.lowest(), examined.device
    (got,) = on_gpu.program.plan_session(plan, device).run(on_gpu.feeds[0]).values()
    built: Any = model.build(plan)
    return plan, got, built.model


@pytest.mark.parametrize("also", ["", ",bf16"])
@pytest.mark.parametrize("label", FP8)
def test_searches_have_it_and_emulate_it(label: str, also: str, tmp_path: Path) -> None:
    net, x = layers()
    plan, got, module = emulated(net, x, f"all:{label}{also}", tmp_path)
    assert plan.counts[label] == 4
    with torch.no_grad():
        want = module(x)
    # A sum in another order may move a number between two codes.
    allowed = Format.BF16.epsilon if also else Format(label).unit_roundoff / 16
    assert relative(got, want.numpy()) < allowed


def e4m3(numbers: Array, axis: int | None) -> NDArray[np.float64]:
    """By scales of an axis or of all, written without finecast's code."""
    largest = np.abs(numbers).max(axis=axis, keepdims=True)
    scale = (largest / np.float32(448)).astype(np.float32)
    codes = np.clip(numbers / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return (codes.astype(np.float32) * scale).astype(np.float64)


@pytest.mark.parametrize(("label", "axis"), [("fp8", None), ("fp8_dynamic_row", 1)])
def test_an_emulated_layer_is_numpy_s(label: str, axis: int | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 32, bias=False).eval(), 9 * torch.randn(16, 64)
    plan, got, _ = emulated(layer, x, f"all:{label}", tmp_path)
    assert plan.counts[label] == 1
    weights = layer.weight.detach().numpy()
    exact = e4m3(x.numpy(), axis) @ e4m3(weights, axis).T
    assert relative(got, exact) < 4 * Format.FP32.epsilon  # of sums in fp32


@pytest.mark.parametrize("label", FP8)
def test_onnx_has_none_of_it_on_a_gpu_either(label: str, tmp_path: Path) -> None:
    model = parse("net (float[n,64] x) => (float[n,64] y) { y = MatMul(x, w) }")
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    model.graph.initializer.append(tensor("w", weights))
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "m.npz", x=weights)
    with pytest.raises(UsageError, match="made for PyTorch alone") as caught:
        api.convert(
            tmp_path / "m.onnx",
            policy=f"all:{label}",
            target="sm90",
            data=tmp_path / "m.npz",
        )
    assert "PyTorch's module" in str(caught.value.fix)
    assert "fp8" not in str(caught.value.fix).replace("fp8_e4m3", "")
