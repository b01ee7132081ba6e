"""int8_weights_bf16 and int4_weights_bf16: weights in codes that products read in bf16."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import finecast
from finecast import api
from finecast.data.workload import Workload
from finecast.engines import probe
from finecast.engines.base import Capability
from finecast.engines.openvino import OpenVinoEngine
from finecast.engines.probe import Speed
from finecast.graph import Graph
from finecast.measure.environment import environment
from finecast.measure.racing import Effort, Race
from finecast.native import roundings
from finecast.native.engine_subject import EngineSubject
from finecast.native.profiles import Profiles
from finecast.native.subject import Built
from finecast.numbers.formats import Format
from finecast.planning.cost import MeasuredCost
from finecast.planning.plan import Plan
from tests.native.weights_only import coded, engine_for, output_of, saved

Array = NDArray[np.float32]

INT8, INT4 = Format.INT8_WEIGHTS_BF16, Format.INT4_WEIGHTS_BF16
# Groups of 64 along 256 numbers, of 32 along 160; 80 numbers have no four groups.
NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 256] x) => (float[n, 40] y) {
  [first] a = MatMul (x, w0)
  [act] r = Relu (a)
  [second] s = MatMul (r, w1)
  [bias] g = Add (s, b1)
  [last] z = MatMul (g, w2)
  [end] y = Tanh (z)
}"""
SHAPES = {"w0": (256, 160), "w1": (160, 80), "b1": (80,), "w2": (80, 40)}

CODED = {INT8: ["first", "last", "second"], INT4: ["first", "second"]}


def weights() -> dict[str, Array]:
    draw = np.random.default_rng(1)
    found = {n: draw.standard_normal(s) / np.sqrt(s[0]) for n, s in SHAPES.items()}
    return {name: array.astype(np.float32) for name, array in found.items()}


def inputs() -> dict[str, Array]:
    return {"x": np.random.default_rng(2).standard_normal((9, 256)).astype(np.float32)}


def bf16(x: NDArray[np.floating]) -> Array:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def stored(array: Array, fmt: Format) -> Array:
    """The numbers that codes stand for, written without finecast's code."""
    rows, end = len(array), 127 if fmt is INT8 else 7
    sizes = [s for s in (128, 64, 32) if rows % s == 0 and rows >= 4 * s]
    groups = array.reshape(-1, rows if fmt is INT8 else sizes[0], array.shape[1])
    scale = bf16(np.abs(groups).max(axis=1, keepdims=True) / np.float32(end))
    numbers = np.clip(np.rint(groups / scale), -end, end) * scale
    return bf16(numbers.reshape(array.shape))


def read_in(fmt: Format) -> dict[str, Array]:
    """The weights as a model in ``fmt`` and bf16 reads them."""
    names = ("w0", "w1", "w2") if fmt is INT8 else ("w0", "w1")
    found = {name: bf16(array) for name, array in weights().items()}
    return found | {name: stored(weights()[name], fmt) for name in names}


def expected(w: Mapping[str, Array], *, low: bool = True) -> Array:
    """The output; kernels round what they give, not the steps inside of them."""
    keep = bf16 if low else np.asarray
    hidden = keep(np.maximum(keep(inputs()["x"]) @ w["w0"], 0))
    return keep(np.tanh(keep(hidden @ w["w1"] + w["b1"]) @ w["w2"]))


@pytest.fixture(scope="module")
def engine() -> OpenVinoEngine:
    return engine_for(INT8)


@pytest.fixture
def kernels() -> None:
    """Skip where OpenVINO has no kernels that read such weights."""
    if "amx_bf16" in environment().flags:
        pytest.skip("with AMX OpenVINO 2026.4 computes them in bf16 before the product")


@pytest.fixture(params=["onnx", "xml"])
def net(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return saved(NET, weights(), tmp_path, request.param)


def far(got: Array, wanted: Array) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("fmt", [INT8, INT4])
def test_kernels_read_codes_and_compute_in_bf16(
    fmt: Format, net: Path, engine: OpenVinoEngine
) -> None:
    out, again = (net.with_name(f"{n}{net.suffix}") for n in ("low", "again"))
    done = api.convert(net, out, f"all:{fmt.label},bf16", engine="openvino")
    assert coded(done.plan, fmt) == CODED[fmt]
    assert {*done.plan.formats.values()} == {fmt, Format.BF16}
    session = engine.load(out, profiling=True)
    kernels = [
        kernel
        for kernel in session.kernel_formats()
        if any(done.plan.formats.get(name) is fmt for name in kernel.ops)
    ]
    assert len(kernels) == len(CODED[fmt])
    assert {kernel.stored for kernel in kernels} == {"bf16"}
    assert all({"int8", "uint8", "int4", "uint4"} & kernel.constants for kernel in kernels)
    got = output_of(out, inputs())
    # Sums differ in their order alone, and then rarely round to another number.
    assert far(got, expected(read_in(fmt))) < 0.1 * Format.BF16.unit_roundoff
    plan = Plan.from_json(done.plan.to_json())
    assert plan == done.plan
    api.apply(plan, net, again, engine="openvino")
    assert np.array_equal(output_of(again, inputs()), got)
    told = api.explain(net, "second", plan=plan)
    assert [one["read_as"] for one in told.inputs][:2] == ["bf16", fmt.label]


def test_it_needs_products_in_bf16(
    engine: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other CPUs OpenVINO would compute such a model in fp32."""
    emulated = Capability(runs=True, speed=1.0, reason="computed in fp32", in_fp32=True)
    known = {(engine.name, engine.device): {Format.BF16: emulated}}
    monkeypatch.setattr(probe, "_cache", known)
    found = probe.probe_one(engine, INT8)
    assert not found.runs
    assert found.reason == "its products are those of bf16: computed in fp32"


@pytest.mark.usefixtures("kernels")
def test_tune_takes_what_is_fastest(
    tmp_path: Path,
    engine: OpenVinoEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def times(
        self: EngineSubject, built: Mapping[str, Built], workload: Workload, effort: Effort
    ) -> Race:
        """Stated times: the more products have such weights, the less."""
        formats = {name: [*one.plan.formats.values()] for name, one in built.items()}
        seconds = {n: 1.0 - 0.1 * found.count(INT8) for n, found in formats.items()}
        return Race.stated(1.0, seconds)

    def cost(graph: Graph, *_: object) -> MeasuredCost:
        """Times of ops that say the same."""
        seconds = {fmt: 1e-3 if fmt is INT8 else 2e-3 for fmt in Format}
        times = {fmt: {n.name: s for n in graph.nodes} for fmt, s in seconds.items()}
        return MeasuredCost(times_s=times, cast_overhead_s=1e-6, cast_bandwidth_gb_s=1e3)

    # Every format is timed, however busy the machine is.
    faster = Speed(gains=True, text="")
    monkeypatch.setattr(EngineSubject, "speed", lambda subject, fmt: faster)
    monkeypatch.setattr(Profiles, "without_slow_formats", lambda profiles: (profiles, ()))
    monkeypatch.setattr(EngineSubject, "times", times)
    monkeypatch.setattr(roundings, "measured_cost", cost)
    found = finecast.tune(
        saved(NET, weights(), tmp_path, "xml"),
        data=inputs(),
        policy=f"auto:bf16,int8_weights,{INT8.label}",
        metric="cosine",
        tolerance=0.01,
        engine="openvino",
        progress=False,
        lock=False,
    )
    assert coded(found.plan, INT8) == ["first", "last", "second"]
