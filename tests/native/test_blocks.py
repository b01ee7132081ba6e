"""Formats of blocks on devices that are not here, and weights in blocks in ONNX files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from finecast import api
from finecast.devices.choice import CastRequest, choose
from finecast.devices.emulation import explicit_casts, setting_of
from finecast.devices.targets import load_target
from finecast.errors import UsageError
from finecast.numbers.encodings import Blocks, Dynamic
from finecast.numbers.formats import BLOCKS, Format
from finecast.ops import OpKind
from finecast.planning.plan import Plan
from finecast.rules.calibration import calibrated_nodes
from finecast.rules.policy import Scope
from tests.native.weights_only import coded, saved
from tests.numbers.test_blocks import (
    by_the_text,
    four_over_six_by_the_paper,
    nv_by_the_text,
)

Array = NDArray[np.float32]

# 80 numbers are no whole blocks of 32, so that the last product keeps fp32 there.
NET: Final = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 96] x) => (float[n, 40] y) {
  [first] a = MatMul (x, w0)
  [act] r = Relu (a)
  [second] g = Gemm <transB = 1> (r, w1, b1)
  [odd] y = MatMul (g, w2)
}"""
SHAPES: Final = {"w0": (96, 64), "w1": (80, 64), "b1": (80,), "w2": (80, 40)}
ONE: Final = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 96] x) => (float[n, 96] y) { [first] y = MatMul (x, w0) }"""
EMULATED: Final = [f for f in BLOCKS if f.result is Format.FP32]


def drawn(*shape: int, seed: int = 0) -> Array:
    """Numbers of several binades, some of which are halfway between two elements."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal(shape) * np.exp2(draw.integers(-3, 4, shape))
    return np.asarray(np.where(draw.random(shape) < 0.3, np.rint(x * 8) / 8, x), np.float32)


def net_weights() -> dict[str, Array]:
    drawn_arrays = {n: drawn(*s, seed=i) for i, (n, s) in enumerate(SHAPES.items())}
    return {n: (array / 8).astype(np.float32) for n, array in drawn_arrays.items()}


def rounded(x: Array, fmt: Format) -> Array:
    """``x`` in blocks along its last axis, by code that is not finecast's."""
    if fmt is Format.NVFP4_FOUR_OVER_SIX:
        return four_over_six_by_the_paper(x)
    if fmt.label.startswith("nv"):
        return nv_by_the_text(x)
    rows = [
        [by_the_text([*map(float, r[i : i + 32])], fmt) for i in range(0, r.size, 32)]
        for r in x
    ]
    return np.array([[v for block in row for v in block] for row in rows], np.float32)


def emulated(path: Path, fmt: Format, x: Array, target: str) -> Array:
    """The output of a model as a device runs all that it can in ``fmt``."""
    base = explicit_casts(target)
    program = api.load(path).program(base)
    encodings = calibrated_nodes(program.graph, fmt, {})
    emulation = replace(base, scope=Scope.ALL, format=fmt, encodings=encodings)
    session = program.session(emulation, setting_of(program.graph, emulation))
    (found,) = session.run({session.inputs[0].name: x}).values()
    return np.asarray(found, np.float32)


@pytest.mark.parametrize("kind", ["onnx", "xml", "pt2"])
@pytest.mark.parametrize("fmt", EMULATED, ids=lambda f: f.label)
def test_a_layer_is_numpy_s_to_the_last_digit(fmt: Format, kind: str, tmp_path: Path) -> None:
    """Each sum has one number that is not 0, so that no order of sums makes a difference."""
    order = np.random.default_rng(1).permutation(96)
    w, x = np.zeros((96, 96), np.float32), drawn(7, 96)
    w[order, np.arange(96)] = drawn(96, seed=2)
    if kind == "pt2":
        layer = torch.nn.Linear(96, 96, bias=False)
        layer.weight.data = torch.from_numpy(w.T.copy())
        path = tmp_path / "net.pt2"
        free = torch.export.Dim("n", min=2, max=64)
        made = torch.export.export(layer, (torch.from_numpy(x),), dynamic_shapes=({0: free},))
        torch.export.save(made, path)
    else:
        path = saved(ONE, {"w0": w}, tmp_path, kind)
    target = "sm100" if fmt.label.startswith("nv") or fmt is Format.MXFP8_E5M2 else "gfx950"
    got = emulated(path, fmt, x, target)
    wanted = rounded(x, fmt)[:, order] * rounded(w.T, fmt)[np.arange(96), order]
    # Divisions in OpenVINO may be off by a unit, and so may be the scale of a tensor.
    off = 1e-6 if kind == "xml" and fmt.label.startswith("nv") else 0
    assert np.allclose(got, wanted, rtol=off, atol=0)
    assert not np.allclose(got, x @ w, rtol=1e-3)


