"""Linear layers on codes on GPUs that are not here: planned by rates, emulated exactly."""

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


INT8 = "int8_dynamic_row"


@pytest.mark.parametrize("name", ["sm75", "sm80", "sm89", "sm90", "sm100", "sm120"])
def test_integers_by_row_have_the_rate_of_int8(name: str) -> None:
    engine = load_target(name).engine(EngineRole.MATMUL)
    assert engine.rate_tflops(Format.INT8_DYNAMIC_ROW) == engine.rate_tflops(Format.INT8)


def ops_of(module: torch.nn.Module) -> set[str]:
    graph: Any = module.graph
    called = graph.nodes
    return {str(n.target) for n in called if n.op == "call_function"}


def test_integers_for_a_gpu_are_products_of_its_kernels(tmp_path: Path) -> None:
    """What a CPU's compiler fuses, a GPU would run on decoded numbers."""
    net, x = layers()
    source, low = tmp_path / "net.pt2", tmp_path / "low.pt2"
    torch.export.save(torch.export.export(net, (x,)), source)
    done = api.convert(source, low, f"matmult:{INT8}", target="sm90")
    assert done.plan.counts[INT8] == 4
    program: Any = ft.load(low).module()
    assert "aten._int_mm.default" in ops_of(program)
    assert not any("quantized_decomposed" in op for op in ops_of(program))
    (tmp_path / "plan.json").write_text(done.plan.to_json())
    api.apply(tmp_path / "plan.json", source, tmp_path / "again.pt2")
    again: Any = ft.load(tmp_path / "again.pt2").module()
    with torch.no_grad():
        assert torch.equal(program(x), again(x))
        assert 0 < relative(program(x).numpy(), net(x).numpy()) < 0.05


def test_integers_with_scales_found_on_data_are_of_cpus(tmp_path: Path) -> None:
    net, x = layers()
    with pytest.raises(UsageError, match="int8 on sm90") as caught:
        finecast.convert(net, policy="matmult:int8", example_inputs=(x,), target="sm90")
    assert INT8 in str(caught.value.fix)
    low = finecast.convert(
        net, policy="matmult:int8", example_inputs=(x,), target="avx512-vnni"
    )
    assert any("quantized_decomposed" in op for op in ops_of(low.model))


def test_searches_have_integers_by_row(tmp_path: Path) -> None:
    net, x = layers()
    plan, got, module = emulated(net, x, f"all:{INT8}", tmp_path)
    assert plan.counts[INT8] == 4
    assert "aten._int_mm.default" in str(module.code) or any(
        "int_mm" in op for op in ops_of(module)
    )
    with torch.no_grad():
        assert relative(got, module(x).numpy()) < Format.INT8.unit_roundoff / 16


class Others(torch.nn.Module):
    """Products that are no linear layers, of sizes that fp8 takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.conv = torch.nn.Conv2d(16, 16, 16, padding="same")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return self.conv((x @ x.transpose(-1, -2) @ x)[None])


@pytest.mark.parametrize("label", [*FP8, INT8])
def test_modules_state_linear_layers_alone(label: str) -> None:
    torch.manual_seed(0)
    net, x = Others().eval(), torch.randn(16, 32, 64)
    done = finecast.convert(net, policy=f"matmult:{label}", example_inputs=(x,), target="sm90")
    assert done.plan.counts[label] == 1
    (conv,) = (d for d in done.plan.decisions if d.node == "conv/conv2d")
    if label == "fp8":
        assert any("has no working fp8 kernel" in r.text for r in conv.reasons)


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
