"""Operands adjusted for int8: what changes, what comes back, and when it is tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import openvino as openvino_library
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper, parser

from finecast import api
from finecast.data.function_workload import Run
from finecast.data.workload import Workload
from finecast.engines.openvino import OpenVinoEngine
from finecast.errors import UsageError
from finecast.measure.racing import Effort, Race
from finecast.native.engine_subject import EngineSubject
from finecast.native.subject import Built
from finecast.planning.adjustments import Adjustment
from finecast.planning.plan import Plan
from finecast.rules.policy import Adjust, Policy
from tests.kernels import skip_without_int8

# Weights far from 0 in one channel alone, and values that are never below 0: rounding the
# weights of the others shifts their means.
NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 3, 12, 12] x) => (float[n, 10] y)
<int64[2] flat = {-1, 2304}> {
  [stem] a = Conv <pads = [1, 1, 1, 1]> (x, w0, b0)
  [act] r = Relu (a)
  [one] c = Conv <pads = [1, 1, 1, 1]> (r, w1, b1)
  [act1] d = Relu (c)
  [flatten] i = Reshape (d, flat)
  [head] k = MatMul (i, w2)
  [bias] y = Add (k, b2)
}"""
SHAPES = {
    "w0": (16, 3, 3, 3), "b0": (16,), "w1": (16, 16, 3, 3), "b1": (16,),
    "w2": (2304, 10), "b2": (10,),
}  # fmt: skip
BIASES = {"b0": "stem", "b1": "one", "b2": "bias"}
X = np.random.default_rng(0).uniform(0, 1, (48, 3, 12, 12)).astype(np.float32)
X[0, 0, 0, 0] = 9.0  # a range that leaves coarse steps to all other values
DATA = {"x": X}


@pytest.fixture(scope="module")
def openvino() -> OpenVinoEngine:
    skip_without_int8()
    return OpenVinoEngine()


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return written(tmp_path / "net.onnx")


def written(path: Path) -> Path:
    made = parser.parse_model(NET)
    draw = np.random.default_rng(1)
    for name, shape in SHAPES.items():
        array = draw.standard_normal(shape) / np.sqrt(max(np.prod(shape[1:]), 4))
        if name == "w2":
            array = np.abs(array) / 20
        made.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    onnx.save(made, path)
    return path


def run(path: Path) -> NDArray[np.float32]:
    return OpenVinoEngine().load(path).run(DATA)["y"].astype(np.float32)


def constants(path: Path) -> dict[str, NDArray[np.generic]]:
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def far_off(path: Path, net: Path) -> tuple[float, float]:
    """The largest mean error of an output's channel, and the relative error."""
    error = run(path) - run(net)
    relative = np.linalg.norm(error) / np.linalg.norm(run(net))
    return float(np.abs(error.mean(axis=0)).max()), float(relative)


def test_the_mean_error_comes_off(net: Path, openvino: OpenVinoEngine) -> None:
    plain, out = net.with_name("plain.onnx"), net.with_name("low.onnx")
    api.convert(net, plain, "all:int8", data=DATA, engine="openvino")
    done = api.convert(net, out, "all:int8+bias", data=DATA, engine="openvino")
    before, after = far_off(plain, net), far_off(out, net)
    assert after[0] < 0.1 * before[0]
    assert after[1] < before[1]
    (found,) = done.gains
    assert (found.kind, found.operands) == (Adjust.BIAS, len(BIASES))
    assert (found.error_without, found.error_with) == pytest.approx(
        (before[1], after[1]), rel=0.05
    )
    assert not np.array_equal(constants(out)["b0"], constants(net)["b0"])


def test_a_plan_replays_to_the_same_model(net: Path, openvino: OpenVinoEngine) -> None:
    out, again = net.with_name("low.onnx"), net.with_name("again.onnx")
    done = api.convert(net, out, "all:int8+bias", data=DATA, engine="openvino")
    plan = Plan.from_json(done.plan.to_json())
    api.apply(plan, net, again, engine="openvino", data=DATA)
    assert out.read_bytes() == again.read_bytes()


