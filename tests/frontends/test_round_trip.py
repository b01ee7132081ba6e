"""8-bit formats and tf32 are stated around operands: one rounding for all readers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import numpy_helper, parser

from finecast.devices.emulation import explicit_casts
from finecast.engines import get_engine
from finecast.engines.emulator import EmulatorEngine
from finecast.errors import ModelError
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx.constants import ConvertedTensor
from finecast.native.planning import make_planner
from finecast.numbers.formats import Format
from finecast.numbers.rounding import round_to
from finecast.planning.plan import Plan
from finecast.rules.policy import Policy

SHARED = """<ir_version: 8, opset_import: ["" : 17]>
shared (float[n, 2] x) => (float[n, 2] y, float[n, 2] z)
<float[2, 2] w = {1.1, 0.3, -0.7, 2}> {
  [flat] r = Relu(x)
  [one] a = MatMul(r, w)
  [two] b = MatMul(r, w)
  [plus] y = Add(a, r)
  [less] z = Sub(b, r)
}"""
BRANCH = """<ir_version: 8, opset_import: ["" : 17]>
branch (float[n, 2] x, bool c) => (float[n, 2] y) <float[2, 2] w = {1.1, 0.3, -0.7, 2}> {
  [choose] y = If (c) <
    then_branch = left () => (float[n, 2] p) { [inner] p = MatMul(x, w) },
    else_branch = right () => (float[n, 2] q) { [other] q = MatMul(x, w) }
  >
}"""
W = np.array([[1.1, 0.3], [-0.7, 2]], np.float32)
X = np.random.default_rng(0).standard_normal((5, 2)).astype(np.float32)


AROUND = [Format.FP8_E4M3, Format.FP8_E5M2, Format.TF32]


def converted(
    text: str | onnx.ModelProto, folder: Path, policy: str
) -> tuple[onnx.ModelProto, Plan]:
    path = folder / "model.onnx"
    onnx.save(parser.parse_model(text) if isinstance(text, str) else text, path)
    file = frontend.load(path)
    asked = Policy.parse(policy)
    engine = EmulatorEngine(emulation=explicit_casts("sm89"))
    plan = make_planner(frontend.prepare(file, asked), asked, engine).lowest()
    frontend.save(frontend.apply(file, plan).model, folder / "low.onnx")
    frontend.check(folder / "low.onnx")
    return onnx.load(folder / "low.onnx"), plan


def run(model: onnx.ModelProto, **feeds: NDArray[np.generic]) -> list[NDArray[np.float32]]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return [np.asarray(a, np.float32) for a in session.run(None, feeds)]


def made(model: onnx.ModelProto) -> list[str]:
    """Types of the nodes that conversion put in, bodies included."""
    nodes = list(model.graph.node)
    nodes += [n for m in model.graph.node for a in m.attribute for n in a.g.node]
    marks = [{p.key: p.value for p in n.metadata_props} for n in nodes]
    return [
        n.op_type for n, m in zip(nodes, marks, strict=True) if m.get("finecast.was") == ""
    ]


# What rounds one value; an 8-bit weight takes a cast back besides.
ARITHMETIC = ["Clip", "Mul", "Sub", "Sub", "Sub", "Sub"]


def roundings(fmt: Format) -> list[str]:
    return ARITHMETIC if fmt is Format.TF32 else ["Cast", "Cast", "Cast"]


@pytest.mark.parametrize("fmt", AROUND, ids=lambda f: f.label)
def test_one_rounding_serves_all_readers(tmp_path: Path, fmt: Format) -> None:
    model, plan = converted(SHARED, tmp_path, f"matmult:{fmt.label}")
    assert {d.node for d in plan.decisions if d.format is fmt} == {"one", "two"}
    assert sorted(made(model)) == sorted(roundings(fmt))
    relu = np.maximum(X, 0)
    product = round_to(relu, fmt) @ round_to(W, fmt)
    y, z = run(model, x=X)
    # Other readers see the value as it is.
    np.testing.assert_allclose(y, product + relu, rtol=1e-6)
    np.testing.assert_allclose(z, product - relu, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fmt", [Format.FP8_E4M3, Format.TF32], ids=lambda f: f.label)
@pytest.mark.parametrize("condition", [True, False])
def test_operands_from_outside_of_a_branch(
    tmp_path: Path, condition: bool, fmt: Format
) -> None:
    model, _ = converted(BRANCH, tmp_path, f"matmult:{fmt.label}")
    assert sorted(made(model)) == sorted(roundings(fmt))
    (y,) = run(model, x=X, c=np.array(condition))
    np.testing.assert_allclose(y, round_to(X, fmt) @ round_to(W, fmt), rtol=1e-6)


def test_weights_rest_in_the_format(tmp_path: Path) -> None:
    model, _ = converted(SHARED, tmp_path, "matmult:fp8_e4m3")
    assert [t.data_type for t in model.graph.initializer] == [onnx.TensorProto.FLOAT8E4M3FN]


def test_ops_that_only_move_numbers_stay(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    moved (float[n, 2] x) => (float[2, n] y) <float[2, 2] w = {1, 2, 3, 4}> {
      [product] m = MatMul(x, w)
      [turn] y = Transpose <perm = [1, 0]> (m)
    }"""
    _, plan = converted(text, tmp_path, "all:fp8_e4m3")
    assert plan.formats == {"product": Format.FP8_E4M3, "turn": Format.FP32}


