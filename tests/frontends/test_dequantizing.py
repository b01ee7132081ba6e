"""What QuantizeLinear and DequantizeLinear state, taken to fp32: --from-type int8."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper, parser

from finecast import api
from finecast.errors import ModelError, UsageError
from finecast.frontends import onnx as frontend
from finecast.native.observing import observe
from finecast.numbers.encodings import Scaled
from finecast.numbers.formats import Format
from finecast.rules.calibration import calibrated
from finecast.rules.policy import Policy
from finecast.rules.ranges import Calibration
from tests.frontends import tools

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\ng '
# Codes of x that begin below 0, a product, and codes of its result that begin at 0: the tool
# left out the Relu before them. `u` is what a sigmoid makes of it.
NET = (
    HEAD
    + """(float[2, 4] x) => (float[2, 4] y)
<float s = {0.05}, uint8 z = {100}, float t = {0.1}, uint8 zero = {0}, float v = {0.02},
 int8 none = {0}> {
  qx = QuantizeLinear (x, s, z)
  dx = DequantizeLinear (qx, s, z)
  dw = DequantizeLinear (w, v, none)
  [product] m = MatMul (dx, dw)
  qm = QuantizeLinear (m, t, zero)
  dm = DequantizeLinear (qm, t, zero)
  [sigmoid] u = Sigmoid (dm)
  qu = QuantizeLinear (u, v, zero)
  du = DequantizeLinear (qu, v, zero)
  [last] y = MatMul (du, dw)
}"""
)
WEIGHTS = np.random.default_rng(0).integers(-100, 100, (4, 4)).astype(np.int8)
X = np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)


def net(text: str = NET, weights: NDArray[np.generic] = WEIGHTS) -> onnx.ModelProto:
    made = parser.parse_model(text)
    made.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.checker.check_model(made, full_check=True)
    return made


def taken(model: onnx.ModelProto) -> frontend.OnnxFile:
    return frontend.take_to_fp32(frontend.from_model(model), "int8")


def run(model: object, feeds: dict[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    (found,) = api.load(model, trust=False).reference().run(feeds).values()  # pyright: ignore[reportArgumentType]
    return found.astype(np.float32)


def test_values_are_as_before_they_were_rounded_and_constants_are_their_codes() -> None:
    file = taken(net())
    model = frontend.to_proto(file.model)
    kinds = [n.op_type for n in model.graph.node]
    assert kinds == ["MatMul", "Clip", "Sigmoid", "MatMul"]
    weights = WEIGHTS.astype(np.float32) * np.float32(0.02)
    product = np.clip(X @ weights, 0, np.float32(0.1) * 255)
    wanted = 1 / (1 + np.exp(-product)) @ weights
    np.testing.assert_allclose(run(model, {"x": X}), wanted, rtol=1e-5, atol=1e-6)


def test_the_cut_in_front_of_codes_that_begin_at_0_stays() -> None:
    """Without it numbers below 0 would come back; of what a sigmoid gives there are none."""
    clips = [
        n for n in frontend.to_proto(taken(net()).model).graph.node if n.op_type == "Clip"
    ]
    (clip,) = clips
    assert clip.input[0] == "m"


def test_how_values_were_encoded_is_told() -> None:
    came = taken(net()).came_as
    assert set(came) == {"x", "m_clipped", "u", "dw"}
    assert (came["x"].scale, came["x"].zero_point) == ((np.float32(0.05),), 100)
    assert came["dw"].grid.symmetric
    np.testing.assert_array_equal(came["dw"].encode(came["dw"].decode(WEIGHTS)), WEIGHTS)


@pytest.mark.parametrize(
    ("codes", "zero", "wanted"),
    [
        (np.array([[-128, 127]], np.int8), 0, None),  # one code more than int8's have here
        (np.array([[-127, 127]], np.int8), 0, 0),
        (np.array([[1, 255]], np.uint8), 128, 0),
        (np.array([[3, 4]], np.int8), 3, None),
    ],
)
def test_weights_that_int8_has_no_such_codes_for_have_their_own(
    codes: NDArray[np.generic], zero: int, wanted: int | None
) -> None:
    kind = "uint8" if codes.dtype == np.uint8 else "int8"
    text = f"""{HEAD}(float[n, 1] x) => (float[n, 2] y)
    <float v = {{0.5}}, {kind} o = {{{zero}}}>
    {{ d = DequantizeLinear (w, v, o)
       y = MatMul (x, d) }}"""
    file = taken(net(text, codes))
    found = file.came_as.get("d")
    assert (found.zero_point if found else None) == wanted
    exact = (codes.astype(np.float32) - zero) * 0.5
    np.testing.assert_array_equal(
        run(frontend.to_proto(file.model), {"x": np.ones((1, 1), np.float32)}), exact
    )
    if isinstance(found, Scaled):
        np.testing.assert_array_equal(found.round(exact), exact)


def test_scales_by_channel_keep_their_axis() -> None:
    text = f"""{HEAD}(float[n, 4] x) => (float[n, 4] y)
    <float[4] v = {{0.5, 0.25, 1, 2}}, int8[4] o = {{0, 0, 0, 0}}>
    {{ d = DequantizeLinear <axis = -1> (w, v, o)
       y = MatMul (x, d) }}"""
    file = taken(net(text))
    assert file.came_as["d"].axis == 1
    exact = WEIGHTS.astype(np.float32) * np.array([0.5, 0.25, 1, 2], np.float32)
    got = run(frontend.to_proto(file.model), {"x": np.eye(4, dtype=np.float32)})
    np.testing.assert_array_equal(got, exact)


def test_an_output_keeps_its_name() -> None:
    text = f"""{HEAD}(float[n, 4] x) => (float[n, 4] y)
    <float s = {{0.05}}, uint8 z = {{100}}, float v = {{0.5}}, int8 o = {{0}}>
    {{ d = DequantizeLinear (w, v, o)
       m = MatMul (x, d)
       q = QuantizeLinear (m, s, z)
       y = DequantizeLinear (q, s, z) }}"""
    model = frontend.to_proto(taken(net(text)).model)
    assert [n.op_type for n in model.graph.node] == ["MatMul"]
    assert [v.name for v in model.graph.output] == ["y"]


def test_what_is_of_integers_itself_stays() -> None:
    """A max pool that moves codes: what feeds it stays rounded."""
    text = f"""{HEAD}(float[1, 1, 2, 2] x) => (float[1, 4] y)
    <float s = {{0.05}}, uint8 z = {{100}}, float v = {{0.5}}, int8 o = {{0}},
     int64[2] flat = {{1, 1}}>
    {{ q = QuantizeLinear (x, s, z)
       p = MaxPool <kernel_shape = [2, 2]> (q)
       c = DequantizeLinear (p, s, z)
       r = Reshape (c, flat)
       d = DequantizeLinear (w, v, o)
       y = MatMul (r, d) }}"""
    model = frontend.to_proto(taken(net(text, WEIGHTS[:1])).model)
    kinds = [n.op_type for n in model.graph.node]
    assert kinds.count("QuantizeLinear") == kinds.count("DequantizeLinear") == 1


def test_a_model_without_such_nodes_is_refused() -> None:
    text = f"{HEAD}(float[n, 4] x) => (float[n, 4] y) {{ y = Relu (x) }}"
    with pytest.raises(UsageError, match="the model has no QuantizeLinear"):
        frontend.take_to_fp32(frontend.from_model(parser.parse_model(text)), "int8")


def test_a_plan_encodes_as_the_model_came() -> None:
    """Unless another calibration is asked for, or there is none of int8's."""
    file = taken(net())
    prepared = frontend.prepare(file, Policy.parse("all:int8"))
    facts = observe(prepared, lambda: [{"x": X}])
    graph = prepared.graph
    for name, (operand, constant) in {"product": ("x", "dw"), "last": ("u", "dw")}.items():
        found = calibrated(graph, graph.find(name), Format.INT8, facts)
        assert found.operands[0] == file.came_as[operand]
        assert found.constants[1] == file.came_as[constant]
        own = calibrated(graph, graph.find(name), Format.INT8, facts, Calibration.MSE)
        assert own.operands[0] != found.operands[0]


