"""An encoding with a scale, from a policy's words to a written model's numbers, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper, parser

from finecast import api
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import Prepared
from finecast.native import conversion, planning
from finecast.native.observing import observe
from finecast.native.roundings import switched_probe
from finecast.numbers.encodings import Scaled
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.planning.points import RoundingPoints, rounding_points, switches
from finecast.planning.sensitivity import Probe, measure
from finecast.planning.units import make_units
from finecast.rules import Context, Permission, permit
from finecast.rules.policy import Policy
from finecast.rules.scaled_operands import origin
from tests import toy_encoding
from tests.frontends.tools import planner_of

SHARED = """<ir_version: 7, opset_import: ["" : 12]>
shared (float[n, 3] x) => (float[n, 2] y, float[n, 2] z)
<float[3, 2] w = {1.1, 0.3, -0.7, 2, 5, 0.01}, float[2, 2] v = {0.1, 4, 0.2, -3}> {
  [first] h = MatMul(x, w)
  [act] r = Relu(h)
  [one] a = MatMul(r, v)
  [two] b = MatMul(r, v)
  [plus] y = Add(a, r)
  [less] z = Sub(b, r)
}"""
CONV = """<ir_version: 8, opset_import: ["" : 17]>
conv (float[n, 3] x) => (float[n, 2, 2] y)
<float[2, 1, 2] w = {0.3, -4, 9, 0.7}, int64[3] at = {-1, 1, 3}> {
  [grow] h = Reshape(x, at)
  [conv] y = Conv(h, w)
}"""
BRANCH = """<ir_version: 8, opset_import: ["" : 17]>
branch (float[n, 3] x) => (float[n, 2] y)
<float[3, 2] w = {1.1, 0.3, -0.7, 2, 0.4, 1}, bool c = {1}> {
  [choose] y = If (c) <
    then_branch = left () => (float[n, 2] p) { [inner] p = MatMul(x, w) },
    else_branch = right () => (float[n, 2] q) { [other] q = MatMul(x, w) }
  >
}"""
X = (np.random.default_rng(0).standard_normal((64, 3)) * [1, 3, 0.1]).astype(np.float32)
POLICY = f"matmult:{toy_encoding.LABEL}"
Arrays = dict[str, NDArray[np.float32]]
Permissions = dict[int, Permission]


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Format:
    return toy_encoding.install(monkeypatch)


@pytest.fixture(params=[SHARED, CONV, BRANCH], ids=["shared", "conv", "branch"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(parser.parse_model(request.param), path)
    return path


def judged(path: Path, *, data: bool = True) -> tuple[Prepared, Policy, Permissions]:
    policy = Policy.parse(POLICY)
    prepared = frontend.prepare(frontend.load(path), policy)
    context = Context(
        graph=prepared.graph,
        policy=policy,
        facts=observe(prepared, lambda: [{"x": X[:40]}, {"x": X[40:]}]) if data else {},
        casts_around=frozenset(f for f in policy.formats if prepared.can_cast(f)),
    )
    return prepared, policy, permit(context)


def planned(path: Path, *, data: bool = True) -> tuple[Prepared, Plan]:
    prepared, policy, permissions = judged(path, data=data)
    return prepared, planner_of(prepared, policy, permissions).lowest()


def written(path: Path, plan: Plan) -> Path:
    out = path.with_name("low.onnx")
    frontend.save(frontend.apply(frontend.load(path), plan).model, out)
    frontend.check(out)
    return out


def run(path: Path, names: list[str] | None = None, *, exactly: bool = True) -> Arrays:
    """All outputs, and the values called ``names``."""
    loaded = onnx.load(path)
    for name in names or []:
        value = helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        loaded.graph.output.append(value)
    options = onnxruntime.SessionOptions()
    if exactly:
        level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.graph_optimization_level = level
    session: Any = onnxruntime.InferenceSession(
        loaded.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    outputs = [o.name for o in session.get_outputs()]
    return dict(zip(outputs, session.run(outputs, {"x": X}), strict=True))


def constants(path: Path) -> Arrays:
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def kinds(path: Path) -> list[str]:
    nodes = list(onnx.load(path).graph.node)
    nodes += [n for m in nodes for a in m.attribute for n in a.g.node]
    return sorted(n.op_type for n in nodes if n.op_type != "Constant")


def encodings(prepared: Prepared, plan: Plan) -> dict[str, Scaled]:
    """By the name of the value that is rounded: the one that the op's own is moved from."""
    found: dict[str, Scaled] = {}
    for name, one in plan.encodings.items():
        node = prepared.graph.find(name)
        for index, encoding in (*one.operands.items(), *one.constants.items()):
            source = node.inputs[index]
            assert source is not None
            assert isinstance(encoding, Scaled)
            found[origin(prepared.graph, prepared.graph.values[source]).name] = encoding
    return found


