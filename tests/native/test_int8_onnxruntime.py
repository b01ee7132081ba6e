"""int8 in ONNX Runtime: its kernels on integers give codes, so results are stored so, too."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper, parser

from finecast import api
from finecast.engines.loading import exact_session
from finecast.engines.onnxruntime import OnnxRuntimeEngine
from finecast.errors import EngineError, ModelError
from finecast.frontends import onnx as frontend
from finecast.frontends.native_model import with_switches
from finecast.native.integers import unfused
from finecast.native.observing import observe
from finecast.native.planning import Judging, make_planner
from finecast.numbers.encodings import Encodings, Scaled
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.planning.points import SWITCH, scaled_points, switches
from finecast.planning.units import make_units
from finecast.rules.policy import Policy
from tests.kernels import skip_without_int8
from tests.native.drawn import write_drawn

INT8 = Format.INT8
# A residual block whose sum is read in fp32, too; a sigmoid, which stays fp32; a classifier.
NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 3, 16, 16] x) => (float[n, 10] y, float[n, 2] z)
<int64[2] flat = {-1, 1024}> {
  [stem] a = Conv <pads = [1, 1, 1, 1]> (x, w0, b0)
  [act] r = Relu (a)
  [one] c = Conv <pads = [1, 1, 1, 1]> (r, w1, b1)
  [soft] d = Sigmoid (c)
  [two] e = Conv <pads = [1, 1, 1, 1]> (d, w2, b2)
  [join] f = Add (e, r)
  [act2] g = Relu (f)
  [pool] h = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (g)
  [flatten] i = Reshape (h, flat)
  [head] k = MatMul (i, w3)
  [bias] l = Add (k, b3)
  [last] y = Softmax (l)
  [mean] m = ReduceMean <axes = [2, 3], keepdims = 0> (g)
  [direct] z = Gemm (m, w4, b4)
}"""
SHAPES = {
    "w0": (16, 3, 3, 3), "b0": (16,), "w1": (16, 16, 3, 3), "b1": (16,),
    "w2": (16, 16, 3, 3), "b2": (16,), "w3": (1024, 10), "b3": (10,),
    "w4": (16, 2), "b4": (2,),
}  # fmt: skip
X = np.random.default_rng(0).standard_normal((24, 3, 16, 16)).astype(np.float32)
DATA = {"x": X}
CODED = ["head", "join", "one", "stem", "two"]


@pytest.fixture(scope="module")
def engine() -> OnnxRuntimeEngine:
    skip_without_int8("onnxruntime")
    return OnnxRuntimeEngine()


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return write_drawn(tmp_path / "net.onnx", NET, SHAPES)


def coded(plan: Plan) -> list[str]:
    return sorted(name for name, fmt in plan.formats.items() if fmt is INT8)


def run(path: Path) -> dict[str, NDArray[np.float32]]:
    return {
        k: v.astype(np.float32) for k, v in OnnxRuntimeEngine().load(path).run(DATA).items()
    }


def kinds(path: Path) -> Counter[str]:
    return Counter(n.op_type for n in onnx.load(path).graph.node)


