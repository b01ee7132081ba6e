"""int8 in models of OpenVINO: the same ops, kernels and numbers as in ONNX's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
from numpy.typing import NDArray
from openvino import opset13 as op

from finecast import api
from finecast.engines.openvino import OpenVinoEngine
from finecast.errors import EngineError
from finecast.frontends import openvino as frontend
from finecast.frontends.native_model import coded as by_arithmetic
from finecast.frontends.native_model import with_switches
from finecast.frontends.openvino.native import OvNative
from finecast.native import integers
from finecast.native.integers import unfused
from finecast.numbers.encodings import Scaled
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.planning.points import SWITCH, Switch
from finecast.rules.policy import Policy
from tests.frontends.openvino_graphs import model_of
from tests.frontends.openvino_graphs import run as run_model
from tests.kernels import skip_without_int8
from tests.native.drawn import write_drawn
from tests.native.test_int8 import CODED, DATA, NET, SHAPES

INT8 = Format.INT8


@pytest.fixture(scope="module")
def engine() -> OpenVinoEngine:
    skip_without_int8()
    return OpenVinoEngine()


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """The net of ONNX's tests as OpenVINO converts it: biases are ops by themselves."""
    given = write_drawn(tmp_path / "net.onnx", NET, SHAPES)
    path = given.with_suffix(".xml")
    openvino.save_model(openvino.convert_model(given), path, compress_to_fp16=False)
    return path


def coded(plan: Plan) -> list[str]:
    """Ops by the names that they have in ONNX."""
    return sorted(n.partition("/")[0] for n, f in plan.formats.items() if f is INT8)


def run(path: Path) -> NDArray[np.float32]:
    (found,) = OpenVinoEngine().load(path).run(DATA).values()
    return found.astype(np.float32)


def kinds(path: Path) -> Counter[str]:
    return Counter(o.get_type_name() for o in openvino.Core().read_model(path).get_ops())


def low(net: Path, policy: str = "all:int8", name: str = "low.xml") -> Any:
    return api.convert(net, net.with_name(name), policy, data=DATA, engine="openvino")


def test_it_is_what_the_onnx_frontend_makes(net: Path, engine: OpenVinoEngine) -> None:
    done = low(net)
    assert coded(done.plan) == CODED
    out = net.with_name("low.xml")
    applied = frontend.apply(frontend.load(net), done.plan)
    assert unfused(engine, done.plan, applied, DATA) == {}
    # x, r, d, e and g (before the pool): one for each value that is rounded.
    assert kinds(out)["FakeQuantize"] == 5
    constants = {
        o.get_friendly_name(): o.get_element_type().get_type_name()
        for o in openvino.Core().read_model(out).get_ops()
        if o.get_type_name() == "Constant"
    }
    assert list(constants.values()).count("i8") == 4
    given = net.with_suffix(".onnx")
    api.convert(given, net.with_name("low.onnx"), "all:int8", data=DATA, engine="openvino")
    np.testing.assert_array_equal(run(out), run(net.with_name("low.onnx")))


def test_the_matmult_scope_leaves_the_addition(net: Path, engine: OpenVinoEngine) -> None:
    assert coded(low(net, "matmult:int8").plan) == [n for n in CODED if n != "join"]


def test_the_rest_may_be_low(net: Path, engine: OpenVinoEngine) -> None:
    """What is stored in bf16 is widened before it is rounded to codes."""
    done = low(net, "all:int8,bf16")
    assert coded(done.plan) == CODED
    assert done.plan.formats["act"] is Format.BF16
    for made in openvino.Core().read_model(net.with_name("low.xml")).get_ops():
        if made.get_type_name() == "FakeQuantize":
            assert made.get_input_element_type(0) == openvino.Type.f32


def test_a_plan_is_replayed(net: Path, engine: OpenVinoEngine) -> None:
    done, out = low(net), net.with_name("low.xml")
    plan = Plan.from_json(done.plan.to_json())
    assert plan == done.plan
    api.apply(plan, net, net.with_name("again.xml"), engine="openvino")
    np.testing.assert_array_equal(run(net.with_name("again.xml")), run(out))