def test_the_written_model_has_the_encoding_s_own_numbers(model: Path, toy: Format) -> None:
    prepared, plan = planned(model)
    assert Plan.from_json(plan.to_json()) == plan
    products = {n.name for n in prepared.graph.nodes if n.op in ("matmul", "conv")}
    assert {name for name, fmt in plan.formats.items() if fmt is toy} == products
    found = encodings(prepared, plan)
    low = written(model, plan)
    numbers = run(low, [f"{name}_{toy.label}_fp32" for name in found])
    own = constants(model) | {"x": X}
    own |= run(model, [name for name in found if name not in own])
    for name, encoding in found.items():
        got = numbers[f"{name}_{toy.label}_fp32"]
        # What is behind another rounding is not what the fp32 model has.
        exact = own[name] if name != "r" else run(low, ["r"])["r"]
        assert np.array_equal(got, encoding.round(exact)), name
        assert not np.array_equal(got, exact)
        assert (encoding.axis is not None) == (name in constants(model))
        if name in constants(model):
            stored = constants(low)[f"{name}_{toy.label}"]
            assert stored.dtype == np.int8
            assert np.array_equal(stored, encoding.encode(exact))
            assert len(encoding.scale) == 2  # the channels of every one
    assert set(constants(model)) - {"at", "c"} <= set(found)


def test_engines_give_the_same_with_their_own_kernels(model: Path) -> None:
    low = written(model, planned(model)[1])
    exact, fused = run(low), run(low, exactly=False)
    fp32 = run(model)
    for name, array in exact.items():
        scale = np.abs(array).max()
        # Sums of at most three products, in another order or of integers.
        assert np.abs(fused[name] - array).max() <= 8 * Format.FP32.epsilon * scale
        assert 0 < np.abs(fp32[name] - array).max() < 0.2 * scale


def test_one_rounding_serves_all_readers(model: Path) -> None:
    prepared, plan = planned(model)
    made = kinds(written(model, plan))
    rounded = encodings(prepared, plan)
    assert made.count("DequantizeLinear") == len(rounded)
    assert made.count("QuantizeLinear") == len(rounded.keys() - constants(model).keys())


def probed(path: Path, toy: Format) -> tuple[Prepared, RoundingPoints, Probe]:
    prepared, _, permissions = judged(path)
    graph = prepared.graph
    points = rounding_points(graph, make_units(graph, permissions, (toy,)))
    rounded = switches(points, permissions, toy)
    return prepared, points, switched_probe(prepared, rounded, [{"x": X}])


def test_probes_round_what_the_written_model_rounds(model: Path, toy: Format) -> None:
    _, points, probe = probed(model, toy)
    count = len(points.points) + len(points.weights)
    low = run(written(model, planned(model)[1]))
    for on, expected in ((False, run(model)), (True, low)):
        outputs = probe(np.full(count, on))
        for got, array in zip(outputs, expected.values(), strict=True):
            scale = np.abs(array).max()
            # As above: sums of at most three products.
            assert (
                np.abs(got.astype(np.float32) - array).max() <= 8 * Format.FP32.epsilon * scale
            )


def test_a_probe_rounds_only_what_low_ops_read(tmp_path: Path, toy: Format) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(parser.parse_model(SHARED), path)
    prepared, points, probe = probed(path, toy)
    ids = {v.name: v.id for v in prepared.graph.values}
    one = np.zeros(len(points.points) + len(points.weights), dtype=bool)
    nodes = prepared.graph.nodes
    for k, point in enumerate(points.points):
        one[k] = all(n is not None and nodes[n].inputs[i] == ids["r"] for n, i in point.places)
    encoding = encodings(*planned(path))["r"]
    own = run(path, ["r"])
    low, exact = encoding.round(own["r"]), own["r"]
    v = constants(path)["v"]
    for got, wanted in zip(probe(one), (low @ v + exact, low @ v - exact), strict=True):
        assert np.allclose(got, wanted, rtol=0, atol=1e-5)
        assert not np.allclose(got, low @ v + low, rtol=0, atol=1e-5)
    found = measure(len(points.points), probe, weights=len(points.weights))
    assert found.total > 0
    assert (found.weights > 0).all()


def test_an_external_file_is_converted_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finecast.frontends.onnx.constants.PIECE", 1001)
    path, low = (tmp_path / f"{n}.onnx" for n in ("model", "apart"))
    large = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        large (float[n, 3] x) => (float[n, 3000] y) { [one] y = MatMul(x, w) }""")
    weight = np.random.default_rng(1).standard_normal((3, 3000)).astype(np.float32)
    large.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save(large, path)
    prepared, plan = planned(path)
    frontend.save(frontend.apply(prepared.file, plan).model, low, external_data=True)
    assert np.array_equal(run(low)["y"], run(written(path, plan))["y"])
    assert frontend.came_external(frontend.load(low).model)


def test_without_data_there_is_no_scale_and_the_op_keeps_fp32(model: Path) -> None:
    _, plan = planned(model, data=False)
    assert set(plan.formats.values()) == {Format.FP32}
    texts = {r.text for r in plan.reasons if r.rule == "calibration"}
    assert any("has no toy8 scale: nothing was observed of it" in text for text in texts)


def test_the_pipeline_converts_to_it_for_an_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Plans in it are made for no engine: one computes with its numbers in fp32.
    for module in (planning, conversion):
        monkeypatch.setattr(module, "check_stated", lambda *_: None)
    out = model.with_name("out.onnx")
    data = [{"x": X[:40]}, {"x": X[40:]}]
    done = api.convert(model, out, POLICY, data=data, engine="openvino")
    plan = planned(model)[1]
    # Ops of a branch that no sample takes keep fp32.
    assert {} != done.plan.encodings.items() <= plan.encodings.items()
    assert done.verified.relative_error is not None
    assert 0 < done.verified.relative_error < 0.2
    assert np.array_equal(run(out)["y"], run(written(model, done.plan))["y"])
