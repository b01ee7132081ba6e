"""Linear layers in fp8: by scales of rows, found at run time, or of tensors, found on data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import finecast.torch as ft
from finecast import api
from finecast.errors import UsageError
from finecast.frontends.native_model import with_roundings
from finecast.frontends.torch import planned_edits
from finecast.frontends.torch.native import TorchNative
from finecast.frontends.torch.runnable import Isolated
from finecast.native.torch import planning
from finecast.native.torch.model import of_module
from finecast.numbers.encodings import Dynamic, Encodings, Scaled
from finecast.numbers.formats import WHOLE_ROW, Format
from finecast.rules.policy import Policy
from tests.torch.quantized_layers import Array, Net, expected, layers, product, relative

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:fp8(_dynamic_row)? runs at:UserWarning"),
]

FP8 = Format.FP8_DYNAMIC_ROW
POLICY = f"matmult:{FP8.label}"
E4M3 = ml_dtypes.float8_e4m3fn


@pytest.fixture
def net() -> Net:
    return layers()


def rounded(x: Array) -> Array:
    """Rows in e4m3 by their largest number, written without finecast's code."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    scale = np.where(largest == 0, 1, largest / np.float32(448)).astype(np.float32)
    return np.asarray((x / scale).astype(E4M3).astype(np.float32) * scale)


def wanted(net: Any, x: torch.Tensor) -> Array:
    """What numpy gives; the odd size keeps fp32."""
    return expected(net, x, rounded, odd=lambda array: array)


def calls(module: Any, name: str) -> list[Any]:
    return [n for n in module.graph.nodes if name in str(n.target)]


def test_products_are_those_of_e4m3(net: Net) -> None:
    module, x = net
    made: Any = ft.convert(module, (x,), POLICY)
    assert made.finecast_plan.counts[FP8.label] == 4
    with torch.no_grad():
        got = made(x).numpy()
    # A sum in another order may move a number between two codes.
    assert relative(got, wanted(module, x)) < FP8.unit_roundoff / 16
    assert len(calls(made, "scaled_mm")) == 4
    stored = [t for n, t in made.named_buffers() if n.endswith("_codes")]
    assert [t.dtype for t in stored] == [torch.float8_e4m3fn] * 4
    # Both that read x share its codes.
    types = [n.meta["val"].dtype for n in calls(made, "_to_copy")]
    assert types.count(torch.float8_e4m3fn) == 3


def test_one_product_equals_numpy_s_to_fp32_s_roundings() -> None:
    torch.manual_seed(1)
    layer, x = nn.Linear(64, 32).eval(), torch.randn(7, 64) * 9
    made: Any = ft.convert(layer, (x,), POLICY)
    with torch.no_grad():
        got = made(x).numpy().astype(np.float64)
    exact = (
        product(x.numpy(), layer.weight, rounded).astype(np.float64)
        + layer.bias.detach().numpy()
    )
    assert relative(got, exact) < 4 * Format.FP32.epsilon


def tensorwise(x: Array, largest: float) -> Array:
    """In e4m3 by one scale, written without finecast's code."""
    scale = np.float32(largest) / np.float32(448)
    clipped = np.clip(x / scale, -448, 448)
    return np.asarray(clipped.astype(E4M3).astype(np.float32) * scale)


@pytest.mark.parametrize("policy", ["matmult:fp8", "all:fp8,bf16"])
@pytest.mark.parametrize("factor", [1, 3])
def test_scales_of_tensors_are_found_on_data(policy: str, factor: int) -> None:
    """What is beyond the data's range becomes its end."""
    torch.manual_seed(1)
    net, x = nn.Sequential(nn.Linear(64, 32), nn.ReLU()).eval(), torch.randn(7, 2, 64)
    made: Any = ft.convert(net, (x,), policy)
    assert made.finecast_plan.counts["fp8"] == 1
    layer: Any = net[0]
    weights, more = layer.weight.detach().numpy(), factor * x.numpy()
    with torch.no_grad():
        got = made(torch.from_numpy(more)).numpy().astype(np.float64)
    ends = float(np.abs(x.numpy()).max()), float(np.abs(weights).max())
    values = tensorwise(more, ends[0]).astype(np.float64)
    exact = values @ tensorwise(weights, ends[1]).T + layer.bias.detach().numpy()
    low = "bf16" in policy
    allowed = Format.BF16.epsilon if low else 4 * Format.FP32.epsilon
    assert relative(got, np.maximum(exact, 0)) < allowed
    (product,) = calls(made, "scaled_mm")
    assert product.meta["val"].dtype is (torch.bfloat16 if low else torch.float32)


def test_the_reason_names_sizes(net: Net) -> None:
    made: Any = ft.convert(*_called(net), POLICY)
    reasons = {d.node: d.why for d in made.finecast_plan.decisions if d.op == "linear"}
    assert "5 x 32, and fp8_dynamic_row takes multiples of 16" in reasons["odd/linear_2"]


def _called(net: Net) -> tuple[nn.Module, tuple[torch.Tensor]]:
    module, x = net
    return module, (x,)


