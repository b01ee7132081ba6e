"""Models in fp64, fp16 or bf16 are fp32 models once they are taken to fp32."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, checker, numpy_helper

from finecast import api
from finecast.engines.loading import exact_session
from finecast.errors import EngineError, UsageError, WrongNumbersError
from finecast.frontends import onnx as frontend
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.rules.policy import Policy
from tests.frontends.tools import bf16_convolution, parse, tensor
from tests.kernels import skip_without_int8

TYPES = {"fp64": "double", "fp16": "float16", "bf16": "bfloat16"}
PROTO = {
    "fp64": TensorProto.DOUBLE,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
}

NET = """net (TYPE[N,8] x, int64[M] k) => (TYPE[N,8] y, TYPE[N,8] s)
  <TYPE[8,8] w, int64 axis = {1}> {
  [product] m = MatMul(x, w)
  [soft] s = Softmax(m)
  [again] y = Tanh(s)
}"""
LOOPED = """net (TYPE[4] x, bool c) => (TYPE[4] y) {
  [choice] h = If (c) <
    then_branch = yes () => (TYPE[4] a) { [exp] a = Exp(x) },
    else_branch = no () => (TYPE[4] b) { [give] b = Identity(x) }
  >
  [last] y = Mul(h, h)
}"""


def net(text: str, label: str, **weights: np.ndarray) -> onnx.ModelProto:
    model = parse(text.replace("TYPE", TYPES[label]), opset=20, ir_version=10)
    del model.graph.initializer[:]
    for name, array in weights.items():
        cast = onnx.helper.make_tensor(name, PROTO[label], array.shape, array.reshape(-1))
        model.graph.initializer.append(cast)
    return model


def dense(label: str) -> onnx.ModelProto:
    weights = np.random.default_rng(0).normal(size=(8, 8)) / 4
    return net(
        NET.replace(", int64[M] k", "").replace(", int64 axis = {1}", ""), label, w=weights
    )


def taken(model: onnx.ModelProto, label: str) -> onnx.ModelProto:
    found = frontend.to_proto(frontend.take_to_fp32(frontend.from_model(model), label).model)
    checker.check_model(found, full_check=True)
    return found


def kinds(model: onnx.ModelProto) -> Counter[str]:
    return Counter(n.op_type for n in model.graph.node)


def run(model: onnx.ModelProto, **feeds: Any) -> list[Any]:
    return list(ort.InferenceSession(model.SerializeToString()).run(None, feeds))


@pytest.mark.parametrize("label", TYPES)
def test_ports_keep_their_types_and_all_else_is_fp32(label: str) -> None:
    source = dense(label)
    found = taken(source, label)
    assert [v.type for v in found.graph.input] == [v.type for v in source.graph.input]
    for before, after in zip(source.graph.output, found.graph.output, strict=True):
        assert before.name == after.name
        assert before.type.tensor_type.elem_type == after.type.tensor_type.elem_type
    assert [t.data_type for t in found.graph.initializer] == [TensorProto.FLOAT]
    assert kinds(found) == {"Cast": 3, "MatMul": 1, "Softmax": 1, "Tanh": 1}


def test_numbers_are_those_of_the_fp64_model() -> None:
    source = dense("fp64")
    x = np.random.default_rng(1).normal(size=(3, 8))
    for one, other in zip(run(taken(source, "fp64"), x=x), run(source, x=x), strict=True):
        assert one.dtype == np.float64
        np.testing.assert_allclose(one, other, rtol=16 * Format.FP32.epsilon)


@pytest.mark.parametrize("branch", [True, False])
def test_bodies_compute_in_fp32_too(branch: bool) -> None:
    source = net(LOOPED, "fp64")
    found = taken(source, "fp64")
    x = np.array([0.5, -1.0, 2.0, 0.0])
    (got,), (wanted,) = (run(m, x=x, c=np.array(branch)) for m in (found, source))
    np.testing.assert_allclose(got, wanted, rtol=4 * Format.FP32.epsilon)
    bodies = [a.g for n in found.graph.node for a in n.attribute if a.HasField("g")]
    outputs = {v.type.tensor_type.elem_type for body in bodies for v in body.output}
    assert outputs == {TensorProto.FLOAT}


def test_the_models_own_casts_go() -> None:
    text = """net (float[4] x) => (float[4] y, double[4] z) {
      [wide] d = Cast<to=11>(x)
      [exp] e = Exp(d)
      [narrow] y = Cast<to=1>(e)
      [out] z = Cast<to=11>(y)
    }"""
    source = parse(text, opset=20, ir_version=10)
    found = taken(source, "fp64")
    assert kinds(found) == {"Exp": 1, "Cast": 1}
    x = np.array([1, 2, 3, 4], np.float32)
    got, wanted = run(found, x=x), run(source, x=x)
    np.testing.assert_allclose(got[0], wanted[0], rtol=4 * Format.FP32.epsilon)
    assert got[1].dtype == np.float64


def test_casts_of_an_input_to_integers_lose_nothing() -> None:
    text = """net (double[1] x) => (int64[1] n, double[1] y) {
      [index] n = Cast<to=7>(x)
      [exp] y = Exp(x)
    }"""
    found = taken(parse(text, opset=20, ir_version=10), "fp64")
    assert run(found, x=np.array([2.0**31 + 1]))[0] == 2**31 + 1


def test_ops_that_are_not_known_keep_their_type() -> None:
    text = """net (double[4] x) => (double[4] y) {
      [before] a = Exp(x)
      [own] b = com.acme.Own(a)
      [after] y = Exp(b)
    }"""
    model = parse(text, opset=20, ir_version=10, imports='"com.acme" : 1')
    model.graph.value_info.append(
        onnx.helper.make_tensor_value_info("b", TensorProto.DOUBLE, [4])
    )
    found = frontend.to_proto(frontend.take_to_fp32(frontend.from_model(model), "fp64").model)
    ops = [n.op_type for n in found.graph.node]
    assert ops == ["Cast", "Exp", "Cast", "Own", "Cast", "Exp", "Cast"]
    to = [a.i for n in found.graph.node if n.op_type == "Cast" for a in n.attribute]
    assert to == [1, TensorProto.DOUBLE, 1, TensorProto.DOUBLE]


def test_attributes_and_types_of_constants_follow() -> None:
    text = """net (double[2] x, int64[1] n) => (double[K] y) {
      [filled] f = ConstantOfShape<value = double[1] {0.5}>(n)
      [one] c = Constant<value = double[1] {2.0}>()
      [noise] r = EyeLike<dtype = 11>(e)
      [sum] g = ReduceSum<keepdims = 0>(r)
      [join] j = Concat<axis = 0>(f, c, x)
      [scale] y = Mul(j, g)
    }"""
    model = parse(text, opset=17)
    model.graph.initializer.append(numpy_helper.from_array(np.eye(2, dtype=np.int64), "e"))
    found = taken(model, "fp64")
    feeds = {"x": np.array([1.0, 2.0]), "n": np.array([1])}
    np.testing.assert_equal(run(found, **feeds), run(model, **feeds))
    inner = {t.t.data_type for n in found.graph.node for t in n.attribute if t.HasField("t")}
    assert inner == {TensorProto.FLOAT}


def test_masks_beyond_fp32_stay_finite_and_are_told() -> None:
    text = """net (TYPE[4] x) => (TYPE[4] y) <TYPE mask, TYPE tiny> {
      [masked] m = Add(x, mask)
      [more] y = Add(m, tiny)
    }"""
    source = net(text, "fp64", mask=np.array(np.finfo(np.float64).min), tiny=np.array(1e-300))
    file = frontend.take_to_fp32(frontend.from_model(source), "fp64")
    weights = {
        t.name: numpy_helper.to_array(t)
        for t in frontend.to_proto(file.model).graph.initializer
    }
    assert weights["mask"] == np.finfo(np.float32).min
    assert weights["tiny"] == 0
    assert ["'mask' reaches" in file.told[0], "'tiny' is at most" in file.told[1]] == [
        True
    ] * 2


@pytest.mark.parametrize("label", TYPES)
def test_what_matches_nothing_is_an_error(label: str) -> None:
    other = "fp16" if label == "fp64" else "fp64"
    with pytest.raises(UsageError, match=f"no op of the model computes in {other}"):
        frontend.take_to_fp32(frontend.from_model(dense(label)), other)
    with pytest.raises(UsageError, match="fp65"):
        frontend.take_to_fp32(frontend.from_model(dense(label)), "fp65")


@pytest.mark.parametrize("label", TYPES)
def test_the_result_is_an_fp32_model_for_good(label: str) -> None:
    """Its only ops of the type are casts, and casts do not count."""
    with pytest.raises(UsageError, match="no op"):
        frontend.take_to_fp32(frontend.from_model(taken(dense(label), label)), label)


@pytest.mark.parametrize(
    ("label", "to"), [("fp64", "bf16"), ("fp16", "bf16"), ("bf16", "fp16")]
)
def test_a_plan_replays_on_the_file_that_was_given(
    label: str, to: str, tmp_path: Path
) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(dense(label), path)
    done = api.convert(path, policy=f"all:{to}", from_type=label)
    assert done.plan.counts[to] >= 3
    assert done.plan.from_type == label
    read = Plan.from_json(done.plan.to_json())
    assert (read.from_type, read.digest) == (label, done.plan.digest)
    again = api.apply(read, path)
    assert again.model == done.model
    assert done.model is not None
    checker.check_model(done.model, full_check=True)
    # One cast at each port: none between the source type and the low one by way of fp32, but
    # where a value is rounded in fp32 before its cast.
    kept = api.convert(
        path, policy=replace(Policy.parse(f"all:{to}"), keep_ops=True), from_type=label
    )
    assert kept.model is not None
    assert kinds(kept.model)["Cast"] <= 3


def test_a_plan_of_the_model_as_it_is_is_another_plan() -> None:
    model = dense("fp16")
    plain = api.convert(model, policy="none:bf16").plan
    done = api.convert(model, policy="none:bf16", from_type="fp16").plan
    assert plain.digest != done.digest
    assert plain.model == done.model


def test_errors_are_against_the_fp64_model() -> None:
    done = api.convert(dense("fp64"), policy="all:bf16", from_type="fp64").verified
    assert done.reference == "fp64"
    assert done.taken_error is not None
    assert done.relative_error is not None
    assert 0 < done.taken_error < 16 * Format.FP32.epsilon < done.relative_error


def test_rounding_of_an_fp16_model_is_no_error() -> None:
    """The reference computes in fp32: the same weights, none of the model's own rounding."""
    done = api.convert(dense("fp16"), policy="none:bf16", from_type="fp16").verified
    assert done.reference == "fp32"
    assert done.relative_error == 0


