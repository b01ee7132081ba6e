"""int8_dynamic and int4_dynamic: kernels that round the values which meet weights in codes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino
import pytest
from numpy.typing import NDArray

from finecast import api
from finecast.engines import probe
from finecast.engines.openvino import OpenVinoEngine
from finecast.engines.usage import how_to_run
from finecast.numbers.encodings import Dynamic
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from tests.native.weights_only import coded, engine_for, output_of, saved

Array = NDArray[np.float32]

DYNAMIC = Format.INT8_DYNAMIC
GROUP = 32
# 80 numbers are no whole groups of 32, so that the last product keeps fp32.
NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 256] x) => (float[n, 40] y) {
  [first] a = MatMul (x, w0)
  [act] r = Relu (a)
  [second] g = Gemm <transB = 1> (r, w1, b1)
  [odd] y = MatMul (g, w2)
}"""
SHAPES = {"w0": (256, 160), "w1": (80, 160), "b1": (80,), "w2": (80, 40)}


def weights() -> dict[str, Array]:
    draw = np.random.default_rng(1)
    found = {n: draw.standard_normal(s) / np.sqrt(s[-1]) for n, s in SHAPES.items()}
    return {name: array.astype(np.float32) for name, array in found.items()}


def inputs() -> dict[str, NDArray[Any]]:
    """Rows with one column that is far larger than the others."""
    x = np.random.default_rng(2).standard_normal((9, 256)).astype(np.float32)
    x[:, 70] *= 60
    return {"x": x}


def rounded(x: Array, group: int = GROUP) -> Array:
    """What a kernel makes of a value, written without finecast's code."""
    groups = x.reshape(-1, group)
    scale = np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)
    steps = np.rint(groups / np.where(scale == 0, 1, scale))
    return (steps * scale).reshape(x.shape).astype(np.float32)


def by_channel(w: Array, axis: int) -> Array:
    scale = np.abs(w).max(axis=axis, keepdims=True) / np.float32(127)
    return (np.rint(w / scale) * scale).astype(np.float32)


def expected(*, first: bool = True, second: bool = True, odd: bool = False) -> Array:
    """The net's output: products that round what they read, and the last in int8_weights."""
    w, x = weights(), inputs()["x"]
    hidden = (rounded(x) if first else x) @ by_channel(w["w0"], 0)
    hidden = np.maximum(hidden, 0)
    read = rounded(hidden) if second else hidden
    last = by_channel(w["w2"], 0) if odd else w["w2"]
    return np.asarray((read @ by_channel(w["w1"], 1).T + w["b1"]) @ last, np.float32)


@pytest.fixture(scope="module")
def engine() -> OpenVinoEngine:
    return engine_for(DYNAMIC)