def test_what_came_quantized_is_kept(net: Path, engine: OpenVinoEngine) -> None:
    """A model of another tool tells no changes of finecast's."""
    low(net)
    model = openvino.Core().read_model(net.with_name("low.xml"))
    notes: Any = model.get_rt_info()
    del notes["finecast"]
    other = net.with_name("other.xml")
    openvino.save_model(model, other, compress_to_fp16=False)
    before = kinds(other)
    done = low(other, "all:bf16", "again.xml")
    assert [w for w in done.warnings if "ops came quantized by another tool" in w]
    inside = ("stem", "act", "one", "act1", "two", "join", "act2", "head")
    fp32 = {n.partition("/")[0] for n, f in done.plan.formats.items() if f is Format.FP32}
    assert {*inside} <= fp32
    assert kinds(net.with_name("again.xml"))["FakeQuantize"] == before["FakeQuantize"]
    assert coded(low(other, "all:int8", "int8.xml").plan) == []
    types = Counter[str]()
    for row in api.inspect(other).classes:
        types.update(row.types)
    assert types["quantized"] >= len(CODED)


def test_a_product_that_does_not_run_on_integers_is_refused(
    net: Path, engine: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = low(net).plan
    monkeypatch.setattr("finecast.native.integers.not_as_planned", lambda *_: {"head": "fp32"})
    with pytest.raises(EngineError, match=r"'head' is planned in int8 .* runs it in fp32"):
        api.apply(plan, net, net.with_name("again.xml"), engine="openvino")


def test_the_tuner_predicts_what_int8_does(net: Path, engine: OpenVinoEngine) -> None:
    found = api.tune(
        net, None, data=DATA, metric="cosine", policy="auto:int8", engine="openvino",
        objective="size", tolerance=0.5,
    )  # fmt: skip
    assert found.improved
    assert coded(found.plan)
    assert 0.25 < found.predicted_error / found.measured_error < 4


def test_switches_round_to_codes() -> None:
    """Values by arithmetic in fp32, constants ahead of time."""
    x = op.parameter([-1, 4], np.float32, name="x")
    weights = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    product = op.matmul(x, op.constant(weights), False, False, name="product")
    prepared = frontend.prepare(
        frontend.from_model(model_of([product], [x])), Policy.parse("all:int8")
    )
    node = prepared.graph.find("product").id
    value = fitted(-1.0, 3.0)
    rows = Scaled.fitted(
        INT8, INT8.grid(constant=True), weights.min(axis=0), weights.max(axis=0), axis=1
    )
    both = [Switch(ports={(node, 0): value}), Switch(ports={(node, 1): rows})]
    switched = with_switches(prepared.roundable(), both)
    given = np.random.default_rng(1).normal(size=(64, 4)).astype(np.float32)
    for bits in ([False, False], [True, False], [False, True], [True, True]):
        feeds = {"x": given, SWITCH: np.array(bits)}
        (got,) = run_model(switched, feeds).values()
        low_x = value.round(given) if bits[0] else given
        np.testing.assert_allclose(
            got, low_x @ (rows.round(weights) if bits[1] else weights), atol=1e-5
        )


def fitted(low: float, high: float) -> Scaled:
    return Scaled.fitted(INT8, INT8.grid(constant=False), np.asarray(low), np.asarray(high))


@pytest.mark.parametrize("ends", [(-1.0, 3.0), (0.0, 6.0), (-2.0, 0.0), (-1e-3, 1e4)])
def test_rounding_by_arithmetic_is_the_encoding_s(ends: tuple[float, float]) -> None:
    encoding = fitted(*ends)
    rng = np.random.default_rng(0)
    numbers = rng.uniform(1.5 * ends[0] - 1, 1.5 * ends[1] + 1, 20000).astype(np.float32)
    special = np.array([0.0, np.inf, -np.inf, np.nan], np.float32)
    steps = numbers / np.float32(encoding.scale[0])
    middle = np.abs(np.abs(steps - np.trunc(steps)) - 0.5) < 1e-3  # may become either
    x = op.parameter([-1], np.float32, name="x")
    make = OvNative.copy_of(model_of([op.relu(x)], [x])).op
    model = model_of([by_arithmetic(make, x.output(0), encoding)], [x])
    feeds = {"x": np.concatenate([numbers[~middle], special])}
    (got,) = run_model(model, feeds).values()
    np.testing.assert_array_equal(got, encoding.round(feeds["x"]))


GROUPS = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 16, 8, 8] x) => (float[n, 16, 8, 8] y) {
  [stem] a = Conv <pads = [1, 1, 1, 1]> (x, w0, b0)
  [deep] c = Conv <pads = [1, 1, 1, 1], group = 16> (a, w1, b1)
  [grouped] e = Conv <pads = [1, 1, 1, 1], group = 4> (c, w2, b2)
  [tanh] y = Tanh (e)
}"""
GROUP_SHAPES = {
    "w0": (16, 16, 3, 3), "b0": (16,), "w1": (16, 1, 3, 3), "b1": (16,),
    "w2": (16, 4, 3, 3), "b2": (16,),
}  # fmt: skip


def difference(got: Any, wanted: Any) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def test_convolutions_by_groups_have_a_scale_for_each_channel(
    tmp_path: Path, engine: OpenVinoEngine
) -> None:
    """Groups are an axis of the weights by itself in OpenVINO, and none in ONNX."""
    given = write_drawn(tmp_path / "net.onnx", GROUPS, GROUP_SHAPES)
    net, data = given.with_suffix(".xml"), {"x": X}
    openvino.save_model(openvino.convert_model(given), net, compress_to_fp16=False)
    for path in (net, given):
        out = path.with_name(f"low{path.suffix}")
        done = api.convert(path, out, "all:int8", data=data, engine="openvino")
        assert coded(done.plan) == ["deep", "grouped", "stem"]
    low_net, low_given = (tmp_path / f"low{suffix}" for suffix in (".xml", ".onnx"))
    (got,), (wanted,) = (engine.load(p).run(data).values() for p in (low_net, low_given))
    assert got.shape == wanted.shape
    assert difference(got, wanted) <= 1e-3


X = np.random.default_rng(0).standard_normal((8, 16, 8, 8)).astype(np.float32)


# OpenVINO moves the scales of a product's channels behind the ops after it. Across these it
# gives the constants shapes that do not fit, and does not load the model.
REFUSED = {
    "concat": """<ir_version: 9, opset_import: ["" : 20]>
