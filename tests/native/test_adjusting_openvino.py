"""Adjusted operands of OpenVINO's models: as those of ONNX, in the model's own notes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino
import pytest
from numpy.typing import NDArray

from finecast import api
from finecast.data.workload import Run
from finecast.engines.openvino import OpenVinoEngine
from finecast.frontends import openvino as frontend
from finecast.native.engine_subject import EngineSubject
from finecast.planning.plan import Plan
from tests.kernels import skip_without_int8
from tests.native import test_adjusting as biased
from tests.native import test_rescaled_channels as rescaled

DATA = {**rescaled.DATA, "bias": biased.X}
ADJUST = {"convolutions": "smooth", "norms": "smooth", "bias": "bias"}
NAME = {"smooth": "smoothing", "bias": "bias correction"}


@pytest.fixture(scope="module", autouse=True)
def _integers() -> None:
    skip_without_int8()


@pytest.fixture(params=["convolutions", "norms", "bias"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def net(tmp_path: Path, kind: str) -> Path:
    given = tmp_path / "net.onnx"
    _ = biased.written(given) if kind == "bias" else rescaled.written(given, kind)
    openvino.save_model(
        openvino.convert_model(given), given.with_suffix(".xml"), compress_to_fp16=False
    )
    return given.with_suffix(".xml")


def run(path: Path, kind: str) -> NDArray[np.float32]:
    (found,) = OpenVinoEngine().load(path).run({"x": DATA[kind]}).values()
    return found.astype(np.float32)


def off(path: Path, net: Path, kind: str) -> float:
    exact = run(net, kind)
    return float(np.linalg.norm(run(path, kind) - exact) / np.linalg.norm(exact))


def floats(path: Path) -> list[NDArray[np.float32]]:
    ops = openvino.Core().read_model(path).get_ops()
    arrays = (op.data for op in ops if op.get_type_name() == "Constant")
    return [a for a in arrays if a.dtype == np.float32]


def weights(path: Path) -> dict[str, NDArray[np.float32]]:
    """Those of products, by their names."""
    kinds = ("Convolution", "GroupConvolution", "MatMul")
    ops = (
        op for op in openvino.Core().read_model(path).get_ops() if op.get_type_name() in kinds
    )
    return {op.get_friendly_name(): op.input_value(1).get_node().data for op in ops}


def test_they_gain_what_they_gain_in_onnx(net: Path, kind: str) -> None:
    out, data = net.with_name("low.xml"), {"x": DATA[kind]}
    wanted = api.convert(
        net.with_suffix(".onnx"),
        None,
        f"all:int8+{ADJUST[kind]}",
        data=data,
        engine="openvino",
    )
    done = api.convert(net, out, f"all:int8+{ADJUST[kind]}", data=data)
    (gain,), (other,) = done.gains, wanted.gains
    assert gain.operands == other.operands
    assert gain.error_with == pytest.approx(other.error_with, rel=0.05)
    assert gain.error_without == pytest.approx(other.error_without, rel=0.05)
    assert off(out, net, kind) == pytest.approx(gain.error_with, rel=0.2)
    assert NAME[ADJUST[kind]] in {r.rule for r in done.plan.reasons}


def test_in_fp32_no_bit_changes_but_by_biases(net: Path, kind: str) -> None:
    """All ops of the adjusted plan in fp32 again: its operands alone are left."""
    plan = api.convert(net, None, f"all:int8+{ADJUST[kind]}", data={"x": DATA[kind]}).plan
    assert plan.adjustments
    file = frontend.load(net)
    bare = Plan(
        model=plan.model, policy=plan.policy, opset=plan.opset, decisions=(),
        adjustments=plan.adjustments,
    )  # fmt: skip
    openvino.save_model(
        frontend.apply(file, bare).model, net.with_name("bare.xml"), compress_to_fp16=False
    )
    same = np.array_equal(run(net.with_name("bare.xml"), kind), run(net, kind))
    assert same == (kind != "bias")


def test_a_plan_replays_to_the_same_model(net: Path, kind: str) -> None:
    out, again, data = net.with_name("low.xml"), net.with_name("again.xml"), {"x": DATA[kind]}
    plan = api.convert(net, out, f"all:int8,bf16+{ADJUST[kind]}", data=data).plan
    assert plan.adjustments
    api.apply(Plan.from_json(plan.to_json()), net, again, data=data)
    np.testing.assert_array_equal(run(again, kind), run(out, kind))


def test_constants_compressed_to_fp16(net: Path, kind: str) -> None:
    half, out = net.with_name("half.xml"), net.with_name("low.xml")
    openvino.save_model(openvino.Core().read_model(net), half, compress_to_fp16=True)
    done = api.convert(half, out, f"all:int8+{ADJUST[kind]}", data={"x": DATA[kind]})
    assert done.plan.adjustments


def test_weights_alone_have_no_channels_to_rescale(net: Path, kind: str) -> None:
    if kind == "bias":
        pytest.skip("that is another adjustment")
    done = api.convert(net, None, f"all:int8_weights+{ADJUST[kind]}", data={"x": DATA[kind]})
    assert not done.plan.adjustments
    assert any("no product in int8 has an operand" in note for note in done.warnings)


@pytest.mark.parametrize("kind", ["bias"])
def test_tune_tries_them_where_a_faster_plan_misses(
    net: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineSubject, "times", biased.stated_times)
    data = {"x": DATA[kind]}
    (gain,) = api.convert(net, None, f"all:int8+{ADJUST[kind]}", data=data).gains
    exact = run(net, kind)

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