def test_the_cut_of_a_value_that_a_body_is_given_stands_in_the_body() -> None:
    text = """(float[2, 4] x, int64 n, bool c) => (float[2, 4] y)
<float s = {0.05}, uint8 zero = {0}> {
  y = Loop (n, c, x) <body = b (int64 i, bool k, float[2, 4] h) => (bool k2, float[2, 4] h2) {
    k2 = Identity (k)
    q = QuantizeLinear (h, s, zero)
    d = DequantizeLinear (q, s, zero)
    h2 = Tanh (d)
  }>
}"""
    model = frontend.to_proto(taken(parser.parse_model(HEAD + text)).model)
    (loop,) = model.graph.node
    body = loop.attribute[0].g
    assert sorted(n.op_type for n in body.node) == ["Clip", "Identity", "Tanh"]
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize(("bounds", "cut"), [("low", True), ("zero", False), ("", True)])
def test_only_a_clip_from_0_on_cuts_as_the_codes_do(bounds: str, cut: bool) -> None:
    text = f"""(float[2, 4] x) => (float[2, 4] y)
<float low = {{-1.0}}, float zero = {{0.0}}, float s = {{0.1}}, uint8 none = {{0}}> {{
  c = Clip (x{bounds and ", " + bounds})
  q = QuantizeLinear (c, s, none)
  d = DequantizeLinear (q, s, none)
  y = Tanh (d)
}}"""
    before = parser.parse_model(HEAD + text)
    after = frontend.to_proto(taken(before).model)
    assert [n.op_type for n in after.graph.node].count("Clip") == 1 + cut
    (want,), (got,) = tools.run(before, x=X), tools.run(after, x=X)
    np.testing.assert_allclose(got, want, atol=0.05)


@pytest.mark.parametrize(
    ("scales", "axis", "said"),
    [
        ("float[3] s = {1, 1, 1}", 0, "3 numbers of scale for 4 channels"),
        ("float[4] s = {1, 1, 1, 1}", 7, "axis 7 is none of integers with 2 dimensions"),
    ],
)
def test_codes_that_their_scales_do_not_fit_are_refused_by_name(
    scales: str, axis: int, said: str
) -> None:
    """The checker lets them pass; the error was one of the library that writes the file."""
    text = HEAD + f"(float[2, 4] x) => (float[2, 4] y) <{scales}> {{\n"
    text += f"  [codes] dw = DequantizeLinear <axis = {axis}> (w, s)\n  y = MatMul (x, dw)\n}}"
    made = parser.parse_model(text)
    made.graph.initializer.append(numpy_helper.from_array(WEIGHTS, "w"))
    with pytest.raises(ModelError, match=said) as error:
        taken(made)
    assert "codes" in str(error.value)