net (float[1, 8, 64] x, float[1, 8, 64] z) => (float[1, 16, 64] y) {
  [first] a = MatMul (x, w0)
  [second] b = MatMul (z, w1)
  [joined] c = Concat <axis = 1> (a, b)
  [product] y = MatMul (c, w2)
}""",
    "gather": """<ir_version: 9, opset_import: ["" : 20]>
net (float[2, 4, 64] x, float[2, 4, 64] z) => (float[1, 1, 64] y, float[2, 4, 64] u)
<int64 zero = {0}, int64[3] whole = {1, 2, 64}, int64[1] one = {1}> {
  [first] a = MatMul (x, w0)
  [second] b = MatMul (z, w1)
  [act] u = Tanh (b)
  [product] c = MatMul (a, w2)
  [row] r = Gather <axis = 1> (c, zero)
  [turned] t = Reshape (r, whole)
  [mean] y = ReduceMean (t, one)
}""",
}
SIZES = {"concat": (1, 8, 64), "gather": (2, 4, 64)}


@pytest.fixture(params=["concat", "gather"])
def refused(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """The model and data for it."""
    shapes = {f"w{i}": (64, 64) for i in range(3)}
    path = write_drawn(tmp_path / "refused.onnx", REFUSED[request.param], shapes)
    values = DATA["x"].ravel()[: 8 * 64].reshape(SIZES[request.param])
    return path, {"x": values, "z": values[::-1]}


@pytest.mark.parametrize("policy", ["all:int8", "all:int8,bf16"])
def test_an_op_with_which_the_model_does_not_load_keeps_fp32(
    refused: tuple[Path, Any], engine: OpenVinoEngine, policy: str
) -> None:
    given, data = refused
    done = api.convert(given, None, policy, data=data, engine="openvino")
    assert coded(done.plan) == ["first", "second"]
    (said,) = (note for note in done.warnings if "refuses the model with it" in note)
    assert said.startswith("'product' keeps ")
    assert "planned in int8" in said
    assert done.verified.engine == "openvino"


# Beside codes OpenVINO mixes up the types of a normalization in bf16 whose gain is apart.
NORMALIZED = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 1, t] x) => (float[n, 16, u] y)
<int64[3] flat = {0, 16, -1}> {
  [stem] a = Conv <pads = [1, 1]> (x, w0)
  [flat] f = Reshape (a, flat)
  [norm] b = InstanceNormalization (f, w1, w2)
  [shape] s = Shape (a)
  [back] c = Reshape (b, s)
  [scaled] d = Mul (c, w3)
  [shifted] e = Add (d, w4)
  [product] y = Conv <pads = [1, 1]> (e, w5)
}"""
NORMALIZED_SHAPES = {
    "w0": (16, 1, 3), "w1": (16,), "w2": (16,),
    "w3": (16, 1), "w4": (16, 1), "w5": (16, 16, 3),
}  # fmt: skip


