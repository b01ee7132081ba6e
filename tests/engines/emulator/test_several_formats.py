"""Plans of more than two formats, on devices that have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finecast import api
from finecast.data.function_workload import Run
from finecast.data.sources import workload_of
from finecast.devices.emulation import explicit_casts
from finecast.engines import get_engine
from finecast.engines.emulator import EmulatorEngine
from finecast.engines.loading import load_model
from finecast.frontends import onnx as frontend
from finecast.native.emulated import EmulatedSubject, OnDevice
from finecast.native.planning import make_planner
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.progress import silent
from finecast.rules.policy import Policy
from finecast.tuning.result import Result, Verdict
from tests.engines.emulator import models

SIZE, SAMPLES = 256, 256


def tuned(folder: Path, policy: str) -> Result:
    model = models.range_and_digits(folder / "m.onnx", SIZE)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((SAMPLES, SIZE)).astype(np.float32)
    lead = rng.integers(0, SIZE, SAMPLES)
    z = np.ones((SAMPLES, SIZE), np.float32)
    z[np.arange(SAMPLES), lead] += np.float32(2.0**-9)  # a step of fp16, none of bf16
    np.savez(folder / "m.npz", x=x, z=z)

    def evaluate(run: Run) -> float:
        y = run({"x": x, "z": z})["y"]
        wide, fine = y[:, :SIZE].argmax(1), y[:, SIZE:].argmax(1)
        return float(((wide == x.argmax(1)) & (fine == lead)).mean())

    data = folder / "m.npz"
    return api.tune(
        model, folder / "out.onnx", data=data, evaluate=evaluate, policy=policy, target="trn1"
    )


@pytest.mark.parametrize("policy", ["auto:bf16,fp16", "auto:fp16,bf16"])
def test_only_a_mix_keeps_range_and_digits(tmp_path: Path, policy: str) -> None:
    found = tuned(tmp_path, policy)
    assert found.verdict is Verdict.IMPROVED
    assert found.plan.policy == policy
    formats = found.plan.formats
    assert formats["scaled_node"] is Format.BF16
    assert formats["fine_node"] is Format.FP16
    assert found.tuned.metric >= 0.99
    for alone in ("auto:bf16", "auto:fp16"):
        (tmp_path / alone[5:]).mkdir(exist_ok=True)
        assert tuned(tmp_path / alone[5:], alone).tuned.latency_s > found.tuned.latency_s
    frontend.check(tmp_path / "out.onnx")


def test_a_mix_runs_as_its_casts_say(tmp_path: Path) -> None:
    found = tuned(tmp_path, "auto:bf16,fp16")
    again = tmp_path / "again.onnx"
    api.apply(found.plan, tmp_path / "m.onnx", again, engine="emulator:trn1")
    assert again.read_bytes() == (tmp_path / "out.onnx").read_bytes()


def test_a_scope_takes_the_first_format_that_an_op_may_have(tmp_path: Path) -> None:
    model = models.mlp(tmp_path / "m.onnx")
    asked = Policy.parse("all:fp8_e4m3,bf16")
    engine = EmulatorEngine(emulation=explicit_casts("sm89"))
    prepared = frontend.prepare(frontend.load(model), asked)
    formats = make_planner(prepared, asked, engine).lowest().formats
    assert formats["m_node"] is Format.FP8_E4M3
    assert formats["t_node"] is Format.BF16, "fp8 rounds operands: it is none of a transpose"


def searched(
    folder: Path, policy: str, forced: Format | None = None, **options: Any
) -> OnDevice:
    """Plans of a product whose operand goes to 300: beyond trn1's e4m3, and not ONNX's."""
    model = models.plain_product(folder / "m.onnx")
    x = np.random.default_rng(0).uniform(250, 300, (16, 4)).astype(np.float32)
    np.savez(folder / "m.npz", x=x)
    data = api.DataOptions(data=folder / "m.npz", metric="snr_db")
    emulation = replace(explicit_casts("trn1"), **options)
    asked = Policy.parse(policy)
    if forced is not None:  # the rules would not: it is too close to the largest
        asked = replace(asked, op_formats={"MatMul": forced})
    workload = workload_of(data, get_engine("onnxruntime").load(model))
    subject = api.load(model).subject(None, emulation)
    assert isinstance(subject, EmulatedSubject)
    found = subject.examine(asked, (), workload, silent)
    assert isinstance(found, OnDevice)
    return found


def evaluated(found: OnDevice, plan: Plan) -> tuple[float, Mapping[str, float]]:
    session = found.device.program.plan_session(plan, found.subject.emulation)
    return found.device.evaluate(session)


def time_s(found: OnDevice, plan: Plan) -> float:
    return found.device.plan_time_s(found.subject.emulation, plan)


@pytest.mark.parametrize("fmt", [Format.FP16, Format.BF16, Format.FP8_E4M3])
@pytest.mark.parametrize("options", [{}, {"mixed_accumulation": False}])
def test_a_plan_of_one_format_is_what_it_is_beside_others(
    tmp_path: Path, fmt: Format, options: dict[str, Any]
) -> None:
    others = [f.label for f in (Format.BF16, Format.FP8_E4M3, Format.FP16) if f is not fmt]
    alone = searched(tmp_path, f"auto:{fmt.label}", fmt, **options)
    among = searched(tmp_path, f"auto:{','.join([*others, fmt.label])}", fmt, **options)
    plan = alone.planner.lowest()
    assert fmt in plan.formats.values()
    assert among.planner.lowest(fmt).digest == plan.digest
    np.testing.assert_equal(evaluated(among, plan), evaluated(alone, plan))
    assert time_s(among, plan) == time_s(alone, plan)


def test_stored_fp8_is_that_of_the_device(tmp_path: Path) -> None:
    found = searched(tmp_path, "auto:fp8_e4m3,bf16", Format.FP8_E4M3)
    plan = found.planner.lowest(Format.FP8_E4M3)
    model = frontend.apply(frontend.load(tmp_path / "m.onnx"), plan).model
    session = load_model(EmulatorEngine(emulation=explicit_casts("trn1")), model)
    (y,) = session.run(found.device.feeds[0]).values()
    assert not np.isfinite(y).any(), "its e4m3 ends at 240"


def test_no_format_that_was_not_asked_for_fills_in(tmp_path: Path) -> None:
    model = models.mlp(tmp_path / "m.onnx")
    asked = Policy.parse("all:fp8_e4m3,bf16")
    engine = EmulatorEngine(emulation=explicit_casts("sm89"))
    planner = make_planner(frontend.prepare(frontend.load(model), asked), asked, engine)
    only = planner.lowest(Format.FP8_E4M3).formats
    assert set(only.values()) == {Format.FP8_E4M3, Format.FP32}


@pytest.mark.parametrize("policy", ["auto:bf16,fp8_e4m3", "auto:fp8_e4m3,tf32,bf16"])
def test_more_formats_are_not_slower(tmp_path: Path, policy: str) -> None:
    (tmp_path / "one").mkdir()
    assert (
        tuned(tmp_path, policy).tuned.latency_s
        <= tuned(tmp_path / "one", "auto:bf16").tuned.latency_s
    )