def test_a_model_that_needs_fp64_is_refused() -> None:
    text = """net (TYPE[4] x) => (TYPE[4] y) <TYPE shift> {
      [up] u = Add(x, shift)
      [down] d = Sub(u, shift)
      [after] y = Mul(d, d)
    }"""
    model = net(text, "fp64", shift=np.array(1e9))
    with pytest.raises(WrongNumbersError, match="taken to fp32") as refused:
        api.convert(model, policy="none:bf16", from_type="fp64", engine="onnxruntime")
    assert "--from-type fp64" in refused.value.line


def test_tuning_keeps_the_accuracy_of_the_fp64_model(tmp_path: Path) -> None:
    """Tolerance 0 of what fp32 alone changes: the fp64 model is the one that is held to."""
    x = np.random.default_rng(2).normal(size=(16, 8))
    with pytest.raises(WrongNumbersError, match="misses the criterion by itself"):
        api.tune(
            dense("fp64"),
            data={"x": x},
            metric="max_abs",
            criterion="absolute",
            tolerance=1e-12,
            from_type="fp64",
            policy="auto:bf16",
        )
    for target in (None, "trn1"):
        kept = api.tune(dense("fp64"), data={"x": x}, tolerance=0.5, target=target).warnings
        assert any("3 ops compute in fp64 and keep it: from_type" in text for text in kept)
        outcome = api.tune(
            dense("fp64"),
            data={"x": x},
            metric="max_abs",
            criterion="absolute",
            tolerance=0.5,
            from_type="fp64",
            policy="auto:bf16",
            target=target,
        )
        assert outcome.plan.from_type == "fp64"
        assert outcome.baseline.metric == 0