def test_so_does_a_16_bit_op_that_the_codes_do_not_load_beside(
    tmp_path: Path, engine: OpenVinoEngine
) -> None:
    """Not the product: with it in bf16 or fp32 nothing would be left in int8."""
    given = write_drawn(tmp_path / "net.onnx", NORMALIZED, NORMALIZED_SHAPES)
    data = {"x": DATA["x"].reshape(2, 1, -1)}
    done = api.convert(given, None, "all:int8,bf16", data=data, engine="openvino")
    assert done.plan.formats["product"] is INT8
    assert list(done.plan.formats.values()).count(Format.FP32) == 1
    (said,) = (note for note in done.warnings if "refuses the model with it" in note)
    assert "keeps fp32: planned in bf16" in said
    assert done.verified.engine == "openvino"


def test_a_bias_behind_integers_is_not_cast_before_it_is_added(
    tmp_path: Path, engine: OpenVinoEngine
) -> None:
    """Without a bias in fp32 a convolution of open shape is scaled twice for two readers."""
    skipped = """
<ir_version: 10, opset_import: ["" : 20]>
skipped (float[n,8,16,16] x) => (float[n,4,16,16] y, float[n,16,16,16] z) {
  [first] a = Conv <pads = [1, 1, 1, 1]> (x, w, b)
  [second] y = Conv (a, v)
  [skip] z = Elu (a)
}"""
    shapes = {"w": (16, 8, 3, 3), "b": (16,), "v": (4, 16, 1, 1)}
    given = write_drawn(tmp_path / "net.onnx", skipped, shapes)
    ir, out = tmp_path / "net.xml", tmp_path / "low.xml"
    openvino.save_model(openvino.convert_model(given), ir, compress_to_fp16=False)
    data = {"x": np.random.default_rng(2).standard_normal((4, 8, 16, 16)).astype(np.float32)}
    done = api.convert(ir, out, "all:int8,bf16", data=data, engine="openvino", verify=False)
    assert done.plan.formats["first"] is Format.FP32
    assert INT8 in done.plan.formats.values()
    outputs = zip(*(engine.load(m).run(data).values() for m in (out, ir)), strict=True)
    for low_output, exact in (
        (a.astype(np.float64), b.astype(np.float64)) for a, b in outputs
    ):
        error = np.linalg.norm(low_output - exact) / np.linalg.norm(exact)
        assert error < 8 * Format.INT8.unit_roundoff  # .98 with the scale squared


@pytest.mark.parametrize("policy", ["all:bf16", "all:int8,bf16"])
def test_instance_norms_have_one_verdict_in_both_forms(
    policy: str, tmp_path: Path, engine: OpenVinoEngine
) -> None:
    """In IR they are an MVN over 576 numbers, whose kernel has the sums in fp32, too."""
    given = write_drawn(tmp_path / "net.onnx", NORMALIZED, NORMALIZED_SHAPES)
    ir = tmp_path / "net.xml"
    openvino.save_model(openvino.convert_model(given), ir, compress_to_fp16=False)
    data = {"x": DATA["x"].reshape(2, 1, -1)}
    forms: list[tuple[Format, Format]] = []
    for model in (given, ir):
        done = api.convert(model, None, policy, data=data, engine="openvino")
        (norm,) = (d.format for d in done.plan.decisions if d.op.endswith("_norm"))
        forms.append((norm, done.plan.decisions[-1].format))
    assert forms == [(Format.BF16, INT8 if "int8" in policy else Format.BF16)] * 2


