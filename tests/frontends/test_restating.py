"""Low ops stated as OpenVINO knows them: in place, and for the same numbers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import finecast
from finecast.engines import get_engine
from finecast.frontends.onnx.opset import raise_opset
from finecast.planning.plan import Plan
from finecast.rules.policy import Policy
from tests.frontends.tools import parse, tensor

ROWS, WIDTH = 8, 16
RNG = np.random.default_rng(0)


def weights(**shapes: tuple[int, ...]) -> list[onnx.TensorProto]:
    return [tensor(n, RNG.standard_normal(s) / 4) for n, s in shapes.items()]


def pattern(body: str, *constants: onnx.TensorProto, opset: int = 23) -> onnx.ModelProto:
    """``body`` between two products: from c to y."""
    text = f"g (float[{ROWS}, {WIDTH}] x) => (float[{ROWS}, {WIDTH}] z) {{"
    proto = parse(f"{text} c = MatMul(x, w) {body} z = MatMul(y, v) }}", opset=opset)
    proto.graph.initializer.extend([*weights(w=(WIDTH, WIDTH), v=(WIDTH, WIDTH)), *constants])
    for node in proto.graph.node:
        node.name = f"make_{node.output[0]}"
    return proto


ONE, ZERO, SCALE = tensor("one", 1), tensor("zero", 0), tensor("scale", 1.702)
NORM = (
    tensor("axes", [-1], np.int64),
    tensor("two", 2),
    tensor("epsilon", 1e-5),
    tensor("gain", RNG.uniform(0.5, 1.5, WIDTH)),
)
ROOT = """q = Pow(c, two) m = ReduceMean(q, axes)
  e = Add(m, epsilon) r = Sqrt(e)"""
PATTERNS = {
    "swish": pattern("d = Mul(c, one) s = Sigmoid(d) y = Mul(c, s)", ONE),
    "scaled swish": pattern("d = Mul(scale, c) s = Sigmoid(d) y = Mul(c, s)", SCALE),
    "nothing": pattern(
        "a = Add(zero, c) b = Div(a, one) d = Sub(b, zero) y = Relu(d)", ONE, ZERO
    ),
    "inverse": pattern(f"{ROOT} i = Reciprocal(r) d = Mul(c, i) y = Mul(gain, d)", *NORM),
    "one over": pattern(f"{ROOT} i = Div(one, r) d = Mul(i, c) y = Mul(d, gain)", *NORM, ONE),
    "layer norm": pattern("y = LayerNormalization(c, gain)", *NORM),
    "rms norm": pattern("y = RMSNormalization(c, gain)", *NORM),
    "hard swish": pattern(
        "s = HardSigmoid<alpha = 0.16666667, beta = 0.5>(c) y = Mul(s, c)", opset=22
    ),
}
EXPECTED = {
    "swish": {"make_d": "Identity"},
    "scaled swish": {"make_d": "Identity", "make_s": "Identity", "make_y": "Swish"},
    "nothing": {"make_a": "Identity", "make_b": "Identity", "make_d": "Identity"},
    "inverse": {"make_i": "Identity", "make_d": "Div"},
    "one over": {"make_i": "Identity", "make_d": "Div"},
    "layer norm": {"make_y": "LayerNormalization"},
    "rms norm": {"make_y": "RMSNormalization"},
    "hard swish": {"make_s": "Identity", "make_y": "HardSwish"},
}


def ops(proto: onnx.ModelProto) -> dict[str, str]:
    return {n.name: n.op_type for n in proto.graph.node if n.op_type != "Cast"}


def converted(
    proto: onnx.ModelProto, *, keep_ops: bool = False, low: str = "bf16"
) -> onnx.ModelProto:
    policy = Policy.parse(f"all:{low}")
    if keep_ops:
        policy = Policy(scope=policy.scope, formats=policy.formats, keep_ops=True)
    done = finecast.convert(proto, policy=policy, engine="openvino", verify=False)
    assert done.model is not None
    onnx.checker.check_model(done.model, full_check=True)
    return done.model


def openvino_outputs(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = get_engine("openvino").load(proto.SerializeToString())
    return session.run({"x": x})["z"]


@pytest.mark.parametrize("name", PATTERNS)
def test_each_op_stays_in_its_place(name: str) -> None:
    proto, changed = PATTERNS[name], EXPECTED[name]
    assert ops(converted(proto)) == ops(proto) | changed
    assert ops(converted(proto, keep_ops=True)) == ops(proto)
    assert ops(converted(proto, low="fp16")) == ops(proto)


@pytest.mark.parametrize("name", PATTERNS)
def test_the_numbers_are_the_same(name: str) -> None:
    """As near to fp32 as the ops that were kept: within one rounding of each op in line."""
    proto = PATTERNS[name]
    x = RNG.standard_normal((ROWS, WIDTH)).astype(np.float32)
    wanted = openvino_outputs(proto, x)

    def error(model: onnx.ModelProto) -> float:
        return float(np.linalg.norm(openvino_outputs(model, x) - wanted))

    roundoff = 2.0**-8 * float(np.linalg.norm(wanted))
    assert error(converted(proto)) <= error(converted(proto, keep_ops=True)) + roundoff


@pytest.mark.parametrize("name", PATTERNS)
def test_openvino_runs_no_more_kernels_than_under_its_hint(name: str, tmp_path: Path) -> None:
    import openvino

    def kernels(proto: onnx.ModelProto, hint: str) -> int:
        path = tmp_path / "model.onnx"
        onnx.save(proto, path)
        settings = {"INFERENCE_PRECISION_HINT": hint}
        runtime = openvino.compile_model(path, "CPU", settings).get_runtime_model()
        kinds = Counter(
            str(op.get_rt_info()["layerType"].astype(str)) for op in runtime.get_ordered_ops()
        )
        uncounted = ("Reorder", "Const", "Input", "Output", "Transpose", "Reshape")
        return sum(n for kind, n in kinds.items() if kind not in uncounted)

    casts = 2  # of the model's input and of its output
    assert kernels(converted(PATTERNS[name]), "f32") <= kernels(PATTERNS[name], "bf16") + casts


def test_a_plan_says_that_ops_are_kept() -> None:
    policy = Policy(scope=Policy.parse("all:bf16").scope, keep_ops=True)
    done = finecast.convert(PATTERNS["swish"], policy=policy, verify=False)
    assert done.plan.keep_ops
    read = Plan.from_json(done.plan.to_json())
    assert read == done.plan
    assert (
        read.digest
        != Plan.from_json(
            finecast.convert(PATTERNS["swish"], policy="all:bf16", verify=False).plan.to_json()
        ).digest
    )


def batch_norm(*, convolution: bool) -> onnx.ModelProto:
    before = "c = Conv(x, w, b)" if convolution else "c = Identity(x)"
    proto = parse(
        f"""g (float[2, 4, 5, 5] x) => (float[2, 4, 5, 5] z) {{
          {before}
          n = BatchNormalization(c, g, h, m, v)
          z = Relu(n)
        }}""",
        opset=22,
    )
    proto.graph.initializer.extend(
        [
            *(weights(w=(4, 4, 1, 1), b=(4,)) if convolution else ()),
            *weights(g=(4,), h=(4,), m=(4,)),
            tensor("v", RNG.uniform(0.5, 2, 4)),
        ]
    )
    return proto


@pytest.mark.parametrize("convolution", [True, False])
def test_constants_that_meet_are_rounded_once(convolution: bool) -> None:
    proto = batch_norm(convolution=convolution)
    given = {
        t.name: numpy_helper.to_array(t).astype(np.float64) for t in proto.graph.initializer
    }
    scale = given["g"] / np.sqrt(given["v"] + 1e-5)
    shift = given["h"] - given["m"] * scale
    low = converted(proto)
    found = {t.name: t for t in low.graph.initializer}
    node = next(n for n in low.graph.node if n.op_type == "BatchNormalization")
    scales, shifts, means, variances = (
        numpy_helper.to_array(found[name]).astype(np.float64) for name in node.input[1:]
    )
    assert not means.any()
    assert (variances == 1).all()
    half = 2.0**-8  # half of bf16's last place, relative
    if convolution:
        conv = next(n for n in low.graph.node if n.op_type == "Conv")
        kernel = numpy_helper.to_array(found[conv.input[1]]).astype(np.float64)
        assert np.allclose(kernel, given["w"] * scale[:, None, None, None], rtol=half, atol=0)
        assert (scales == 1).all()
        assert not numpy_helper.to_array(found[conv.input[2]]).astype(np.float32).any()
        shift = shift + given["b"] * scale
    else:
        assert np.allclose(scales, scale, rtol=half, atol=0)
    assert np.allclose(shifts, shift, rtol=half, atol=0)


def test_softmax_over_the_last_axis_is_raised_whole() -> None:
    import onnx_ir as ir

    proto = parse(
        """g (float[n, 3, 4] x) => (float[n, a, b] y, float[n, a, b] z, float[n, a, b] w) {
          r = Reshape(x, size)
          t = Transpose<perm = [0, 2, 1]>(r)
          y = Softmax<axis = 2>(t)
          z = Softmax<axis = -1>(t)
          w = Softmax<axis = 1>(t)
        }""",
        opset=11,
    )
    proto.graph.initializer.append(tensor("size", [0, 3, -1], np.int64))
    for node in proto.graph.node:
        node.name = f"make_{node.output[0]}"
    before = ir.from_proto(proto)
    raised = ir.to_proto(raise_opset(before, 22))
    onnx.checker.check_model(raised, full_check=True)
    assert [n.op_type for n in raised.graph.node].count("Flatten") == 1  # of w alone
    kept = {n.name: n for n in raised.graph.node}
    assert list(kept["make_y"].input) == ["t"]
    after = [(n.op_type, n.domain) for n in ir.to_proto(before).graph.node]
    assert after == [(n.op_type, n.domain) for n in proto.graph.node]
    feeds = {"x": RNG.standard_normal((2, 3, 4)).astype(np.float32)}
    engine = get_engine("onnxruntime")
    old = engine.load(proto.SerializeToString()).run(feeds)
    new = engine.load(raised.SerializeToString()).run(feeds)
    assert all(np.array_equal(new[name], old[name]) for name in old)


@pytest.mark.parametrize("read", [True, False])
def test_statistics_that_are_read_keep_their_type(read: bool) -> None:
    """They have the type that a norm computes them in: a stated one must not contradict it."""
    outputs = f"float[{ROWS}, {WIDTH}] y, float[{ROWS}, 1] d" if read else "float[] y"
    proto = parse(
        f"g (float[{ROWS}, {WIDTH}] x) => ({outputs}) <float[{ROWS}, 1] m>"
        "{ c = Relu(x) y, m, d = LayerNormalization(c, gain) }"
    )
    proto.graph.initializer.extend(NORM[3:])
    low = converted(proto)
    norm = next(n for n in low.graph.node if n.op_type == "LayerNormalization")
    stash = [a.i for a in norm.attribute if a.name == "stash_type"]
    assert stash == ([] if read else [onnx.TensorProto.BFLOAT16])


@pytest.mark.parametrize("name", ["swish", "scaled swish", "nothing", "one over"])
def test_numbers_that_only_rewritten_ops_read_are_removed(name: str) -> None:
    proto = PATTERNS[name]

    def dead(model: onnx.ModelProto) -> set[str]:
        read = {name for node in model.graph.node for name in node.input}
        return {t.name for t in model.graph.initializer} - read

    assert dead(converted(proto)) <= dead(proto)