@pytest.fixture(params=["onnx", "xml"])
def net(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return saved(NET, weights(), tmp_path, request.param)


def run(path: Path) -> Array:
    return output_of(path, inputs())


def close(got: Array, wanted: Array) -> bool:
    """Equal but for the order of sums, and for numbers halfway between two codes."""
    return bool(np.linalg.norm(got - wanted) < 1e-4 * np.linalg.norm(wanted))


def by(path: Path, **settings: int) -> Array:
    """The output in a program that states a precision hint, and these settings."""
    hint = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(path, "CPU", hint | settings)
    return np.array(compiled.create_infer_request().infer(inputs())[0])


def test_kernels_round_what_they_read(net: Path, engine: OpenVinoEngine) -> None:
    out = net.with_name(f"low{net.suffix}")
    done = api.convert(net, out, "all:int8_dynamic", engine="openvino")
    assert coded(done.plan, DYNAMIC) == ["first", "second"]
    assert close(run(out), expected())
    assert close(by(out), expected())
    shape = {"x": (inputs()["x"].shape, "float32")}
    ran: dict[str, Any] = {}
    exec("\n".join(how_to_run(out, "openvino", done.plan.counts, inputs=shape)), ran)
    assert close(np.asarray(ran["model"](inputs())[0]), expected())
    without = by(out, DYNAMIC_QUANTIZATION_GROUP_SIZE=0)
    assert close(without, expected(first=False, second=False))
    operands = {e for d in done.plan.encodings.values() for e in d.operands.values()}
    assert operands == {Dynamic(format=DYNAMIC, group=GROUP)}
    reasons = " ".join(r.text for d in done.plan.decisions for r in d.reasons)
    assert "its sums of 80 numbers are not whole groups of 32" in reasons
    assert Plan.from_json(done.plan.to_json()) == done.plan


def test_one_model_has_rounded_and_exact_operands(net: Path, engine: OpenVinoEngine) -> None:
    out = net.with_name(f"low{net.suffix}")
    plans = [
        api.convert(net, None, f"all:int8_{kind}", engine="openvino").plan
        for kind in ("dynamic", "weights")
    ]
    chosen = [
        one if one.node.startswith("first") else other
        for one, other in zip(*(plan.decisions for plan in plans), strict=True)
    ]
    plan = replace(plans[0], decisions=tuple(chosen))
    last = "odd" if net.suffix == ".onnx" else "y"
    assert coded(plan, Format.INT8_WEIGHTS) == sorted(["second", last])
    api.apply(plan, net, out, engine="openvino")
    assert close(run(out), expected(second=False, odd=True))
    assert not close(run(out), expected(odd=True))
    assert close(by(out), run(out))  # the exact products stay exact by OpenVINO's defaults


def test_a_file_of_exact_products_says_so(tmp_path: Path, engine: OpenVinoEngine) -> None:
    """By default OpenVINO rounds what meets weights in codes."""
    net = saved(NET, weights(), tmp_path, "xml")
    out = tmp_path / "low.xml"
    api.convert(net, out, "all:int8_weights", engine="openvino")
    assert close(by(out), expected(first=False, second=False, odd=True))
    assert not close(by(out, DYNAMIC_QUANTIZATION_GROUP_SIZE=32), by(out))


def test_onnx_runtime_is_told_op_by_op(tmp_path: Path) -> None:
    """Its op for such products says whether it rounds, also in sessions of other programs."""
    onnxruntime = pytest.importorskip("onnxruntime")
    net = saved(NET, weights(), tmp_path, "onnx")
    out = tmp_path / "low.onnx"
    plans = [
        api.convert(net, None, f"all:{fmt}", engine="onnxruntime").plan
        for fmt in ("int8_dynamic", "int4_weights")
    ]
    chosen = [
        one if one.node == "first" else other
        for one, other in zip(*(plan.decisions for plan in plans), strict=True)
    ]
    api.apply(replace(plans[0], decisions=tuple(chosen)), net, out, engine="onnxruntime")
    stated = [n for n in onnx.load(out).graph.node if n.op_type == "MatMulNBits"]
    levels = {n.name: {a.name: a.i for a in n.attribute} for n in stated}
    assert {n: (a["bits"], a["accuracy_level"]) for n, a in levels.items()} == {
        "first": (8, 4),
        "second": (4, 1),
    }
    w, x = weights(), inputs()["x"]
    groups = w["w1"].reshape(80, -1, 32)
    scale = (np.abs(groups).max(axis=-1, keepdims=True) / 7).astype(np.float32)
    w1 = (np.rint(groups / scale) * scale).reshape(w["w1"].shape)
    hidden = np.maximum(rounded(x) @ by_channel(w["w0"], 0), 0)
    wanted = (hidden @ w1.T + w["b1"]) @ w["w2"]
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    assert close(np.asarray(session.run(None, inputs())[0]), wanted)
    read = [n.native.partition("::")[2] for n in api.load(out).read_graph().nodes]
    assert [kind for kind in read if kind != "DequantizeLinear"] == [
        *("MatMul", "Relu", "Gemm", "MatMul"),
    ]


def test_groups_of_two_sizes_are_in_one_model(tmp_path: Path) -> None:
    """In ONNX Runtime each product has a size of its own, in OpenVINO all have one."""
    onnxruntime = pytest.importorskip("onnxruntime")
    net = saved(NET, weights(), tmp_path, "onnx")
    out = tmp_path / "low.onnx"
    policy = "all:int4_dynamic_128,int8_dynamic"
    done = api.convert(net, out, policy, engine="onnxruntime")
    stated = [n for n in onnx.load(out).graph.node if n.op_type == "MatMulNBits"]
    found = {n.name: {a.name: a.i for a in n.attribute} for n in stated}
    sizes = {n: (a["bits"], a["block_size"], a["accuracy_level"]) for n, a in found.items()}
    assert sizes == {"first": (4, 128, 4), "second": (8, 32, 4)}
    reasons = " ".join(r.text for d in done.plan.decisions for r in d.reasons)
    assert "its sums of 160 numbers are not whole groups of 128" in reasons
    assert Plan.from_json(done.plan.to_json()) == done.plan
    w, x = weights(), inputs()["x"]
    groups = w["w0"].reshape(2, 128, 160)
    scale = (np.abs(groups).max(axis=1, keepdims=True) / 7).astype(np.float32)
    w0 = (np.rint(groups / scale) * scale).reshape(w["w0"].shape)

    def wanted(group: int) -> Array:
        hidden = rounded(np.maximum(rounded(x, group) @ w0, 0))
        return np.asarray((hidden @ by_channel(w["w1"], 1).T + w["b1"]) @ w["w2"], np.float32)

    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    got = np.asarray(session.run(None, inputs())[0])
    assert close(got, wanted(128))
    assert not close(got, wanted(32))


def test_kernels_that_compute_otherwise_are_found(
    tmp_path: Path, engine: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that ignores the setting, as one without such kernels does."""
    net = saved(NET, weights(), tmp_path, "onnx")
    from finecast.engines import openvino as module

    settings = module.openvino_settings
    monkeypatch.setattr(module, "openvino_settings", lambda hint, *_: settings(hint))
    done = api.convert(net, None, "all:int8_dynamic", engine="openvino", verify=False)
    assert not coded(done.plan, DYNAMIC)
    monkeypatch.setattr(probe, "_cache", {})
    found = probe.probe_one(OpenVinoEngine(), DYNAMIC)
    assert not found.runs
    assert found.reason == "OpenVINO does not round values here"


def test_rounding_is_that_of_the_definition() -> None:
    x = np.random.default_rng(3).standard_normal((3, 4, 96)).astype(np.float32)
    x[0, 0, :40] = 0
    how = Dynamic(format=DYNAMIC, group=GROUP)
    got = how.round(x)
    assert np.array_equal(got, rounded(x))
    step = np.abs(x.reshape(-1, GROUP)).max(axis=1).repeat(GROUP).reshape(x.shape) / 127
    assert (np.abs(got - x) <= step / 2 * (1 + 1e-5)).all()
    with pytest.raises(ValueError, match="100 numbers are no groups of 32"):
        how.round(np.ones((32, 100), np.float32))
    with pytest.raises(ValueError, match="int8_weights finds no scales"):
        Dynamic(format=Format.INT8_WEIGHTS, group=GROUP)
