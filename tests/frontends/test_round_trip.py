"""8-bit formats are stated around operands: one pair of casts for all that read a value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import parser

from finecast.engines.emulator import EmulatorEngine
from finecast.formats import Format
from finecast.frontends import onnx as frontend
from finecast.neuron import explicit_casts
from finecast.plan import Plan
from finecast.policy import Policy
from finecast.rounding import round_to
from finecast.tuner.analysis import make_planner

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


def converted(text: str, folder: Path, policy: str) -> tuple[onnx.ModelProto, Plan]:
    path = folder / "model.onnx"
    onnx.save(parser.parse_model(text), path)
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


@pytest.mark.parametrize("fmt", [Format.FP8_E4M3, Format.FP8_E5M2], ids=lambda f: f.label)
def test_one_pair_serves_all_readers(tmp_path: Path, fmt: Format) -> None:
    model, plan = converted(SHARED, tmp_path, f"matmult:{fmt.label}")
    assert {d.node for d in plan.decisions if d.format is fmt} == {"one", "two"}
    casts = [n for n in model.graph.node if n.op_type == "Cast"]
    assert len(casts) == 3  # the shared operand there and back, the weight back
    relu = np.maximum(X, 0)
    product = round_to(relu, fmt) @ round_to(W, fmt)
    y, z = run(model, x=X)
    # Other readers see the value as it is.
    np.testing.assert_allclose(y, product + relu, rtol=1e-6)
    np.testing.assert_allclose(z, product - relu, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("condition", [True, False])
def test_operands_from_outside_of_a_branch(tmp_path: Path, condition: bool) -> None:
    fmt = Format.FP8_E4M3
    model, _ = converted(BRANCH, tmp_path, f"matmult:{fmt.label}")
    assert sum(n.op_type == "Cast" for n in model.graph.node) == 3
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


def test_another_policy_starts_from_the_original(tmp_path: Path) -> None:
    converted(SHARED, tmp_path, "matmult:fp8_e4m3")
    file = frontend.load(tmp_path / "low.onnx")
    asked = Policy.parse("all:bf16")
    prepared = frontend.prepare(file, asked)
    engine = EmulatorEngine(emulation=explicit_casts("trn1"))
    plan = make_planner(prepared, asked, engine).lowest()
    frontend.save(frontend.apply(file, plan).model, tmp_path / "other.onnx")
    frontend.check(tmp_path / "other.onnx")
    activations = {
        n.name for n in onnx.load(tmp_path / "other.onnx").graph.node if n.op_type == "Cast"
    }
    assert not any("fp8" in name and "r_" in name for name in activations)