@pytest.mark.parametrize("fmt", [Format.MXFP8_E4M3, Format.NVFP4], ids=lambda f: f.label)
def test_products_of_whole_blocks_are_in_the_format(fmt: Format, tmp_path: Path) -> None:
    weights = net_weights()
    net, x = saved(NET, weights, tmp_path, "onnx"), drawn(9, 96)
    done = api.convert(net, None, f"all:{fmt.label}", target="sm100")
    plan, whole = done.plan, 80 % fmt.blocks.size == 0 if fmt.blocks else False
    assert coded(plan, fmt) == ["first", *(["odd"] if whole else []), "second"]
    first = plan.encodings["first"]
    assert first.operands == {0: Dynamic(format=fmt, group=fmt.dynamic_group or 0)}
    assert first.constants == {1: Blocks(format=fmt, axis=0)}
    assert plan.encodings["second"].constants == {1: Blocks(format=fmt, axis=1)}
    assert Plan.from_json(plan.to_json()) == plan
    reasons = " ".join(r.text for d in plan.decisions for r in d.reasons)
    assert whole or "its sums of 80 numbers are not whole groups of 32" in reasons
    a = rounded(x, fmt) @ rounded(weights["w0"].T, fmt).T
    g = rounded(np.maximum(a, 0), fmt) @ rounded(weights["w1"], fmt).T + weights["b1"]
    last = (rounded(g, fmt), rounded(weights["w2"].T, fmt).T) if whole else (g, weights["w2"])
    wanted = np.asarray(last[0] @ last[1], np.float32)
    emulation = explicit_casts("sm100")
    session = api.load(net).program(emulation).plan_session(plan, emulation)
    (got,) = (np.asarray(y, np.float32) for y in session.run({"x": x}).values())
    # A number halfway between two elements may become either by sums in another order.
    assert np.linalg.norm(got - wanted) < 3e-3 * np.linalg.norm(wanted)
    assert np.linalg.norm(got - wanted) < 0.1 * np.linalg.norm(got - exact(x, weights))


def exact(x: Array, weights: dict[str, Array]) -> Array:
    hidden = np.maximum(x @ weights["w0"], 0)
    found = (hidden @ weights["w1"].T + weights["b1"]) @ weights["w2"]
    return np.asarray(found, np.float32)


STATED: Final = [
    Format.MXFP8_E4M3,
    Format.MXFP8_E5M2,
    Format.MXFP4,
    Format.NVFP4,
    Format.MXFP8_WEIGHTS_BF16,
    Format.MXFP4_WEIGHTS_BF16,
    Format.NVFP4_WEIGHTS_BF16,
]


@pytest.mark.parametrize("fmt", STATED, ids=lambda f: f.label)
def test_a_file_states_the_weights(fmt: Format, tmp_path: Path) -> None:
    """ONNX's own definitions decode them to the numbers of an independent rounding."""
    weights = net_weights()
    net, out = saved(NET, weights, tmp_path, "onnx"), tmp_path / "low.onnx"
    done = api.convert(net, out, f"all:{fmt.label}", target="sm100")
    model = onnx.load(out)
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version == (23 if fmt.label.startswith("nv") else 24)
    decoding = [n for n in model.graph.node if n.op_type == "DequantizeLinear"]
    blocks = [n for n in decoding if any(a.name == "block_size" for a in n.attribute)]
    assert len(blocks) == len(coded(done.plan, fmt)) >= 2
    shown = {n.input[0].partition("_")[0]: n.output[0] for n in blocks}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in shown.values())
    feeds = {"x": np.zeros((1, 96), np.float32)}
    ran: Any = ReferenceEvaluator(model).run([*shown.values()], feeds)
    got = dict(zip(shown, ran, strict=True))
    alone = fmt.result is Format.BF16
    like = (
        Format.parse(fmt.label.replace("_weights_bf16", "").replace("mxfp8", "mxfp8_e4m3"))
        if alone
        else fmt
    )
    for name, found in got.items():
        across = weights[name] if name == "w1" else weights[name].T
        wanted = rounded(across, like)
        wanted = wanted.astype(ml_dtypes.bfloat16) if alone else wanted
        assert np.array_equal(found if name == "w1" else found.T, wanted), name
    request = CastRequest(auto_cast="all", auto_cast_type=fmt.label, target="sm100")
    assert "no engine here runs" in " ".join(choose(request).told([fmt]))
    # The file in the emulator, where kernels round no values: the weights alone are low.
    numbers: dict[str, Any] = emulated_file(out)
    assert {str(v.dtype) for v in numbers.values()} == {"float32"}