def test_emulated_numbers_are_those_of_the_module(net: Net) -> None:
    module, x = net
    made: Any = ft.convert(module, (x,), POLICY)
    captured = of_module(module, ((x,), {})).file.captured(POLICY)
    plan = made.finecast_plan
    operands = [how for e in plan.encodings.values() for how in e.operands.values()]
    assert operands == [Dynamic(format=FP8, group=WHOLE_ROW)] * 4
    copy = with_roundings(TorchNative.of(captured), planned_edits(captured, plan))
    with torch.no_grad():
        (emulated,) = tree_leaves(Isolated(copy.module).leaves([x]))
        assert relative(emulated, made(x)) < FP8.unit_roundoff / 16


def test_kernels_give_bf16_where_bf16_is_read(net: Net) -> None:
    module, x = net
    made: Any = ft.convert(module, (x,), f"all:{FP8.label},bf16")
    given = [n.meta["val"].dtype for n in calls(made, "scaled_mm")]
    assert given.count(torch.bfloat16) == 4
    biases = [n.args[4] is not None for n in calls(made, "scaled_mm")]
    assert biases == [True, False, False, True]
    with torch.no_grad():
        assert relative(made(x), wanted(module, x)) < 8 * Format.BF16.epsilon


def test_it_is_saved_and_exported(net: Net, tmp_path: Path) -> None:
    module, x = net
    made: Any = ft.convert(module, (x,), POLICY)
    torch.save(made, tmp_path / "low.pt")
    ft.save(torch.export.export(made, (x,)), tmp_path / "low.pt2")
    again: Any = torch.load(tmp_path / "low.pt", weights_only=False)
    with torch.no_grad():
        want = made(x)
        assert torch.equal(again(x), want)
        assert torch.equal(ft.load(tmp_path / "low.pt2").module()(x), want)
    assert again.finecast_plan.digest == made.finecast_plan.digest


@pytest.mark.long
def test_it_is_compiled(net: Net) -> None:
    module, x = net
    made: Any = ft.convert(module, (x,), f"all:{FP8.label},bf16")
    with torch.no_grad():
        assert relative(torch.compile(made)(x), made(x)) < 8 * Format.BF16.epsilon


def test_a_program_is_converted_from_its_file(net: Net, tmp_path: Path) -> None:
    module, x = net
    source = tmp_path / "net.pt2"
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    torch.export.save(torch.export.export(module, (x,), dynamic_shapes=(batch,)), source)
    done = api.convert(source, tmp_path / "low.pt2", POLICY)
    assert done.plan.counts[FP8.label] == 4
    low = ft.load(tmp_path / "low.pt2").module()
    for rows in (2, 9):
        more = torch.randn(rows, 3, 32)
        with torch.no_grad():
            assert relative(low(more), wanted(module, more)) < FP8.unit_roundoff / 8


def test_encodings_are_read_back() -> None:
    weights = np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)
    held = Scaled.of_constant(FP8, weights, (0,))
    assert held.dtype == np.dtype(E4M3)
    np.testing.assert_array_equal(held.round(weights), rounded(weights))
    operand = Dynamic(format=FP8, group=WHOLE_ROW)
    np.testing.assert_array_equal(operand.round(weights), rounded(weights))
    encodings = Encodings(operands={0: operand}, constants={1: held})
    assert Encodings.from_dict(FP8, encodings.to_dict()) == encodings
    assert FP8.bits == 8
    assert FP8.mantissa_bits == 3


@pytest.mark.parametrize(
    ("capability", "runs"), [((8, 0), False), ((8, 9), True), ((9, 0), True)]
)
def test_a_gpu_has_to_have_fp8(
    capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for policy in (Policy.parse(POLICY), Policy.parse("matmult:fp8")):
        if runs:
            planning.check_device(policy, "cuda")
            continue
        with pytest.raises(UsageError, match="Ada, Hopper or later"):
            planning.check_device(policy, "cuda")


@pytest.mark.parametrize("label", [FP8.label, "fp8"])
def test_tune_tries_it_where_it_is_named(label: str, net: Net) -> None:
    """It is slow on a CPU: bf16 or fp32 is what remains."""
    module, x = net
    with torch.no_grad():
        want = module(x)

    def agreement(low: Any) -> float:
        with torch.no_grad():
            return 1.0 - relative(low(x), want)

    done = ft.tune(
        module,
        (x,),
        evaluate=agreement,
        tolerance=0.2,
        policy=f"auto:{label},bf16",
        options=ft.TuneOptions(prepare=lambda m: m),
    )
    assert done.tuned.metric >= 0.8


@pytest.mark.parametrize("label", [FP8.label, "fp8"])
def test_onnx_models_have_no_such_products(label: str) -> None:
    data = "examples/digits/digits_calib.npz"
    with pytest.raises(UsageError, match="made for PyTorch alone") as told:
        api.convert("examples/digits/digits.onnx", policy=f"all:{label}", data=data)
    assert "VNNI" not in str(told.value.fix)


@pytest.mark.filterwarnings("ignore:input .* was captured with:UserWarning")
@pytest.mark.parametrize(
    "policy", ["all:fp8_dynamic_row", "all:fp8_dynamic_row,bf16", "all:fp8"]
)
@pytest.mark.parametrize("shape", [(6, 32), (6, 4, 32)])
def test_another_batch_than_the_example_s(policy: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(32, 48, bias=False), nn.ReLU(), nn.Linear(48, 32, bias=False)
    )
    net.requires_grad_(False)
    x = torch.randn(2 * shape[0], *shape[1:])
    low = ft.convert(net, (x[: shape[0]],), policy)
    for batch in (x, x[:1]):
        assert relative(low(batch), net(batch)) < 0.1