def test_operands_made_in_a_branch_are_rounded_there(tmp_path: Path) -> None:
    text = BRANCH.replace("p = MatMul(x, w)", "r = Relu(x) [m] p = MatMul(r, w)")
    model, _ = converted(text, tmp_path, "matmult:tf32")
    branch = next(a.g for a in model.graph.node[-1].attribute if a.name == "then_branch")
    assert [n.op_type for n in branch.node] == ["Relu", *ARITHMETIC, "MatMul"]
    (y,) = run(model, x=X, c=np.array(True))
    expected = round_to(np.maximum(X, 0), Format.TF32) @ round_to(W, Format.TF32)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


# One product of one number each: nothing is summed.
SINGLE = """<ir_version: 8, opset_import: ["" : 17]>
single (float[n, 1] x) => (float[n, 1] y) <float[1, 1] w = {1.0009}> {
  [one] y = MatMul(x, w)
}"""
EDGES = np.array(
    [
        *(0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 2.0**-126, -3.0 * 2.0**-126),
        *(2.0**101, -(2.0**100) * 1.9, 2.0**104, np.finfo(np.float32).max),
        *(1 + 2.0**-11, 1 + 3 * 2.0**-11, -(1 + 5 * 2.0**-11), 2 - 2.0**-12),  # ties
    ],
    np.float32,
)
# Beyond this the arithmetic leaves a number as it is.
LIMIT = 2.0**104


def rounded(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(np.abs(x) > LIMIT, x, round_to(x, Format.TF32))


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> onnx.ModelProto:
    """The converted model of one product, which shows its rounded operand."""
    model, _ = converted(SINGLE, tmp_path_factory.mktemp("single"), "matmult:tf32")
    operand = next(n.input[0] for n in model.graph.node if n.op_type == "MatMul")
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(operand))
    return model


def test_arithmetic_rounds_to_tf32_bit_for_bit(single: onnx.ModelProto) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32)
    near_tie = (bits & ~np.uint32(0x1FFF)) | np.uint32(0x1000)
    x = np.concatenate([EDGES, bits.view(np.float32), near_tie.view(np.float32)])
    subnormal = (np.abs(x) < 2.0**-126) & (x != 0)
    normal = x[~subnormal]
    _, operand = run(single, x=normal[:, None])
    expected = rounded(normal)
    assert np.array_equal(operand[:, 0], expected, equal_nan=True)
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.signbit(operand[numbers, 0]), np.signbit(expected[numbers]))
    # Subnormals of fp32 keep more digits than tf32 has there: off by half its step at most.
    _, operand = run(single, x=x[subnormal][:, None])
    step = Format.TF32.smallest_subnormal
    wide = x[subnormal].astype(np.float64)
    assert subnormal.sum() > 500
    assert np.abs(operand[:, 0] - wide).max() <= step / 2