def test_ends_in_fp64_that_engines_do_not_take_are_emulated(tmp_path: Path) -> None:
    """OpenVINO has no kernel of a Softmax that ends in fp64, ONNX Runtime none in bf16."""
    text = """net (TYPE[4,64] x) => (TYPE[4,64] y) <TYPE[64,64] v, TYPE[64,64] w> {
      [first] a = MatMul(x, v)
      [bend] b = Relu(a)
      [second] c = MatMul(b, w)
      [soft] y = Softmax(c)
    }"""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(64, 64)) / 8 for name in ("v", "w")}
    onnx.save(net(text, "fp64", **weights), tmp_path / "m.onnx")
    done = api.convert(tmp_path / "m.onnx", tmp_path / "o.onnx", "all:bf16", from_type="fp64")
    assert done.verified.engine is not None
    assert done.verified.relative_error is not None
    assert 1e-5 < done.verified.relative_error < 0.05


def test_a_model_that_the_observing_engine_cannot_run_is_to_be_taken_to_fp32() -> None:
    """ONNX Runtime has no convolution in bf16."""
    skip_without_int8()
    data = {"x": np.ones((1, 1, 4, 4), np.float32)}
    with pytest.raises(EngineError, match="product") as caught:
        api.convert(bf16_convolution(), policy="all:int8", data=data)
    assert caught.value.fix == "take the model to fp32 first: --from-type bf16"


