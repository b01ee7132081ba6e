"""int4_weights: weights stored in 4 bits with a scale for each group, in ONNX and OpenVINO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from finecast import api
from finecast.engines.base import Feeds, KernelTime
from finecast.engines.integers import tried_unnamed
from finecast.engines.openvino import OpenVinoEngine, OpenVinoSession
from finecast.errors import UsageError
from finecast.numbers.encodings import Scaled
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from tests.native.weights_only import coded, engine_for, output_of, saved

Array = NDArray[np.float32]

WEIGHTS = Format.INT4_WEIGHTS
# Groups of 128 along 512 numbers, of 64 along 384; 80 and 96 numbers have no four groups.
NET = """<ir_version: 8, opset_import: ["" : 17]>
net (int64[n] ids, float[n, 512] x) => (float[n, 80] y) {
  [rows] e = Gather (table, ids)
  [join] s = Add (x, e)
  [first] a = MatMul (s, w0)
  [act] r = Relu (a)
  [second] g = Gemm <transB = 1> (r, w1, b1)
  [odd] o = MatMul (g, w2)
  [small] y = MatMul (o, w3)
}"""
SHAPES = {
    "table": (50, 512),
    "w0": (512, 384),
    "w1": (96, 384),
    "b1": (96,),
    "w2": (96, 80),
    "w3": (80, 80),
}
AXES = {"table": 1, "w0": 0, "w1": 1}
# OpenVINO widens a table that ONNX states by blocks, and reads codes from one in its own IR.
CODED = {".onnx": ["first", "second"], ".xml": ["first", "rows", "second"]}


def weights() -> dict[str, Array]:
    draw = np.random.default_rng(1)
    found = {n: draw.standard_normal(s) / np.sqrt(s[-1]) for n, s in SHAPES.items()}
    return {name: array.astype(np.float32) for name, array in found.items()}


def inputs() -> dict[str, NDArray[Any]]:
    draw = np.random.default_rng(2)
    x = draw.standard_normal((7, 512)).astype(np.float32)
    return {"ids": draw.integers(0, 50, 7), "x": x}


def grouped(array: Array, axis: int) -> Array:
    """The numbers that codes of 4 bits stand for, written without finecast's code."""
    across = np.moveaxis(array, axis, 0)
    size = next(s for s in (128, 64, 32) if len(across) % s == 0 and len(across) >= 4 * s)
    groups = across.reshape(-1, size, *across.shape[1:])
    scale = (np.abs(groups).max(axis=1, keepdims=True) / 7).astype(np.float32)
    numbers = np.clip(np.rint(groups / scale), -7, 7) * scale
    return np.moveaxis(numbers.reshape(across.shape), 0, axis).astype(np.float32)


def expected(suffix: str) -> Array:
    w = weights()
    names = {".onnx": ("w0", "w1"), ".xml": ("table", "w0", "w1")}[suffix]
    w |= {name: grouped(w[name], AXES[name]) for name in names}
    feeds = inputs()
    read = feeds["x"] + w["table"][feeds["ids"]]
    hidden = np.maximum(read @ w["w0"], 0) @ w["w1"].T + w["b1"]
    return np.asarray(hidden @ w["w2"] @ w["w3"], np.float32)


@pytest.fixture(scope="module")
def engine() -> OpenVinoEngine:
    return engine_for(WEIGHTS)


