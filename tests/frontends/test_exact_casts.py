"""Casts to bf16 that OpenVINO rounds wrongly: what they read is rounded before them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import openvino
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openvino import opset13 as op

import finecast
from finecast.engines import get_engine
from finecast.frontends.exact_casts import StoredAs, rounded_by, stored_as
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy, Scope
from tests.frontends.openvino_graphs import model_of
from tests.frontends.tools import parse, tensor
from tests.graph.text import from_text
from tests.kernels import skip_without_bf16

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


ROUNDED = ["Max", "Unsqueeze", "Max", "Mul", "Add", "Mul", "Squeeze", "Cast"]
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
    proto = model("32, 32", "s = Softmax(v) y = MatMul(x, s)")
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


STEPS = {
    "maximum": np.maximum,
    "power": np.power,
    "multiply": np.multiply,
    "add": np.add,
    "unsqueeze": lambda x, axes: np.expand_dims(x, tuple(axes)),
    "squeeze": lambda x, axes: np.squeeze(x, tuple(axes)),
}
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def by_arithmetic(x: np.ndarray, kept: StoredAs) -> np.ndarray:
    def step(kind: str, label: str, one: Any, other: Any) -> Any:
        del label
        return STEPS[kind](one, np.float32(other) if isinstance(other, float) else other)

    with np.errstate(all="ignore"):
        return rounded_by(step, x, kept)


@given(st.lists(FINITE, min_size=1))
@pytest.mark.parametrize("kept", StoredAs)
def test_fp32_arithmetic_gives_the_bits_of_a_right_cast(
    kept: StoredAs, numbers: list[float]
) -> None:
    """Of subnormals, and of numbers that round to Inf, too; but a zero has no sign."""
    x = np.array(numbers, np.float32)
    got = by_arithmetic(x, kept)
    assert got.dtype == np.float32
    assert (got.view(np.uint32) == (to_nearest(x) + np.float32(0)).view(np.uint32)).all()


@pytest.mark.parametrize("kept", StoredAs)
def test_arithmetic_of_inf_and_nan_gives_nan(kept: StoredAs) -> None:
    endless = np.array([np.inf, -np.inf, np.nan], np.float32)
    assert np.isnan(by_arithmetic(endless, kept)).all()


# What gives the value that a product reads: OpenVINO might move what rounds it.
GIVERS = {
    "an input": "a = Identity(x)",
    "a sum": "a = Add(x, v)",
    "a product": "a = Mul(x, v)",
    "a product with a number": "b = Add(x, v) a = Mul(b, two)",
    "a quotient": "a = Div(x, v)",
    "a reshape": "b = Unsqueeze(x, axes) c = Abs(b) a = Squeeze(c, axes)",
    "a transposition": "b = Abs(x) a = Transpose<perm = [0, 1]>(b)",
    "a slice": "b = Abs(x) a = Slice(b, axes, all, axes)",
    "another product": "a = MatMul(x, w)",
    "a norm": "a = LayerNormalization(x, v, v)",
    "a norm without a mean": """s = Mul(x, x) m = ReduceMean<axes = [-1]>(s)
      e = Add(m, two) r = Sqrt(e) a = Div(x, r)""",
    "an inverse": """s = Mul(x, x) m = ReduceMean<axes = [-1]>(s)
      e = Add(m, two) r = Sqrt(e) i = Reciprocal(r) a = Mul(x, i)""",
    "a loop": """a = Loop(once, on, x) <
        body = step (int64 i, bool go, float[n, 32] h) => (bool on_, float[n, 32] p) {
          on_ = Identity(go)
          q = MatMul(h, w)
          p = Tanh(q)
        }
      >""",
}
ON_IMAGES = {
    "an input": "a = Identity(x)",
    "an activation": "b = Conv(x, k) a = Relu(b)",
    "another convolution": "a = Conv(x, k)",
    "channels that are joined": "b = Conv(x, k) a = Concat<axis = 0>(b, x)",
    "a pooling": "a = MaxPool<kernel_shape = [2, 2]>(x)",
    "channels that are moved": """b = Abs(x) c = Transpose<perm = [0, 2, 3, 1]>(b)
      d = Tanh(c) a = Transpose<perm = [0, 3, 1, 2]>(d)""",
}


@pytest.mark.parametrize("as_ir", [False, True])
@pytest.mark.parametrize("giver", GIVERS.values(), ids=GIVERS.keys())
def test_by_default_a_model_has_the_error_of_bf16(giver: str, as_ir: bool) -> None:
    """OpenVINO's own hint is bf16 then: what cancels may not get numbers that differ."""
    source = parse(
        f"g (float[n, 32] x) => (float[n, m] y) {{ {giver} y = MatMul(a, z) }}", opset=17
    )
    check_default(source, X[:8], as_ir=as_ir)