def fused(path: Path) -> Counter[str]:
    """The ops that ONNX Runtime makes of a model."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(path.with_name("fused.onnx"))
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return kinds(path.with_name("fused.onnx"))


def test_what_is_planned_runs_on_integers(net: Path, engine: OnnxRuntimeEngine) -> None:
    out = net.with_name("low.onnx")
    done = api.convert(net, out, "all:int8", data=DATA, engine="onnxruntime")
    assert coded(done.plan) == CODED
    applied = frontend.apply(frontend.load(net), done.plan)
    assert unfused(engine, done.plan, applied, DATA) == {}
    made = fused(out)
    assert made["QLinearConv"] == 3
    assert made["QLinearAdd"] == 1
    assert made["Conv"] == made["FusedConv"] == made["MatMul"] == 0
    assert made["QGemm"] + made["QLinearMatMul"] == 1
    # x, r, c and d around the sigmoid, e, g before the pool, l
    assert kinds(out)["QuantizeLinear"] == 7
    for name, exact in run(net).items():
        error = np.linalg.norm(run(out)[name] - exact) / np.linalg.norm(exact)
        assert 0 < error < 0.1
    (said,) = (r.text for d in done.plan.decisions if d.node == "direct" for r in d.reasons)
    assert said == "its result is an output of the model, which is not quantized"


def test_openvino_s_kernels_give_floats_as_well(net: Path) -> None:
    skip_without_int8()
    done = api.convert(net, None, "all:int8", data=DATA, engine="openvino", verify=False)
    assert all(isinstance(e.result, Format) for e in done.plan.encodings.values())


def test_a_plan_is_replayed(net: Path, engine: OnnxRuntimeEngine) -> None:
    out, again = (net.with_name(f"{n}.onnx") for n in ("low", "again"))
    done = api.convert(net, out, "all:int8", data=DATA, engine="onnxruntime")
    plan = Plan.from_json(done.plan.to_json())
    assert plan == done.plan
    assert isinstance(plan.encodings["stem"].result, Scaled)
    api.apply(plan, net, again, engine="onnxruntime")
    assert all(np.array_equal(a, run(out)[n]) for n, a in run(again).items())


def test_probes_round_what_the_written_model_rounds(
    net: Path, engine: OnnxRuntimeEngine
) -> None:
    """For readers of a result that are no ops on codes, too: the mean, and the sigmoid."""
    policy = Policy.parse("all:int8")
    file = frontend.load(net)
    prepared = frontend.prepare(file, policy)
    facts = observe(prepared, lambda: [DATA])
    planner = make_planner(prepared, policy, engine, Judging(facts=facts))
    units = make_units(prepared.graph, planner.permissions, (INT8,))
    points = scaled_points(prepared.graph, units, planner.permissions, INT8)
    rounded = switches(points, planner.permissions, INT8)
    probe = exact_session(with_switches(prepared.roundable(), rounded))
    got = probe.run({**DATA, SWITCH: np.ones(len(rounded), bool)})
    plan = planner.lowest()
    wanted = exact_session(frontend.apply(file, plan).model).run(DATA)
    for name, array in wanted.items():
        # Sums of 1024 products at most, in another order; a code beside is half a step.
        assert np.allclose(got[name], array, rtol=0, atol=0.01 * float(np.abs(array).max()))
    result = planner.permissions[5].encodings[INT8].result
    shared = [p for p in points.points if p.encoding == result]
    readers = {
        prepared.graph.nodes[n].name: len(p.readers)
        for p in shared
        for n, _ in p.places
        if n is not None
    }
    # The unit that makes it rounds it for all, and the head for itself.
    assert readers == {"pool": 1, "mean": 1, "head": 2}


def test_an_encoded_result_is_one_that_there_is(net: Path, engine: OnnxRuntimeEngine) -> None:
    done = api.convert(net, None, "all:int8", data=DATA, engine="onnxruntime")
    result = done.plan.encodings["stem"].result
    decisions = tuple(
        replace(d, format=INT8, encodings=Encodings(result=result, operands={0: result}))
        if d.node == "direct" and isinstance(result, Scaled)
        else d
        for d in done.plan.decisions
    )
    with pytest.raises(ModelError, match="encodes the result of 'direct', which stays as it"):
        frontend.apply(frontend.load(net), replace(done.plan, decisions=decisions))


def test_tune_mixes_it_in(net: Path, engine: OnnxRuntimeEngine) -> None:
    found = api.tune(
        net, None, data=DATA, metric="cosine", policy="auto:int8", engine="onnxruntime",
        objective="size", tolerance=0.5,
    )  # fmt: skip
    assert found.improved
    assert coded(found.plan)
    # Of one sample that was probed, and of those that were timed.
    assert 0.25 < found.predicted_error / found.measured_error < 4


def batched(codes: bool) -> onnx.ModelProto:
    """A product by a constant of two matrices; with ``codes`` both operands are quantized."""
    random = np.random.default_rng(0)
    arrays = {"w": random.normal(size=(2, 8, 8)).astype(np.float32)}
    body = "y = MatMul(x, w)"
    if codes:
        body = (
            "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)"
            " v = DequantizeLinear<axis = 2>(p, t, o) y = MatMul(d, v)"
        )
        arrays = {
            "s": np.float32(0.04),
            "z": np.uint8(128),
            "p": random.integers(-99, 99, (2, 8, 8), np.int8),
            "t": np.full(8, 0.01, np.float32),
            "o": np.zeros(8, np.int8),
        }
    made = parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 20]>'
        f" g (float[n, 2, 5, 8] x) => (float[n, 2, 5, 8] y) {{ {body} }}"
    )
    made.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items()
    )
    return made


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_stack_of_matrices_has_one_scale(name: str) -> None:
    """With scales of channels one engine does not run it, the other gives other numbers."""
    skip_without_int8(name)
    x = np.random.default_rng(1).uniform(0, 4, (3, 2, 5, 8)).astype(np.float32)
    done = api.convert(batched(False), policy="all:int8", engine=name, data={"x": x})
    (decision,) = done.plan.decisions
    assert decision.format is Format.INT8
    assert done.plan.encodings[decision.node].constants[1].axis is None
    assert done.verified.relative_error is not None
    assert done.verified.relative_error < 0.05


def test_onnxruntime_has_no_kernel_for_them(engine: OnnxRuntimeEngine) -> None:
    """When both engines are right (``openvino-stacked-scales``) channels can have scales."""
    session = engine.load(batched(True).SerializeToString())
    with pytest.raises(EngineError, match="onnxruntime-batched-weights"):
        session.run({"x": np.zeros((3, 2, 5, 8), np.float32)})


@pytest.mark.parametrize("data", [None, {"x": np.ones((1, 2, 5, 8), np.float32)}])
def test_a_file_that_no_engine_has_kernels_for_is_refused_with_and_without_data(
    data: dict[str, Any] | None,
) -> None:
    """Without data it was written, and they were asked for: "loaded, not run: give --data"."""
    skip_without_int8("onnxruntime")
    with pytest.raises(EngineError, match="no kernel for the int8 product") as refused:
        api.convert(batched(True), policy="all:fp16", data=data, engine="onnxruntime")
    assert "--data" not in refused.value.line
