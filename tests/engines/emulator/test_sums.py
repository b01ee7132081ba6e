"""Subnormals that an engine takes as zero, and sums kept in less than fp32, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from msgspec import structs
from numpy.typing import NDArray
from onnx import parser

from finecast.devices.emulation import Emulation, Setting, explicit_casts
from finecast.devices.targets import EngineRole, Target, load_target
from finecast.engines.emulator import EmulatorEngine, prepare, setting_of
from finecast.frontends import onnx as frontend
from finecast.native.planning import make_planner
from finecast.numbers.formats import Format
from finecast.numbers.rounding import round_to
from finecast.numbers.roundmodes import Rounder, convert
from finecast.rules.policy import Policy, Scope

Floats = NDArray[np.float32]

PRODUCT = """<ir_version: 8, opset_import: ["" : 17]>
product (float[N, K] x) => (float[N, 1] y) <float[K, 1] w = {ONES}> { y = MatMul(x, w) }"""
PAIRS = """<ir_version: 8, opset_import: ["" : 17]>
pairs (float[N, 1, 2] x, float[N, 2, 1] w) => (float[N, 1, 1] y) { y = MatMul(x, w) }"""


def flushing(fmt: Format) -> Target:
    """trn2, but its products take subnormals of ``fmt`` as zero."""
    target = load_target("trn2")
    matmul = target.engine(EngineRole.MATMUL)
    engine = structs.replace(matmul, flushes_subnormals=frozenset({fmt}))
    return replace(target, engines={**target.engines, EngineRole.MATMUL: engine})


def run(model: Path, how: Emulation, *, fixed: bool, **feeds: Floats) -> Floats:
    prepared = prepare(frontend.load(model), how)
    setting = setting_of(prepared.graph, how)
    engine = EmulatorEngine(emulation=how)
    if fixed:
        session = engine.session(prepared, fixed=setting)
    else:
        session = engine.session(prepared).apply(setting)
    return np.asarray(session.run(feeds)["y"], dtype=np.float32).reshape(-1)


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """y = 1 * x."""
    path = tmp_path / "one.onnx"
    text = PRODUCT.replace("ONES", "1").replace("K", "1")
    onnx.save(parser.parse_model(text), path)
    return path


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """y = x . w, two terms each."""
    path = tmp_path / "pairs.onnx"
    onnx.save(parser.parse_model(PAIRS), path)
    return path


def numbers(fmt: Format) -> Floats:
    """Around the smallest normal number, both signs, and zeros."""
    rng = np.random.default_rng(0)
    near = fmt.smallest_normal * np.exp2(rng.uniform(-12, 4, 4000))
    edges = fmt.smallest_normal * np.array([1, 1 - fmt.epsilon, 1 - fmt.epsilon / 4, 0])
    found = np.concatenate([near, edges])
    return np.concatenate([found, -found]).astype(np.float32)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("fmt", [Format.FP16, Format.FP8_E5M2, Format.FP8_E3M4])
def test_subnormal_operands_are_zero(one: Path, fmt: Format, fixed: bool) -> None:
    x = numbers(fmt)
    how = Emulation(target=flushing(fmt), scope=Scope.MATMULT, format=fmt)
    expected = convert(x, Rounder(format=fmt, flush_subnormals=True))
    assert np.array_equal(run(one, how, fixed=fixed, x=x[:, None]), expected)
    kept = replace(how, target=load_target("trn2"))
    assert np.array_equal(
        run(one, kept, fixed=fixed, x=x[:, None]), convert(x, Rounder(format=fmt))
    )
    assert np.any(expected != convert(x, Rounder(format=fmt)))


@pytest.mark.parametrize("fixed", [False, True])
def test_subnormal_sums_are_zero(pairs: Path, fixed: bool) -> None:
    powers = np.arange(-80.0, -40.0)
    x = np.zeros((len(powers), 1, 2), np.float32)
    x[:, 0, 0] = np.exp2(powers)
    w = np.full((len(powers), 2, 1), 2.0**-60, np.float32)
    how = Emulation(target=load_target("avx512-bf16"), scope=Scope.MATMULT)
    exact = (x.astype(np.float64) @ w.astype(np.float64)).reshape(-1)
    expected = np.where(exact < Format.FP32.smallest_normal, 0, exact).astype(np.float32)
    assert np.any(expected == 0)
    assert np.any(expected != 0)
    assert np.array_equal(run(pairs, how, fixed=fixed, x=x, w=w), expected)


def test_fp32_is_not_flushed_where_only_bf16_is(one: Path) -> None:
    x = np.float32(2.0) ** np.arange(-140, -120, dtype=np.float32)
    how = Emulation(target=load_target("avx512-bf16"), scope=Scope.NONE)
    assert np.array_equal(run(one, how, fixed=True, x=x[:, None]), x)
    prepared = prepare(frontend.load(one), how)
    switched = EmulatorEngine(emulation=how).session(prepared).apply(Setting())
    assert np.array_equal(np.asarray(switched.run({"x": x[:, None]})["y"]).reshape(-1), x)


@pytest.mark.parametrize("fixed", [False, True])
def test_sums_in_fp16_are_fp16_numbers(pairs: Path, fixed: bool) -> None:
    x = np.array([[2048, 1], [60000, 60000], [1, 0.5]], np.float32)[:, None]
    w = np.ones((3, 2, 1), np.float32)
    how = Emulation(target=load_target("neoverse-v1"), scope=Scope.MATMULT, format=Format.FP16)
    assert run(pairs, how, fixed=fixed, x=x, w=w).tolist() == [2048, np.inf, 1.5]
    wide = replace(how, target=load_target("trn1"))
    assert run(pairs, wide, fixed=fixed, x=x, w=w).tolist() == [2049, 119998 + 2, 1.5]


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A product with a weight so large that it is fed."""
    rng = np.random.default_rng(4)
    w = rng.standard_normal((64, 128)).astype(np.float32)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        "wide",
        [onnx.helper.make_tensor_value_info("x", 1, ["n", 64])],
        [onnx.helper.make_tensor_value_info("y", 1, ["n", 128])],
        [onnx.numpy_helper.from_array(w, "w")],
    )
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "w")
    return tmp_path / "w"


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(
    ("scope", "fmt", "real"),
    [
        (Scope.NONE, Format.FP16, Format.BF16),
        (Scope.MATMULT, Format.FP16, Format.FP16),
        (Scope.MATMULT, Format.BF16, Format.BF16),
    ],
)
def test_a_cast_takes_the_place_of_what_the_engine_does_itself(
    wide: Path, scope: Scope, fmt: Format, real: Format, fixed: bool
) -> None:
    # inf1 has no fp32 product: uncast it runs in bf16, cast to fp16 in fp16, never in both.
    x = np.random.default_rng(5).standard_normal((8, 64)).astype(np.float32)
    w = onnx.numpy_helper.to_array(onnx.load(wide).graph.initializer[0])
    how = Emulation(target=load_target("inf1"), scope=scope, format=fmt)
    expected = round_to(x, real) @ round_to(w, real)
    got = run(wide, how, fixed=fixed, x=x).reshape(8, 128)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_a_product_that_the_model_states_in_fp16_runs_in_fp16(
    wide: Path, tmp_path: Path
) -> None:
    file = frontend.load(wide)
    policy = Policy.parse("all:fp16")
    engine = EmulatorEngine(emulation=explicit_casts("inf1"))
    plan = make_planner(frontend.prepare(file, policy), policy, engine).lowest()
    frontend.save(frontend.apply(file, plan).model, tmp_path / "low.onnx")
    x = np.random.default_rng(5).standard_normal((8, 64)).astype(np.float32)
    w = onnx.numpy_helper.to_array(onnx.load(wide).graph.initializer[0])
    product = round_to(x, Format.FP16) @ round_to(w, Format.FP16)
    got = np.asarray(engine.load(tmp_path / "low.onnx").run({"x": x})["y"], np.float32)
    # The sums' order may tell them apart by one step of fp16, where they are stored.
    np.testing.assert_allclose(got, product, rtol=2 * Format.FP16.epsilon, atol=1e-4)
    assert np.mean(got == round_to(product, Format.FP16)) > 0.99


def test_a_product_that_the_model_states_in_bf16_flushes(pairs: Path, tmp_path: Path) -> None:
    file = frontend.load(pairs)
    policy = Policy.parse("all:bf16")
    engine = EmulatorEngine(emulation=explicit_casts("avx512-bf16"))
    plan = make_planner(frontend.prepare(file, policy), policy, engine).lowest()
    frontend.save(frontend.apply(file, plan).model, tmp_path / "low.onnx")
    x = np.array([[2.0**-70, 0], [2.0**-130, 0], [2.0**-60, 0]], np.float32)[:, None]
    w = np.array([[2.0**-60, 0], [2.0**20, 0], [2.0**-60, 0]], np.float32)[..., None]
    got = engine.load(tmp_path / "low.onnx").run({"x": x, "w": w})["y"]
    assert np.asarray(got).reshape(-1).tolist() == [0, 0, 2.0**-120]
