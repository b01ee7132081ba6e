"""int8_weights in OpenVINO: weights that rest as codes, and kernels that read them so."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import openvino
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper, parser

from finecast import api
from finecast.engines import get_engine
from finecast.engines.base import KernelTime
from finecast.engines.integers import not_as_planned
from finecast.engines.openvino import OpenVinoEngine
from finecast.errors import EngineError, UsageError
from finecast.frontends import onnx as frontend
from finecast.frontends import openvino as ov_frontend
from finecast.frontends.native_model import with_roundings
from finecast.native.integers import unfused
from finecast.native.planning import make_planner
from finecast.native.profiles import Profiles
from finecast.numbers.encodings import Scaled
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.plugin import title_of
from finecast.rules.policy import Policy
from finecast.tuning.result import Result
from tests.kernels import state_kernels
from tests.native.weights_only import coded, engine_for, output_of, saved

WEIGHTS = Format.INT8_WEIGHTS
# A table of rows, products by matrices, and what OpenVINO computes from fp32 weights alone.
NET = """<ir_version: 8, opset_import: ["" : 17]>
net (int64[n, 4] ids) => (float[n, 4, 8] y)
<int64[2] flat = {-1, 128}, int64[3] back = {-1, 4, 8}> {
  [rows] e = Gather (table, ids)
  [inner] a = MatMul (e, w0)
  [act] r = Relu (a)
  [mean] m = ReduceMean <axes = [0, 1], keepdims = 0> (r)
  [vector] v = MatMul (m, w1)
  [join] h = Add (r, v)
  [mix] c = Conv (h, w2)
  [flatten] f = Reshape (c, flat)
  [last] g = Gemm <transB = 1> (f, w3, b3)
  [shape] y = Reshape (g, back)
}"""
SHAPES = {
    "table": (100, 64),
    "w0": (64, 32),
    "w1": (32, 32),
    "w2": (4, 4, 1),
    "w3": (32, 128),
    "b3": (32,),
}
IDS = np.random.default_rng(0).integers(0, 100, (4, 4))
CODED = ["inner", "last", "rows"]


@pytest.fixture(scope="module")
def engine() -> OpenVinoEngine:
    return engine_for(WEIGHTS)


@pytest.fixture(params=["onnx", "xml"])
def net(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    draw = np.random.default_rng(1)
    arrays = {n: draw.standard_normal(s) / np.sqrt(s[-1]) for n, s in SHAPES.items()}
    return saved(NET, arrays, tmp_path, request.param)


def run(path: Path) -> NDArray[np.float32]:
    return output_of(path, {"ids": IDS})


def constants(path: Path) -> dict[str, NDArray[np.generic]]:
    """By the first part of their names."""
    if path.suffix == ".onnx":
        made = onnx.load(path).graph.initializer
        return {t.name: numpy_helper.to_array(t) for t in made}
    ops = openvino.Core().read_model(path).get_ops()
    found = (op for op in ops if op.get_type_name() == "Constant")
    return {op.get_friendly_name(): op.data for op in found}


def test_weights_rest_as_codes_where_kernels_read_them_so(
    net: Path, engine: OpenVinoEngine
) -> None:
    """Without data: weights have their ranges by themselves."""
    out = net.with_name(f"low{net.suffix}")
    done = api.convert(net, out, "all:int8_weights", engine="openvino")
    assert coded(done.plan, WEIGHTS) == CODED
    stored, own = constants(out), constants(net)
    for name, axis in (("table", 0), ("w0", 1), ("w3", 0)):
        (given,) = (a for n, a in own.items() if n == name)
        codes = stored[f"{name}_int8_weights"]
        assert codes.dtype == np.int8
        assert name not in stored
        others = tuple(i for i in range(given.ndim) if i != axis)
        assert (np.abs(codes.astype(int)).max(axis=others) == 127).all()
    assert stored["w1"].dtype == stored["w2"].dtype == np.float32
    assert out.with_suffix(".bin" if net.suffix == ".xml" else ".onnx").stat().st_size < 35000
    reasons = {r.text for d in done.plan.decisions if d.node == "vector" for r in d.reasons}
    assert "planned in int8_weights, OpenVINO runs it in fp32 all the same" in reasons
    assert 0 < np.linalg.norm(run(out) - run(net)) / np.linalg.norm(run(net)) < 0.02


def test_nothing_but_weights_is_rounded(net: Path, engine: OpenVinoEngine) -> None:
    """By default OpenVINO rounds what such weights are multiplied by, too: 1e-2 of error."""
    plan = planned(net)
    out = net.with_name(f"low{net.suffix}")
    api.apply(plan, net, out, engine="openvino")
    rounded = net.with_name(f"rounded{net.suffix}")
    if net.suffix == ".onnx":
        model = onnx.load(net)
        for tensor in model.graph.initializer:
            if tensor.name in NAMES:
                exact = at(plan, NAMES[tensor.name]).round(numpy_helper.to_array(tensor))
                tensor.CopyFrom(numpy_helper.from_array(exact, tensor.name))
        onnx.save(model, rounded)
    else:
        file = ov_frontend.load(net)
        edits = ov_frontend.apply(file, plan).edits
        emulated = with_roundings(ov_frontend.roundable(file), edits)
        openvino.save_model(emulated, rounded, compress_to_fp16=False)
    got, wanted = run(out), run(rounded)
    # Sums of up to 64 products, in another order.
    limit = 64 * Format.FP32.epsilon * np.abs(wanted).max()
    assert np.abs(got - wanted).max() <= limit
    assert np.abs(got - run(net)).max() > 100 * limit


NAMES = {"table": ("rows", 0), "w0": ("inner", 1), "w3": ("last", 1)}


def at(plan: Plan, place: tuple[str, int]) -> Scaled:
    encoding = plan.encodings[place[0]].constants[place[1]]
    assert isinstance(encoding, Scaled)
    return encoding


def planned(net: Path, policy: str = "all:int8_weights") -> Plan:
    """What fuses: without the product by weights of three dimensions."""
    return api.convert(net, None, policy, engine="openvino").plan


def test_a_plan_is_replayed(net: Path, engine: OpenVinoEngine) -> None:
    out, again = (net.with_name(f"{n}{net.suffix}") for n in ("low", "again"))
    done = api.convert(net, out, "all:int8_weights", engine="openvino")
    plan = Plan.from_json(done.plan.to_json())
    assert plan == done.plan
    api.apply(plan, net, again, engine="openvino")
    assert np.array_equal(run(again), run(out))
    assert api.inspect(out).classes


def test_weights_that_the_engine_would_widen_are_refused(
    net: Path, engine: OpenVinoEngine
) -> None:
    """A plan by the rules alone has the product that no kernel reads codes for."""
    policy = Policy.parse("all:int8_weights")
    library = frontend if net.suffix == ".onnx" else ov_frontend
    file = library.load(net)
    planner = make_planner(library.prepare(file, policy), policy, engine)  # pyright: ignore[reportArgumentType]
    plan = planner.lowest()
    assert coded(plan, WEIGHTS) == sorted([*CODED, "vector"])
    applied = library.apply(file, plan)  # pyright: ignore[reportArgumentType]
    assert unfused(engine, plan, applied, {"ids": IDS}) == {"vector": "fp32"}
    with pytest.raises(EngineError, match=r"'vector' is planned in int8_weights .* runs it"):
        api.apply(plan, net, net.with_name(f"low{net.suffix}"), engine="openvino")


def test_the_rest_may_be_low(net: Path, engine: OpenVinoEngine) -> None:
    done = api.convert(net, None, "all:int8_weights,bf16", engine="openvino")
    assert coded(done.plan, WEIGHTS) == CODED
    assert done.plan.formats["act"] is Format.BF16


def test_it_is_mixed_in_by_auto(net: Path, engine: OpenVinoEngine) -> None:
    found = api.tune(
        net, None, data={"ids": IDS}, metric="cosine", policy="auto:int8_weights",
        engine="openvino", objective="size", tolerance=0.5, batch=1,
    )  # fmt: skip
    assert found.improved
    assert coded(found.plan, WEIGHTS)
    assert found.measured_error < 0.05


def test_it_makes_a_model_smaller_though_it_gains_no_time(
    net: Path, engine: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Profiles, "_gained_s", lambda *_: -1.0)

    def tuned(policy: str) -> Result:
        return api.tune(
            net, None, data={"ids": IDS}, metric="cosine", policy=policy, engine="openvino",
            objective="size", tolerance=0.5, batch=1,
        )  # fmt: skip

    both = tuned("auto:bf16,int8_weights")
    assert coded(both.plan, WEIGHTS)
    assert both.tuned.size_bytes < tuned("auto:bf16").tuned.size_bytes


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize(
    ("engine", "fmt", "alike", "other"),
    [
        ("onnxruntime", "int8_weights", Format.INT8, "openvino"),
        ("openvino", "int4_dynamic_128", Format.INT4_DYNAMIC, "onnxruntime"),
    ],
)
def test_what_an_engine_lacks_is_refused_and_what_it_runs_is_named(
    engine: str,
    fmt: str,
    alike: Format,
    other: str,
    runs: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state_kernels(monkeypatch, engine, {alike: runs})
    path = tmp_path / "net.onnx"
    onnx.save(parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        net (float[n, 2] x) => (float[n, 2] y) <float[2, 2] w = {1, 2, 3, 4}>
        { y = MatMul (x, w) }"""), path)  # fmt: skip
    with pytest.raises(
        UsageError, match=f"plans in {fmt} are made for {title_of(other)} alone"
    ) as e:
        api.convert(path, None, f"all:{fmt}", engine=engine)
    named = e.value.fix.removeprefix("use ").rpartition("--engine ")[0]
    assert (alike.label in re.split(r" or |, ", named)) is runs
    assert e.value.fix.endswith(f"--engine {other}")