def emulated_file(path: Path) -> dict[str, Any]:
    emulation = explicit_casts("sm100")
    program = api.load(path).program(emulation)
    session = program.session(emulation, setting_of(program.graph, emulation))
    return dict(session.run({"x": np.ones((2, 96), np.float32)}))


def test_data_may_judge_what_numbers_scale_by_themselves(tmp_path: Path) -> None:
    net = saved(NET, net_weights(), tmp_path, "onnx")
    np.savez(tmp_path / "x.npz", x=drawn(32, 96))
    done = api.convert(net, None, "all:nvfp4", target="sm100", data=tmp_path / "x.npz")
    assert len(coded(done.plan, Format.NVFP4)) == 3
    assert not any("gptq" in text for text in done.warnings)


def test_bytes_count_scales(tmp_path: Path) -> None:
    weights = net_weights()
    net, out = saved(NET, weights, tmp_path, "onnx"), tmp_path / "low.onnx"
    api.convert(net, out, "all:nvfp4", target="sm100")
    stored = {i.name: i for i in onnx.load(out).graph.initializer}
    assert len(stored["w0_nvfp4"].raw_data) == 96 * 64 // 2
    assert len(stored["w0_nvfp4_scale"].raw_data) == 96 * 64 // 16
    assert Format.NVFP4.bytes_for(96 * 64) == 96 * 64 // 2 + 96 * 64 // 16 + 4


@pytest.mark.parametrize(
    ("fmt", "target", "text"),
    [
        ("mxint8", "sm100", "ONNX models cannot hold constants in mxint8"),
        ("mxint8", None, "name the device with target"),
        ("nvfp4", "gfx950", "the device has no such arithmetic"),
        ("mxfp6_e2m3", "sm100", "ONNX models cannot hold constants in mxfp6_e2m3"),
        ("nvfp4", None, "name the device with target"),
    ],
)
def test_what_cannot_be_is_told(
    fmt: str, target: str | None, text: str, tmp_path: Path
) -> None:
    net = saved(ONE, {"w0": drawn(96, 96)}, tmp_path, "onnx")
    with pytest.raises(UsageError) as told:
        api.convert(net, None, f"all:{fmt}", target=target)
    assert text in str(told.value)


def test_modules_hold_no_blocks(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    torch.export.save(
        torch.export.export(torch.nn.Linear(96, 96), (torch.zeros(2, 96),)), path
    )
    with pytest.raises(UsageError, match=r"PyTorch models cannot hold.*emulate, or use bf16$"):
        api.convert(path, None, "all:mxfp4", target="sm100")


def test_weights_that_are_not_finite_keep_fp32(tmp_path: Path) -> None:
    w = drawn(96, 96)
    w[3, 3] = np.inf
    net = saved(ONE, {"w0": w}, tmp_path, "onnx")
    (decision,) = api.convert(net, None, "all:mxfp4", target="sm100").plan.decisions
    assert decision.format is Format.FP32
    texts = " ".join(reason.text for reason in decision.reasons)
    assert "a block with NaN or Inf has no scale" in texts


@pytest.mark.parametrize(
    ("target", "fmt", "tflops"),
    [
        ("sm100", Format.MXFP8_E4M3, 4500),
        ("sm100", Format.NVFP4, 9000),
        ("sm120", Format.MXFP4, 1676),
        ("gfx950", Format.MXFP6_E2M3, 10066.3),
        ("gfx950", Format.MXFP8_E4M3, 5033.2),
        ("trn3", Format.MXFP4, 315),
    ],
)
def test_rates_are_the_documented_ones(target: str, fmt: Format, tflops: float) -> None:
    products = load_target(target).engine_for(OpKind.MATMUL)
    assert products.rate_tflops(fmt) == tflops
    assert load_target(target).computes_in(fmt)