@pytest.mark.parametrize("as_ir", [False, True])
@pytest.mark.parametrize("giver", ON_IMAGES.values(), ids=ON_IMAGES.keys())
def test_by_default_convolutions_have_the_error_of_bf16(giver: str, as_ir: bool) -> None:
    shapes = "(float[n, 32, h, w] x) => (float[n, 32, g, f] y)"
    source = parse(f"g {shapes} {{ {giver} y = Conv(a, k) }}", opset=17)
    images = RNG.standard_normal((2, WIDTH, 8, 8)).astype(np.float32)
    check_default(source, images, as_ir=as_ir)


def test_by_default_what_integers_give_to_convolutions_has_the_error_of_bf16() -> None:
    """Kernels of integers give fp32 under a low hint, where others give bf16."""
    skip_without_bf16()
    body = """b = Conv(x, k) c = Relu(b) d = Conv(c, k) e = Add(c, d) a = Relu(e)
      f = Conv(a, k) g = Conv<group = 32>(a, l) y = Add(f, g)"""
    shapes = "(float[n, 32, h, w] x) => (float[n, 32, h, w] y)"
    source = parse(f"g {shapes} {{ {body} }}", opset=17)
    fill(source)
    by_channel = RNG.standard_normal((WIDTH, 1, 1, 1)).astype(np.float32)
    source.graph.initializer.append(tensor("l", by_channel))
    images = RNG.standard_normal((2, WIDTH, 8, 8)).astype(np.float32)
    formats = {"group_conv": Format.BF16, "relu": Format.FP32}
    read = openvino.Core().read_model(source.SerializeToString())
    policy = replace(Policy.parse("all:int8,bf16"), op_formats=formats)
    check_default_of_mixed(read, images, policy)


@pytest.mark.parametrize("as_ir", [False, True])
def test_by_default_what_is_widened_first_has_the_error_of_bf16(*, as_ir: bool) -> None:
    """A kernel that begins with a cast to fp32 gives fp32, too."""
    skip_without_bf16()
    body = """b = Conv(x, k) d = Conv(b, k) c = Add(b, d) a = Relu(c)
      e = Conv(a, k) f = Conv(a, k) y = Add(e, f)"""
    shapes = "(float[n, 32, h, w] x) => (float[n, 32, h, w] y)"
    source = parse(f"g {shapes} {{ {body} }}", opset=17)
    fill(source)
    images = RNG.standard_normal((2, WIDTH, 8, 8)).astype(np.float32)
    read = openvino.Core().read_model(source.SerializeToString())
    policy = replace(Policy.parse("all:bf16"), exclude=(re.compile("Relu_3|Conv_4"),))
    check_default_of_mixed(read if as_ir else source, images, policy)