def test_a_model_that_fp32_does_not_make_loadable_gets_no_such_advice() -> None:
    """ONNX Runtime has no MatMulNBits of 3 bits, whatever type the rest is in."""
    text = """net (float16[N,64] x) => (float16[N,32] y) {
      m = com.microsoft.MatMulNBits <K: int = 64, N: int = 32, bits: int = 3,
          block_size: int = 32> (x, w, s)
      y = Relu(m)
    }"""
    model = parse(text, imports='"com.microsoft": 1')
    model.graph.initializer.append(tensor("w", np.zeros((32, 2, 12)), np.uint8))
    model.graph.initializer.append(tensor("s", np.ones((32, 2)), np.float16))
    with pytest.raises(EngineError, match="cannot load") as caught:
        exact_session(ir.from_proto(model))
    assert "--from-type" not in caught.value.fix
    assert (
        "--engine" not in caught.value.fix
    )  # values are computed in ONNX Runtime in any case
    assert "check_model" in caught.value.fix


@pytest.mark.parametrize("label", ["fp16", "fp64"])
@pytest.mark.parametrize(
    ("target", "formats"), [(None, "bf16,int8_weights"), ("trn1", "bf16")]
)
def test_a_model_taken_to_fp32_is_tuned_on_data_of_its_own_types(
    label: str, target: str | None, formats: str
) -> None:
    x = np.random.default_rng(1).normal(size=(8, 8)).astype(f"float{label[2:]}")
    outcome = api.tune(
        dense(label), None, data={"x": x}, metric="cosine",
        of="y", tolerance=0.5, batch=8, objective="size", policy=f"auto:{formats}",
        from_type=label, target=target,
    )  # fmt: skip
    assert outcome.plan is not None