@pytest.fixture(params=["onnx", "xml"])
def net(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return saved(NET, weights(), tmp_path, request.param)


def run(path: Path) -> Array:
    return output_of(path, inputs())


def test_numbers_are_those_of_the_groups(net: Path, engine: OpenVinoEngine) -> None:
    out = net.with_name(f"low{net.suffix}")
    done = api.convert(net, out, "all:int4_weights", engine="openvino")
    assert coded(done.plan, WEIGHTS) == CODED[net.suffix]
    np.testing.assert_allclose(run(out), expected(net.suffix), atol=1e-5, rtol=1e-5)
    constants = [e for d in done.plan.encodings.values() for e in d.constants.values()]
    groups = {e.group for e in constants if isinstance(e, Scaled)}
    assert groups == {128, 64}
    stored = out.with_suffix(".bin") if net.suffix == ".xml" else out
    codes, scales = 512 * 384 + 96 * 384, 4 * 384 + 96 * 6
    whole = 96 * 80 + 80 * 80 + 50 * 512
    assert stored.stat().st_size < codes // 2 + 5 * scales + 4 * whole + 5000


def test_a_kernel_that_is_too_short_to_be_timed_is_judged(
    net: Path, engine: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Now and then a profile left the Gather out, and convert was refused for its format."""
    whole = OpenVinoSession.profile

    def profile(self: OpenVinoSession, feeds: Feeds, *, repeats: int = 5) -> list[KernelTime]:
        found = whole(self, feeds, repeats=repeats)
        return [kernel for kernel in found if "rows" not in kernel.ops]

    monkeypatch.setattr(OpenVinoSession, "profile", profile)
    done = api.convert(net, None, "all:int4_weights", engine="openvino")
    assert coded(done.plan, WEIGHTS) == CODED[net.suffix]


def test_onnx_runtime_gives_the_same_numbers(net: Path, engine: OpenVinoEngine) -> None:
    if net.suffix == ".xml":
        pytest.skip("it reads ONNX")
    out = net.with_name("low.onnx")
    api.convert(net, out, "all:int4_weights", engine="openvino")
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    found = np.asarray(session.run(None, inputs())[0])
    np.testing.assert_allclose(found, expected(net.suffix), atol=1e-5, rtol=1e-5)
    codes = [t for t in onnx.load(out).graph.initializer if t.name.endswith("int4_weights")]
    assert {t.data_type for t in codes} == {onnx.TensorProto.INT4}


def mixed(seed: int) -> dict[str, NDArray[Any]]:
    """Rows of correlated values, which differ by the seed."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((64, 8)) @ np.random.default_rng(0).standard_normal((8, 512))
    return {"ids": draw.integers(0, 50, 64), "x": x.astype(np.float32)}


def test_codes_by_the_products_on_data_lose_less_on_other_data(
    net: Path, engine: OpenVinoEngine
) -> None:
    low, again, nearest = (net.with_name(f"{n}{net.suffix}") for n in ("low", "again", "near"))
    api.convert(net, nearest, "all:int4_weights", engine="openvino", verify=False)
    made = api.convert(
        net, low, "all:int4_weights@gptq", data=mixed(1), engine="openvino", verify=False
    )
    exact, lower, near = (output_of(path, mixed(2)) for path in (net, low, nearest))
    assert np.linalg.norm(lower - exact) < 0.6 * np.linalg.norm(near - exact)
    api.apply(Plan.from_json(made.plan.to_json()), net, again, engine="openvino")
    np.testing.assert_array_equal(run(again), run(low))
    told = api.explain(net, "first", plan=made.plan)
    assert "every op that may have int4_weights@gptq does" in str(told)
    assert "int4_weights, by gptq" in {one["read_as"] for one in told.inputs}
    with pytest.raises(UsageError, match="gptq chooses integers by the values"):
        api.convert(net, None, "all:int4_weights@gptq", engine="openvino")


def test_a_plan_is_replayed(net: Path, engine: OpenVinoEngine) -> None:
    out, again = (net.with_name(f"{n}{net.suffix}") for n in ("low", "again"))
    done = api.convert(net, out, "all:int4_weights", engine="openvino")
    plan = Plan.from_json(done.plan.to_json())
    assert plan == done.plan
    api.apply(plan, net, again, engine="openvino")
    assert np.array_equal(run(again), run(out))
    assert api.inspect(out).classes


def test_it_is_not_tried_unless_it_is_named(net: Path, engine: OpenVinoEngine) -> None:
    done = api.convert(net, None, "auto:bf16,int4_weights", engine="openvino")
    assert set(done.plan.formats.values()) <= {Format.FP32, Format.BF16, WEIGHTS}
    assert WEIGHTS not in tried_unnamed("openvino")


@pytest.mark.parametrize(
    ("shape", "channels", "says"),
    [
        ((96, 8), (1,), "96 numbers are not 4 or more groups of one of 128, 64, 32"),
        ((2, 128, 8), (2,), "groups are those of a matrix"),
        ((128, 8), (), "groups are those of a matrix"),
    ],
)
def test_constants_without_groups_are_refused(
    shape: tuple[int, ...], channels: tuple[int, ...], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Scaled.of_constant(WEIGHTS, np.ones(shape, np.float32), channels)


@pytest.mark.parametrize("apart", [False, True])
def test_it_is_told_where_the_data_that_chose_codes_judge_them(
    apart: bool, tmp_path: Path, engine: OpenVinoEngine
) -> None:
    calib = tmp_path / "calib.npz"
    given = mixed(3)
    np.savez(calib, ids=given["ids"], x=given["x"])
    net = saved(NET, weights(), tmp_path, "onnx")
    how: dict[str, Any] = {
        "policy": "all:int4_weights@gptq",
        "data": mixed(1),
        "calib": calib if apart else None,
        "engine": "openvino",
    }
    judged: dict[str, Any] = {"metric": "cosine", "tolerance": 0.1, "objective": "size"}
    found, done = api.tune(net, **how, **judged), api.convert(net, **how)
    for one in (found, done):
        assert any("data of their own" in w for w in one.warnings) is not apart
    by_calib = api.convert(net, policy="all:int4_weights@gptq", calib=calib, engine="openvino")
    assert any("data of their own" in w for w in by_calib.warnings)
    if apart:  # the data verify what the calibration data chose
        assert done.plan == by_calib.plan
        assert done.verified.relative_error != by_calib.verified.relative_error