@pytest.mark.parametrize("as_ir", [False, True])
def test_by_default_what_integers_give_to_products_has_the_error_of_bf16(
    *, as_ir: bool
) -> None:
    """As queries and keys give it to attention."""
    skip_without_bf16()
    body = """q = MatMul(x, w) r = Reshape(q, heads) a = Transpose<perm = [1, 0, 2]>(r)
      p = MatMul(x, z) l = Reshape(p, heads) b = Transpose<perm = [1, 2, 0]>(l)
      y = MatMul(a, b)"""
    source = parse(f"g (float[n, 32] x) => (float[2, n, n] y) {{ {body} }}", opset=17)
    fill(source)
    source.graph.initializer.append(tensor("heads", [-1, 2, WIDTH // 2], np.int64))
    read = openvino.Core().read_model(source.SerializeToString())
    check_default_of_mixed(read if as_ir else source, X[:8], "all:int8,bf16")


def check_default_of_mixed(source: Any, x: np.ndarray, policy: Policy | str) -> None:
    """Checks what a model of several formats gives by OpenVINO's default hint.

    As it is, and after its shapes were fixed.
    """
    core = openvino.Core()
    done = finecast.convert(
        source,
        policy=policy,
        engine="openvino",
        calib=[{"x": x}],
        verify=False,
    )
    read, low = (
        m if isinstance(m, openvino.Model) else core.read_model(m.SerializeToString())
        for m in (source, done.model)
    )
    assert by_rounding(low)
    exact = core.compile_model(read, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(x)[0]
    fixed = low.clone()
    fixed.reshape(x.shape)
    for tried in (low, fixed):
        got = core.compile_model(tried, "CPU", {})(x)[0].astype(np.float64)
        assert np.linalg.norm(got - exact) / np.linalg.norm(exact) < 0.1


def check_default(source: onnx.ModelProto, x: np.ndarray, *, as_ir: bool) -> None:
    """Checks what a model gives whose products are in bf16, by OpenVINO's default hint.

    As it is, and after its shapes were fixed.
    """
    skip_without_bf16()
    fill(source)
    core = openvino.Core()
    read = core.read_model(source.SerializeToString())
    policy = Policy(scope=Scope.MATMULT, formats=(Format.BF16,))
    done = finecast.convert(
        read if as_ir else source, policy=policy, engine="openvino", verify=False
    )
    assert done.model is not None
    low = done.model if as_ir else core.read_model(done.model.SerializeToString())
    assert by_rounding(low)

    exact = core.compile_model(read, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(x)[0]
    fixed = low.clone()
    fixed.reshape(x.shape)
    for tried in (low, fixed):
        got = core.compile_model(tried, "CPU", {})(x)[0].astype(np.float64)
        error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
        assert error < 4 * float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps)


def by_rounding(low: openvino.Model) -> bool:
    """Whether something is rounded in fp32 in the model: its factor is there."""
    loops = (o for o in low.get_ops() if o.get_type_name() == "Loop")
    inner = [o.get_function() for o in loops]
    ops = [o for m in (low, *inner) for o in m.get_ops()]
    scalars = [o.data for o in ops if o.get_type_name() == "Constant" and o.shape == []]
    return np.float32(2.0**-16 - 1) in scalars


def fill(source: onnx.ModelProto) -> None:
    """Give a model those constants that its nodes read."""
    vector = RNG.uniform(1, 2, WIDTH)
    eye = np.eye(WIDTH) + 0.1
    arrays: dict[str, Any] = {
        "v": vector,
        "two": 2.0,
        "w": eye,
        "z": eye,
        "k": eye[:, :, None, None],
    }
    whole: dict[str, Any] = {"axes": [0], "all": [1 << 40], "once": 1}
    made = [tensor(name, array) for name, array in arrays.items()]
    made += [onnx.numpy_helper.from_array(np.array(a, np.int64), n) for n, a in whole.items()]
    made.append(onnx.numpy_helper.from_array(np.array(True), "on"))
    inner = [a.g for n in source.graph.node for a in n.attribute if a.HasField("g")]
    nodes = [n for g in (source.graph, *inner) for n in g.node]
    read = {name for node in nodes for name in node.input}
    source.graph.initializer.extend(t for t in made if t.name in read)
    for index, node in enumerate(nodes):
        node.name = f"{node.op_type}_{index}"


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


@pytest.mark.parametrize(
    ("body", "kernels"), [("y = MatMul(x, w)", 2), ("a = Abs(x) y = MatMul(a, w)", 1)]
)
def test_rounding_first_takes_one_kernel(body: str, kernels: int) -> None:
    """And one more where it copies, as an input of the model."""
    policy = Policy(scope=Scope.MATMULT, formats=(Format.BF16,))

    def made(policy: Policy) -> int:
        source = model(body=body)
        done = finecast.convert(source, policy=policy, engine="openvino", verify=False)
        assert done.model is not None
        return computing(done.model)

    assert made(policy) - made(replace(policy, keep_ops=True)) == kernels


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
    assert ops(done.model) == ["Abs", "Mul", "Pow", "Add", "Mul", "Cast", "Conv", "Cast"]
    assert (outputs(done.model, images) == to_nearest(np.abs(images))).all()


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
    expected = [StoredAs.GIVEN, StoredAs.BLOCKS, StoredAs.PLAIN]
    assert [stored_as(graph, value) for value in (0, 2, 3)] == expected
    assert stored_as(graph, 2, wide=True) is StoredAs.FP32_BLOCKS
    assert stored_as(graph, 3, wide=True) is StoredAs.GIVEN