@pytest.mark.parametrize(
    ("suffix", "convolution", "bias", "rows"),
    [
        (".onnx", "{}", ("stem", 2, -1), -2),
        (".xml", "{}/WithoutBiases", ("stem", 1, -3), -1),
    ],
)
def test_channels_that_an_old_plan_scales_change_no_bit(
    net: Path, suffix: str, convolution: str, bias: tuple[str, int, int], rows: int
) -> None:
    """finecast chose such powers of two by weights and values; its plans still apply."""
    if suffix == ".xml":
        model = openvino_library.convert_model(net)
        openvino_library.save_model(model, net.with_suffix(suffix), compress_to_fp16=False)
    source, out = net.with_suffix(suffix), net.with_name(f"scaled{suffix}")
    draw = np.random.default_rng(2)

    def scaled(node: str, port: int, axis: int, exponents: NDArray[np.int64]) -> Adjustment:
        numbers = tuple(int(e) for e in exponents)
        return Adjustment(node=node, port=port, axis=axis, exponents=numbers)

    channels, values = draw.integers(-6, 7, 16), draw.integers(-6, 7, 2304)
    plain = api.convert(source, None, "none", data=DATA).plan
    plan = replace(
        plain,
        adjustments=(
            scaled(convolution.format("stem"), 1, -4, -channels),
            scaled(*bias, -channels),
            scaled(convolution.format("one"), 1, -3, channels),
            scaled("head", 0, -1, -values),
            scaled("head", 1, rows, values),
        ),
    )
    api.apply(Plan.from_json(plan.to_json()), source, out)
    assert out.read_bytes() != source.read_bytes()
    np.testing.assert_array_equal(run(out), run(source))


def test_what_has_no_bias_of_its_own_is_said(tmp_path: Path, openvino: OpenVinoEngine) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    net (float[n, 64] x) => (float[n, 8] y) { [one] y = MatMul (x, w) }"""
    made = parser.parse_model(text)
    draw = np.random.default_rng(3)
    weights = draw.standard_normal((64, 8)).astype(np.float32)
    made.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(made, tmp_path / "net.onnx")
    data = {"x": draw.standard_normal((16, 64)).astype(np.float32)}
    done = api.convert(
        tmp_path / "net.onnx", None, "all:int8+bias", data=data, engine="openvino"
    )
    assert any("adjust bias: no product" in note for note in done.warnings)
    assert done.plan.adjustments == ()


def stated_times(
    subject: EngineSubject, built: Mapping[str, Built], workload: Workload, effort: Effort
) -> Race:
    """The more ops on codes, the faster."""
    del subject, workload, effort
    codes = {n: sum(f.has_scales for f in b.plan.formats.values()) for n, b in built.items()}
    return Race.stated(1.0, {n: 1.0 / (1 + count) for n, count in codes.items()})


@pytest.mark.parametrize("corrects", [True, False])
def test_tune_tries_it_where_a_faster_plan_misses(
    net: Path, openvino: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch, corrects: bool
) -> None:
    """The error allowed lies between that of all in int8 without a correction and with it."""
    monkeypatch.setattr(EngineSubject, "times", stated_times)
    done = api.convert(net, None, "all:int8+bias", data=DATA, engine="openvino")
    (gain,) = done.gains
    allowed = (gain.error_without + gain.error_with) / 2
    exact = run(net)

    def evaluate(predict: Run) -> float:
        got = predict(DATA)["y"].astype(np.float32)
        return 1.0 - float(np.linalg.norm(got - exact) / np.linalg.norm(exact))

    outcome = api.tune(
        net,
        data=DATA,
        evaluate=evaluate,
        calib=[DATA],
        criterion="absolute",
        tolerance=allowed,
        policy=replace(Policy.parse("auto:int8"), adjust=None if corrects else ()),
        engine="openvino",
    )
    if corrects:
        assert outcome.improved, outcome.why
        assert outcome.gains
        assert any(gain.gains for gain in outcome.gains)
        assert outcome.plan.adjustments
        assert not all(t.passed for t in outcome.trials)
    else:
        assert outcome.gains == ()


def test_a_device_that_is_not_here_refuses_it_in_tune(net: Path) -> None:
    with pytest.raises(
        UsageError, match="in models of ONNX and OpenVINO alone, as engines run them"
    ):
        api.tune(
            net,
            data=DATA,
            evaluate=lambda run: float(sum(y.sum() for y in run(DATA).values())),
            policy="auto:int8+bias",
            target="inf1",
        )
