"""The emulator against the same rounding written out in numpy, and its laws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from finecast.devices.emulation import (
    Emulation,
    Setting,
    device_kernels,
    setting_of,
    setting_of_plan,
)
from finecast.devices.targets import load_target
from finecast.engines import get_engine
from finecast.engines.base import Session
from finecast.engines.emulator import EmulatorEngine, EmulatorSession, prepare
from finecast.frontends import onnx as frontend
from finecast.native.planning import make_planner
from finecast.numbers.formats import FLOATS, Format
from finecast.numbers.rounding import round_to
from finecast.numbers.roundmodes import Rounding
from finecast.rules.policy import Policy, Scope
from tests.engines.emulator import models

Floats = NDArray[np.float32]


def y(session: Session, x: Floats) -> Floats:
    """The output called y."""
    return np.asarray(session.run({"x": x})["y"], dtype=np.float32)


X = np.random.default_rng(5).standard_normal((6, 16)).astype(np.float32)


def emulation(target: str = "trn1", scope: str = "all", fmt: str = "bf16") -> Emulation:
    return Emulation(
        target=load_target(target), scope=Scope.parse(scope), format=Format.parse(fmt)
    )


def sessions(path: Path, how: Emulation) -> tuple[EmulatorSession, EmulatorSession, Setting]:
    prepared = prepare(frontend.load(path), how)
    engine = EmulatorEngine(emulation=how)
    setting = setting_of(prepared.graph, how)
    return engine.session(prepared), engine.session(prepared, fixed=setting), setting


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    return models.mlp(tmp_path / "mlp.onnx")


def test_scope_none_changes_nothing(mlp: Path) -> None:
    exact = y(get_engine("onnxruntime").load(mlp), X)
    switched, fixed, _ = sessions(mlp, emulation(scope="none"))
    assert np.array_equal(y(fixed, X), exact)
    np.testing.assert_allclose(y(switched.apply(Setting()), X), exact, rtol=1e-5)


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "tf32", "fp8_e4m3"])
def test_models_older_than_what_rounds(tmp_path: Path, fmt: str) -> None:
    w = np.random.default_rng(2).standard_normal((16, 8)).astype(np.float32)
    made = [
        models.save(
            tmp_path / f"{opset}.onnx",
            [models.node("MatMul", "x w", "y")],
            {"x": ["n", 16]},
            {"y": ["n", 8]},
            {"w": w},
            opset=opset,
        )
        for opset in (7, 17)
    ]
    old, new = (sessions(path, emulation(scope="matmult", fmt=fmt)) for path in made)
    assert np.array_equal(y(old[1], X), y(new[1], X))
    assert np.array_equal(y(old[0].apply(old[2]), X), y(new[0].apply(new[2]), X))


@pytest.mark.parametrize("scope", ["matmult", "all"])
@pytest.mark.parametrize("fmt", ["bf16", "fp16", "tf32", "fp8_e4m3", "fp8_e5m2"])
def test_the_switch_gives_what_a_fixed_session_gives(mlp: Path, scope: str, fmt: str) -> None:
    switched, fixed, setting = sessions(mlp, emulation(scope=scope, fmt=fmt))
    got, expected = (y(s, X) for s in (switched, fixed))
    # The two are optimised differently, so single values may round to the other side.
    np.testing.assert_allclose(got, expected, atol=Format.parse(fmt).unit_roundoff)
    again = y(switched.apply(Setting()).apply(setting), X)
    assert np.array_equal(again, got)


@pytest.mark.parametrize(
    "fmt", [f for f in FLOATS if f is not Format.FP32], ids=lambda f: f.label
)
def test_products_round_operands_and_sum_in_fp32(tmp_path: Path, fmt: Format) -> None:
    rng = np.random.default_rng(2)
    w = rng.standard_normal((16, 8)).astype(np.float32)
    path = models.save(
        tmp_path / "m.onnx",
        [models.node("MatMul", "x w", "y")],
        {"x": ["n", 16]},
        {"y": ["n", 8]},
        {"w": w},
    )
    target = "trn1" if fmt is not Format.FP8_E4M3 else "sm90"
    how = emulation(target, "matmult", fmt.label)
    expected = round_to(X, fmt).astype(np.float64) @ round_to(w, fmt).astype(np.float64)
    _, fixed, _ = sessions(path, how)
    got = y(fixed, X)
    # fp32 sums of 16 terms (Higham: n u) of magnitudes that add up to at most |x| |w|
    bound = 16 * Format.FP32.unit_roundoff * (np.abs(X) @ np.abs(w)).max()
    np.testing.assert_allclose(got, expected, atol=float(bound))
    _, stored, _ = sessions(path, replace(how, scope=Scope.ALL))
    low = y(stored, X)
    assert np.array_equal(round_to(low, fmt), low)
    bound += fmt.smallest_subnormal / 2  # below the normal range a step is fixed
    np.testing.assert_allclose(low, expected, rtol=fmt.unit_roundoff * 1.01, atol=float(bound))


def test_inf1_has_no_fp32_product(tmp_path: Path) -> None:
    path = models.plain_product(tmp_path / "m.onnx")
    _, fixed, _ = sessions(path, emulation("inf1", "none"))
    x = X[:, :4]
    assert np.array_equal(y(fixed, x), round_to(x, Format.BF16))


def test_nothing_rounds_inside_a_kernel(mlp: Path) -> None:
    prepared = prepare(frontend.load(mlp), emulation())
    graph = prepared.graph
    kernels = [{graph.nodes[i].name for i in k} for k in device_kernels(graph, emulation())]
    assert {"m_node", "a_node"} in kernels
    assert {"d_node", "e_node", "p_node", "q_node", "gelu_node"} in kernels


def test_a_plan_casts_the_nodes_it_names(mlp: Path) -> None:
    how = emulation(scope="none")
    prepared = prepare(frontend.load(mlp), how)
    session = EmulatorEngine(emulation=how).session(prepared)
    exact = y(session.apply(Setting()), X)
    last = prepared.graph.find("y_node")
    plan = setting_of_plan({n.id: Format.FP32 for n in prepared.graph.float_nodes}, how)
    assert np.array_equal(y(session.apply(plan), X), exact)
    plan = setting_of_plan({last.id: Format.BF16}, how)
    got = y(session.apply(plan), X)
    assert np.array_equal(round_to(got, Format.BF16), got)
    np.testing.assert_allclose(got, exact, rtol=0.05, atol=0.01)


def test_stochastic_rounding_does_not_depend_on_the_batches(mlp: Path) -> None:
    how = replace(emulation(), rounding=Rounding.STOCHASTIC, seed=4)
    _, session, setting = sessions(mlp, how)
    whole = y(session.apply(setting), X)
    session.apply(setting)
    parts = [y(session, X[:2]), y(session, X[2:])]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=Format.BF16.epsilon / 8)
    _, other, setting = sessions(mlp, replace(how, seed=5))
    assert not np.array_equal(y(other.apply(setting), X), whole)


def test_accumulation_in_steps_costs_accuracy(tmp_path: Path) -> None:
    path = models.save(
        tmp_path / "m.onnx",
        [models.node("Softmax", "x", "y", axis=-1)],
        {"x": ["n", 256]},
        {"y": ["n", 256]},
        {},
    )
    # Inputs that bf16 has, so that only the steps inside and the result round.
    x = round_to(
        np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32), Format.BF16
    )
    exact = y(get_engine("onnxruntime").load(path), x)
    errors: list[float] = []
    for mixed in (True, False):
        _, fixed, _ = sessions(path, replace(emulation(), mixed_accumulation=mixed))
        errors.append(float(np.linalg.norm(y(fixed, x) / exact - 1)) / exact.size**0.5)
    assert errors[0] <= Format.BF16.unit_roundoff
    assert errors[1] > 1.5 * errors[0]


def test_steps_written_out_compute_the_same(mlp: Path) -> None:
    exact = y(get_engine("onnxruntime").load(mlp), X)
    for how in (
        replace(emulation(scope="none"), mixed_accumulation=False),
        replace(emulation(scope="none"), rounds_normalized=True),
    ):
        _, fixed, _ = sessions(mlp, how)
        np.testing.assert_allclose(y(fixed, X), exact, rtol=1e-5, atol=1e-6)


def test_saturating_fp8(tmp_path: Path) -> None:
    path = models.plain_product(tmp_path / "m.onnx")
    x = np.full((1, 4), 1e4, np.float32)
    _, clamped, _ = sessions(path, emulation("sm90", "matmult", "fp8_e4m3"))
    assert y(clamped, x).tolist() == [[448.0] * 4]
    _, spilled, _ = sessions(path, emulation("trn1", "matmult", "fp8_e4m3"))
    assert not np.isfinite(y(spilled, x)).any()


def test_capabilities_and_names() -> None:
    engine = EmulatorEngine(emulation=emulation("sm80"))
    assert (engine.name, engine.device) == ("emulator", "sm80")
    capabilities = engine.capabilities()
    assert capabilities[Format.BF16].speed == pytest.approx(16)
    assert not capabilities[Format.FP8_E4M3].runs


def test_a_model_with_low_types_of_its_own(mlp: Path, tmp_path: Path) -> None:
    how = emulation(scope="none")
    engine = EmulatorEngine(emulation=how)
    file = frontend.load(mlp)
    policy = Policy(scope=Scope.ALL, formats=(Format.BF16,))
    planner = make_planner(frontend.prepare(file, policy), policy, engine)
    applied = frontend.apply(file, planner.lowest())
    frontend.save(applied.model, tmp_path / "low.onnx")
    stated = y(engine.load(tmp_path / "low.onnx"), X)
    prepared = prepare(file, how)
    ids = {n.name: n.id for n in prepared.graph.nodes}
    formats = {ids[n]: f for n, f in planner.lowest().formats.items()}
    session = engine.session(prepared, kernels=[], fixed=setting_of_plan(formats, how))
    # The plan through the emulator, and the model that the plan gives, are one.
    np.testing.assert_allclose(y(session, X), stated, atol=2 * Format.BF16.unit_roundoff)
    assert np.array_equal(round_to(stated, Format.BF16), stated)
