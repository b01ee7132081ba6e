"""Casts to bf16 that OpenVINO rounds wrongly: what they read is rounded before them."""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx
import openvino
import pytest
from openvino import opset13 as op

import finecast
from finecast.engines import get_engine
from finecast.frontends.exact_casts import in_blocks
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy, Scope
from tests.frontends.openvino_graphs import model_of
from tests.frontends.tools import parse, tensor
from tests.graph.text import from_text

WIDTH = 32
RNG = np.random.default_rng(0)
X = RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32)


def model(shape: str = "n, 32", body: str = "y = MatMul(x, w)") -> onnx.ModelProto:
    """A product with the identity gives what its operand was rounded to."""
    proto = parse(f"g (float[{shape}] x) => (float[{shape}] y) {{ {body} }}", opset=22)
    proto.graph.initializer.extend([tensor("w", np.eye(WIDTH)), tensor("two", 2.0)])
    for node in proto.graph.node:
        node.name = f"make_{node.output[0]}"
    return proto


def converted(proto: onnx.ModelProto, *, keep_ops: bool = False) -> onnx.ModelProto:
    policy = Policy(scope=Scope.ALL, formats=(Format.BF16,), keep_ops=keep_ops)
    done = finecast.convert(proto, policy=policy, engine="openvino", verify=False)
    assert done.model is not None
    onnx.checker.check_model(done.model, full_check=True)
    return done.model


def outputs(proto: onnx.ModelProto, x: np.ndarray = X) -> np.ndarray:
    return get_engine("openvino").load(proto.SerializeToString()).run({"x": x})["y"]


def ops(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node]