def test_what_a_kernel_reads_tells_whether_weights_rest_so() -> None:
    def kernel(name: str, *constants: str) -> KernelTime:
        return KernelTime(
            kernel="k", kind="FullyConnected", ops=(name,), format="fp32", time_s=1.0,
            constants=frozenset(constants),
        )  # fmt: skip

    kernels = [kernel("a", "int8", "fp32"), kernel("b", "fp32"), kernel("c")]
    planned = dict.fromkeys("abcd", WEIGHTS)
    assert not_as_planned(kernels, planned) == {"b": "fp32", "c": "fp32"}


def test_its_constants_have_int8_s_codes() -> None:
    assert WEIGHTS.grid(constant=True) == Format.INT8.grid(constant=True)
    assert {Format.parse(n) for n in ("int8-weights", "w8", "INT8_WEIGHTS")} == {WEIGHTS}


def test_openvino_tells_the_constants_that_kernels_read(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        net (float[n, 2] x) => (float[n, 2] y) <float[2, 2] w = {1, 2, 3, 4}>
        { [product] y = MatMul (x, w) }"""), path)  # fmt: skip
    session = get_engine("openvino").load(path, profiling=True)
    kernels = session.profile({"x": np.ones((1, 2), np.float32)}, repeats=1)
    (found,) = (k for k in kernels if "product" in k.ops)
    assert "fp32" in found.constants