def test_openvino_keeps_the_arithmetic(single: onnx.ModelProto) -> None:
    """Its sums are its own; where there are none it gives the same bits."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((20_000, 1)) * 2.0 ** rng.integers(-60, 60, (20_000, 1))
    x = x.astype(np.float32)
    plain = onnx.ModelProto()
    plain.CopyFrom(single)
    del plain.graph.output[1:]  # nothing hinders fusion
    got = get_engine("openvino").load(plain.SerializeToString()).run({"x": x})["y"]
    w = np.array([[1.0009]], np.float32)
    assert np.array_equal(got, round_to(x, Format.TF32) @ round_to(w, Format.TF32))
    assert not np.array_equal(got, x @ w)


@given(st.lists(st.floats(width=32, allow_subnormal=False), min_size=1, max_size=40))
def test_a_product_is_that_of_rounded_numbers(
    single: onnx.ModelProto, numbers: list[float]
) -> None:
    x = np.array(numbers, np.float32)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = rounded(x) @ round_to(np.array([[1.0009]], np.float32), Format.TF32)
    y, _ = run(single, x=x)
    normal = ~(np.abs(expected) < 2.0**-126)  # ONNX Runtime may flush the others
    assert np.array_equal(y[normal], expected[normal], equal_nan=True)


def test_constants_are_rounded_ahead_of_time(tmp_path: Path) -> None:
    lowest = float(np.finfo(np.float32).min)
    w = np.array([[lowest, 1 + 2.0**-11, 2.0**-149 * 0x1800, np.inf, 2.0**120 * 1.0007] * 4])
    source = parser.parse_model(SINGLE.replace("y) <float[1, 1] w = {1.0009}>", "y)"))
    source.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 20
    source.graph.initializer.append(numpy_helper.from_array(w.astype(np.float32), "w"))
    model, _ = converted(source, tmp_path, "matmult:tf32")
    stored = {t.name: t for t in model.graph.initializer}
    (name,) = [n.input[1] for n in model.graph.node if n.op_type == "MatMul"]
    assert "w" not in stored
    assert stored[name].data_type == onnx.TensorProto.FLOAT
    expected = round_to(w.astype(np.float32), Format.TF32)
    expected[0, ::5] = -Format.TF32.max  # not -Inf
    assert np.array_equal(numpy_helper.to_array(stored[name]), expected)


def test_constants_in_other_files_are_rounded_in_pieces(tmp_path: Path) -> None:
    w = np.random.default_rng(3).standard_normal((1, 5000)).astype(np.float32)
    tensor = ConvertedTensor(ir.tensor(w, name="w"), Format.TF32, "low")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("finecast.frontends.onnx.constants.PIECE", 999)
        pieces = [bytes(p) for p in tensor.pieces()]
    assert len(pieces) == 6
    expected = round_to(w, Format.TF32)
    assert b"".join(pieces) == expected.tobytes() == tensor.tobytes()


def test_a_constant_of_other_readers_is_kept_beside(tmp_path: Path) -> None:
    text = SHARED.replace("MatMul(r, w)", "Add(r, r)", 1).replace("Sub(b, r)", "MatMul(b, b2)")
    text = text.replace("2}> {", "2}> {\n  [turn] b2 = Softmax(w)")
    model, plan = converted(text, tmp_path, "matmult:tf32")
    assert sum(f is Format.TF32 for f in plan.formats.values()) == 2
    weights = [t for t in model.graph.initializer if list(t.dims) == [2, 2]]
    assert {t.name for t in weights} == {"w", "w_tf32"}
    assert np.array_equal(numpy_helper.to_array(weights[0]), W)


@pytest.mark.parametrize("fmt", [Format.FP8_E4M3, Format.TF32], ids=lambda f: f.label)
def test_a_default_that_a_caller_may_replace_is_an_operand(
    tmp_path: Path, fmt: Format
) -> None:
    """From IR 4 on an initializer that is listed as an input is a default, not a constant."""
    model = parser.parse_model(SINGLE)
    model.graph.input.append(onnx.helper.make_tensor_value_info("w", 1, [1, 1]))
    low, _ = converted(model, tmp_path, f"matmult:{fmt.label}")
    assert [i.name for i in low.graph.input] == ["x", "w"]
    x, w = np.array([[1.0009]], np.float32), np.array([[3.0009]], np.float32)
    (y,) = run(low, x=x, w=w)
    assert y == round_to(x, fmt) * round_to(w, fmt)


@pytest.mark.parametrize("fmt", [Format.FP8_E4M3, Format.TF32], ids=lambda f: f.label)
def test_old_models_are_raised_as_far_as_rounding_needs(tmp_path: Path, fmt: Format) -> None:
    text = SINGLE.replace("ir_version: 8", "ir_version: 3").replace(": 17]", ": 7]")
    source = parser.parse_model(text)
    source.graph.input.append(onnx.helper.make_tensor_value_info("w", 1, [1, 1]))
    model, _ = converted(source, tmp_path, f"matmult:{fmt.label}")
    assert model.opset_import[0].version == (11 if fmt is Format.TF32 else 19)
    assert [i.name for i in model.graph.input] == ["x"]  # the weight is still a constant
    x = np.array([[1.0009], [-3.3]], np.float32)
    w = np.array([[1.0009]], np.float32)
    (y,) = run(model, x=x)
    assert np.array_equal(y, round_to(x, fmt) * round_to(w, fmt))


@pytest.mark.parametrize("fmt", [Format.FP8_E4M3, Format.TF32], ids=lambda f: f.label)
def test_a_model_that_cannot_be_raised_is_refused(tmp_path: Path, fmt: Format) -> None:
    """Onnx has no conversion of the first opset's Split."""
    text = """<ir_version: 8, opset_import: ["" : 1]>
    old (float[2, 2] x) => (float[1, 2] p, float[1, 2] q) <float[2, 2] w = {1, 2, 3, 4}> {
      [one] m = MatMul(x, w)
      [two] p, q = Split <axis = 0, split = [1, 1]> (m)
    }"""
    opset = 11 if fmt is Format.TF32 else 19
    with pytest.raises(ModelError, match=f"cannot be raised to {opset}, which the format"):
        converted(text, tmp_path, f"matmult:{fmt.label}")


def test_before_ir_4_every_initializer_is_an_input(tmp_path: Path) -> None:
    text = SINGLE.replace("ir_version: 8", "ir_version: 3").replace(": 17]", ": 11]")
    source = parser.parse_model(text)
    source.graph.input.append(onnx.helper.make_tensor_value_info("w", 1, [1, 1]))
    model, _ = converted(source, tmp_path, "matmult:tf32")
    assert model.ir_version == 3
    assert {t.name for t in model.graph.initializer} < {i.name for i in model.graph.input}


@pytest.mark.parametrize("fmt", [Format.FP8_E4M3, Format.TF32], ids=lambda f: f.label)
def test_another_domains_op_needs_the_opset_too(tmp_path: Path, fmt: Format) -> None:
    text = SINGLE.replace('"" : 17', '"" : 9, "com.microsoft" : 1')
    text = text.replace("MatMul", "com.microsoft.FusedMatMul")
    model, plan = converted(text, tmp_path, f"matmult:{fmt.label}")
    assert plan.formats == {"one": fmt}
    versions = {o.domain: o.version for o in model.opset_import}
    assert versions[""] == (11 if fmt is Format.TF32 else 19)
    run(model, x=X[:, :1])