def to_nearest(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def test_openvino_still_rounds_wrongly_by_itself() -> None:
    """Once it no longer does, what is tested here goes."""
    assert (outputs(converted(model(), keep_ops=True)) != to_nearest(X)).any()


ROUNDED = ["Mul", "Unsqueeze", "Add", "Mul", "Squeeze", "Cast"]
MOVED = """t = Transpose<perm = [1, 0]>(x)
  p = MatMul(w, t)
  y = Transpose<perm = [1, 0]>(p)"""


SHAPED = """p = MatMul(x, w)
  s = Shape(x)
  y = Reshape(p, s)"""


@pytest.mark.parametrize("body", ["y = MatMul(x, w)", MOVED, SHAPED])
def test_an_input_of_open_shape_is_rounded_to_nearest(body: str) -> None:
    low = converted(model(body=body))
    assert ops(low)[: len(ROUNDED)] == ROUNDED
    assert (outputs(low) == to_nearest(X)).all()
    larger = X * 2.0 ** RNG.integers(-60, 100, X.shape)
    assert (outputs(low, larger.astype(np.float32)) == to_nearest(larger)).all()


def test_what_lies_about_a_power_of_two_is_rounded_to_nearest() -> None:
    """The product that rounds must not cross it: digits beyond are coarser."""
    steps = np.arange(-(WIDTH * WIDTH) // 2, WIDTH * WIDTH // 2)
    for middle in (0x3F800000, 0xBF800000, 0x42000000):
        x = ((middle + 61 * steps).astype(np.uint32)).view(np.float32).reshape(WIDTH, WIDTH)
        assert (outputs(converted(model()), x) == to_nearest(x)).all()


def test_what_is_computed_from_constants_is_rounded_to_nearest() -> None:
    """As standardized weights are, in a model of fixed shape, too."""
    proto = model("32, 32", "s = Sin(v) y = MatMul(x, s)")
    weights = RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32)
    proto.graph.initializer.append(tensor("v", weights))
    identity = np.eye(WIDTH, dtype=np.float32)
    exact = outputs(proto, identity)
    assert (outputs(converted(proto), identity) == to_nearest(exact)).all()
    assert (outputs(converted(proto, keep_ops=True), identity) != to_nearest(exact)).any()


@pytest.mark.parametrize(
    ("shape", "body"),
    [
        ("32, 32", "y = MatMul(x, w)"),  # a fixed shape: it is rounded right
        ("n, 32", "a = Mul(x, two) y = MatMul(a, w)"),  # of Inf a multiple is Inf
        ("n, 32", "p = MatMul(x, w) y = Add(p, x)"),
    ],
)
def test_other_casts_stay_alone(shape: str, body: str) -> None:
    proto = model(shape, body)
    assert [kind for kind in ops(converted(proto)) if kind != "Cast"] == ops(proto)


def test_what_the_model_gives_is_cast_alone() -> None:
    """There Inf would come out as NaN: of what is given in bf16, or moved and given."""
    proto = model(body="t = Transpose<perm = [1, 0]>(x) y = MatMul(w, t)")
    proto.graph.output.append(onnx.helper.make_tensor_value_info("t", 1, [WIDTH, None]))
    assert [kind for kind in ops(converted(proto)) if kind != "Cast"] == ops(proto)
    proto = model(body="y = Mul(x, two)")
    policy = Policy(
        scope=Scope.ALL,
        formats=(Format.BF16,),
        io={"y": Format.BF16},
        exclude=(re.compile("make_y"),),
    )
    done = finecast.convert(proto, policy=policy, engine="openvino", verify=False)
    assert done.model is not None
    assert ops(done.model) == ["Mul", "Cast"]


def test_a_conversion_to_another_format_takes_it_back() -> None:
    proto = model()
    once = converted(proto)
    again = finecast.convert(once, policy="all:fp16", engine="openvino", verify=False).model
    assert again is not None
    assert [kind for kind in ops(again) if kind != "Cast"] == ops(proto)
    assert not any("rounding" in t.name for t in again.graph.initializer)


def test_the_same_policy_again_changes_nothing() -> None:
    once = converted(model())
    assert converted(once).graph == once.graph


def test_an_openvino_model_is_stated_alike() -> None:
    x = op.parameter([-1, WIDTH], np.float32, name="x")
    product = op.matmul(
        x, op.constant(np.eye(WIDTH, dtype=np.float32)), False, False, name="y"
    )
    product.output(0).set_names({"y"})
    given = model_of([product], [x])
    done = finecast.convert(given, policy="all:bf16", verify=False)
    assert "rounded in fp32" in done.restated[0]
    got = get_engine("openvino").load(done.model).run({"x": X})["y"]
    assert (got == to_nearest(X)).all()


def test_another_engine_is_given_no_such_ops() -> None:
    done = finecast.convert(model(), policy="all:bf16", engine="emulator:trn1", verify=False)
    assert done.model is not None
    assert "Mul" not in ops(done.model)


def test_rounding_first_takes_one_kernel() -> None:
    low = converted(model())
    assert computing(low) - computing(converted(model(), keep_ops=True)) == 1


def computing(proto: onnx.ModelProto) -> int:
    """The kernels that compute; what is reshaped rests where it is."""
    core = openvino.Core()
    read = core.read_model(proto.SerializeToString())
    compiled = core.compile_model(read, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    kernels = compiled.get_runtime_model().get_ordered_ops()
    return [str(k.get_rt_info()["layerType"].astype(str)) for k in kernels].count("Eltwise")


def test_a_value_inside_of_open_shape_is_rounded_to_nearest() -> None:
    """As the fp32 sum of a residual stream is, that a product reads."""
    proto = model(body="a = Abs(x) y = MatMul(a, w)")
    policy = Policy.parse("all:bf16")
    policy = replace(policy, op_formats={"abs": Format.FP32})
    done = finecast.convert(proto, policy=policy, engine="openvino", verify=False)
    assert done.model is not None
    assert (outputs(done.model) == to_nearest(np.abs(X))).all()


def test_what_convolutions_read_is_rounded_in_its_blocks() -> None:
    """A reshape between would reorder it: that takes longer than a kernel more."""
    proto = model("n, 32, 4, 4", "a = Abs(x) y = Conv(a, k)")
    kernel = np.eye(WIDTH, dtype=np.float32)[:, :, None, None]
    proto.graph.initializer.append(tensor("k", kernel))
    images = RNG.standard_normal((2, WIDTH, 4, 4)).astype(np.float32)
    policy = replace(Policy.parse("all:bf16"), op_formats={"abs": Format.FP32})
    done = finecast.convert(proto, policy=policy, engine="openvino", verify=False)
    assert done.model is not None
    assert ops(done.model) == ["Abs", "Mul", "Add", "Mul", "Cast", "Conv", "Cast"]
    assert (outputs(done.model, images) == to_nearest(np.abs(images))).all()
    again = finecast.convert(done.model, policy="all:fp16", engine="openvino", verify=False)
    assert again.model is not None
    assert [kind for kind in ops(again.model) if kind != "Cast"] == ["Abs", "Conv"]


IF = """s = ReduceMax<keepdims = 0>(x)
  c = Greater(s, least)
  y = If(c) <
    then_branch = taken () => (float[32, 32] p) { a = Abs(x) p = MatMul(a, w) },
    else_branch = other () => (float[32, 32] q) { q = Neg(x) }
  >"""
LOOP = """y = Loop(once, on, x) <
    body = step (int64 i, bool go, float[32, 32] h) => (bool on_, float[32, 32] p) {
      on_ = Identity(go)
      a = Abs(h)
      b = MatMul(a, w)
      p = Abs(b)
    }
  >"""


def in_body(body: str) -> onnx.ModelProto:
    """A product of fixed shape in a body."""
    proto = model("32, 32", body)
    proto.graph.initializer.append(tensor("least", -1e9))
    once = onnx.numpy_helper.from_array(np.array(1, dtype=np.int64), "once")
    proto.graph.initializer.extend([once, onnx.numpy_helper.from_array(np.array(True), "on")])
    for inside in (a.g for n in proto.graph.node for a in n.attribute if a.HasField("g")):
        for node in inside.node:
            node.name = f"make_{node.output[0]}"
    return proto


@pytest.mark.parametrize("body", [IF, LOOP])
@pytest.mark.parametrize("as_ir", [False, True])
def test_casts_in_bodies_are_rounded_to_nearest(body: str, *, as_ir: bool) -> None:
    """There OpenVINO casts as it does where the shape is open."""
    proto = in_body(body)
    given = openvino.Core().read_model(proto.SerializeToString()) if as_ir else proto
    products = Policy(scope=Scope.MATMULT, formats=(Format.BF16,))

    def got(policy: Policy) -> np.ndarray:
        done = finecast.convert(given, policy=policy, engine="openvino", verify=False)
        made = done.model if as_ir else done.model.SerializeToString()
        (found,) = get_engine("openvino").load(made).run({"x": X}).values()
        return found

    assert (got(products) == to_nearest(np.abs(X))).all()
    assert (got(replace(products, keep_ops=True)) != to_nearest(np.abs(X))).any()


def test_what_an_op_gives_to_convolutions_rests_in_blocks() -> None:
    """A model's own input does not."""
    graph = from_text(
        "input %0 x fp32\nconstant %1 w fp32 size=4\n"
        "node a conv onnx::Conv fp32 (%0, %1) -> (%2 v fp32)\n"
        "node b conv onnx::Conv fp32 (%2, %1) -> (%3 y fp32)\noutput %3\n"
    )
    assert [in_blocks(graph, value) for value in (0, 2, 3)] == [False, True, False]