def test_global_pools_have_one_verdict_in_both_forms(
    tmp_path: Path, engine: OpenVinoEngine
) -> None:
    """In IR they are a mean over 576 numbers, whose kernel has the sum in fp32, too."""
    pooled = """
<ir_version: 10, opset_import: ["" : 20]>
pooled (float[2,3,24,24] x) => (float[2,8,1,1] y) {
  [conv] a = Conv <pads = [1, 1, 1, 1]> (x, w)
  [pool] y = GlobalAveragePool (a)
}"""
    given = write_drawn(tmp_path / "net.onnx", pooled, {"w": (8, 3, 3, 3)})
    ir = tmp_path / "net.xml"
    openvino.save_model(openvino.convert_model(given), ir, compress_to_fp16=False)
    for model, name in ((given, "global_average_pool"), (ir, "reduce_mean")):
        done = api.convert(model, None, "all:bf16", engine="openvino")
        (pool,) = (d for d in done.plan.decisions if d.op == name)
        assert pool.format is Format.BF16


def normalized(number: int) -> str:
    """The layer of NORMALIZED from the value before it, to which it is added."""
    i = number
    return f"""
  [flat{i}] f{i} = Reshape (z{i - 1}, flat)
  [norm{i}] b{i} = InstanceNormalization (f{i}, w1, w2)
  [shape{i}] s{i} = Shape (z{i - 1})
  [back{i}] c{i} = Reshape (b{i}, s{i})
  [scaled{i}] d{i} = Mul (c{i}, w3)
  [shifted{i}] e{i} = Add (d{i}, w4)
  [product{i}] p{i} = Conv <pads = [1, 1]> (e{i}, w5)
  [bounded{i}] t{i} = Tanh (p{i})
  [residual{i}] z{i} = Add (z{i - 1}, t{i})"""


def test_in_repeated_layers_only_the_ops_at_fault_leave_their_format(
    tmp_path: Path, engine: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are too many to be found one by one; the residual additions are of their kind."""
    monkeypatch.setattr(integers, "_MOST_ATTEMPTS", 24)
    stem = NORMALIZED.partition("\n  [flat]")[0].replace("] a =", "] z0 =")
    layers = "".join(map(normalized, range(1, 6)))
    text = f"{stem}{layers}\n  [last] y = Relu (z5)\n}}"
    given = write_drawn(tmp_path / "net.onnx", text, NORMALIZED_SHAPES)
    data = {"x": DATA["x"].reshape(2, 1, -1)}
    done = api.convert(given, None, "all:int8,bf16", data=data, engine="openvino")
    kept = {name for name, fmt in done.plan.formats.items() if fmt is Format.FP32}
    assert kept == {f"shifted{i}" for i in range(1, 6)}
    assert {f"product{i}" for i in range(1, 6)} <= {*coded(done.plan)}


def test_so_does_one_of_an_ir(refused: tuple[Path, Any], engine: OpenVinoEngine) -> None:
    """Its roundings are single ops, across which scales are moved by Gather alone."""
    given, data = refused
    ir, path = openvino.convert_model(given), given.with_suffix(".xml")
    openvino.save_model(ir, path, compress_to_fp16=False)
    done = api.convert(path, None, "all:int8", data=data, engine="openvino")
    gathers = "Gather" in kinds(path)
    assert len(coded(done.plan)) == (2 if gathers else 3)
    assert any("refuses the model with it" in note for note in done.warnings) is gathers


def test_the_search_for_such_an_op_is_bounded(
    refused: tuple[Path, Any], engine: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then all ops of its kind keep fp32: the model is converted, and it is said."""
    monkeypatch.setattr(integers, "_MOST_ATTEMPTS", 2)
    done = api.convert(refused[0], None, "all:int8", data=refused[1], engine="openvino")
    assert coded(done.plan) == []
    (said,) = (note for note in done.warnings if "keep fp32: planned" in note)
    assert all(f"'{name}'" in said for name in ("first", "second", "product"))


def test_such_an_op_that_was_asked_for_in_int8_is_refused(
    refused: tuple[Path, Any], engine: OpenVinoEngine
) -> None:
    policy = Policy.parse("all:int8")
    policy = replace(policy, op_formats={"MatMul": INT8})
    with pytest.raises(EngineError, match="'product' is planned in int8, as was asked"):
        api.convert(refused[0], None, policy, data=refused[1], engine="openvino")
