"""Adjusted operands of OpenVINO's models: as those of ONNX, in the model's own notes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino
import pytest
from numpy.typing import NDArray

from finecast import api
from finecast.data.function_workload import Run
from finecast.engines.openvino import OpenVinoEngine
from finecast.native.engine_subject import EngineSubject
from finecast.planning.biases import RULE
from finecast.planning.plan import Plan
from tests.kernels import skip_without_int8
from tests.native import test_adjusting as biased

DATA = {"x": biased.X}


@pytest.fixture(scope="module", autouse=True)
def _integers() -> None:
    skip_without_int8()


@pytest.fixture
def net(tmp_path: Path) -> Path:
    given = biased.written(tmp_path / "net.onnx")
    openvino.save_model(
        openvino.convert_model(given), given.with_suffix(".xml"), compress_to_fp16=False
    )
    return given.with_suffix(".xml")


def run(path: Path) -> NDArray[np.float32]:
    (found,) = OpenVinoEngine().load(path).run(DATA).values()
    return found.astype(np.float32)


def off(path: Path, net: Path) -> float:
    exact = run(net)
    return float(np.linalg.norm(run(path) - exact) / np.linalg.norm(exact))


def test_they_gain_what_they_gain_in_onnx(net: Path) -> None:
    out, data = net.with_name("low.xml"), DATA
    wanted = api.convert(
        net.with_suffix(".onnx"),
        None,
        "all:int8+bias",
        data=data,
        engine="openvino",
    )
    done = api.convert(net, out, "all:int8+bias", data=data)
    (gain,), (other,) = done.gains, wanted.gains
    assert gain.operands == other.operands
    assert gain.error_with == pytest.approx(other.error_with, rel=0.05)
    assert gain.error_without == pytest.approx(other.error_without, rel=0.05)
    assert off(out, net) == pytest.approx(gain.error_with, rel=0.2)
    assert RULE in {r.rule for r in done.plan.reasons}


def test_a_plan_replays_to_the_same_model(net: Path) -> None:
    out, again, data = net.with_name("low.xml"), net.with_name("again.xml"), DATA
    plan = api.convert(net, out, "all:int8,bf16+bias", data=data).plan
    assert plan.adjustments
    api.apply(Plan.from_json(plan.to_json()), net, again, data=data)
    np.testing.assert_array_equal(run(again), run(out))


def test_constants_compressed_to_fp16(net: Path) -> None:
    half, out = net.with_name("half.xml"), net.with_name("low.xml")
    openvino.save_model(openvino.Core().read_model(net), half, compress_to_fp16=True)
    done = api.convert(half, out, "all:int8+bias", data=DATA)
    assert done.plan.adjustments


def test_tune_tries_them_where_a_faster_plan_misses(
    net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineSubject, "times", biased.stated_times)
    data = DATA
    (gain,) = api.convert(net, None, "all:int8+bias", data=data).gains
    exact = run(net)

    def evaluate(predict: Run) -> float:
        (got,) = (a.astype(np.float32) for a in predict(data).values())
        return 1.0 - float(np.linalg.norm(got - exact) / np.linalg.norm(exact))

    outcome = api.tune(
        net, data=data, evaluate=evaluate, calib=[data], criterion="absolute",
        tolerance=(gain.error_without + gain.error_with) / 2, policy="auto:int8",
    )  # fmt: skip
    assert outcome.improved, outcome.why
    assert outcome.gains
    assert outcome.plan.adjustments
