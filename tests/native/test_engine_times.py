"""Which engine a model is tuned for where nobody names one."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import finecast
from finecast.engines import get_engine
from finecast.measure.racing import Race
from finecast.native.engine_subject import EngineSubject
from finecast.native.engine_times import EngineTime, engine_times, faster

OWN, OTHER = "openvino:CPU", "onnxruntime:CPU"
FEEDS = {"x": np.ones((2, 8), np.float32)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    weights = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])],
        [numpy_helper.from_array(weights, "w")],
    )
    opset = helper.make_opsetid("", 17)
    onnx.save(
        helper.make_model(graph, opset_imports=[opset], ir_version=8), tmp_path / "m.onnx"
    )
    return tmp_path / "m.onnx"


def times(own_s: float, other_s: float, hinted_s: float | None = None) -> list[EngineTime]:
    own = EngineTime(engine=OWN, call_s=own_s, hinted_s=hinted_s)
    return [own, EngineTime(engine=OTHER, call_s=other_s)]


@pytest.mark.parametrize(
    ("own_s", "other_s", "hinted_s", "is_other"),
    [
        (2.0, 1.0, None, True),
        (2.0, 1.9, None, False),  # within the noise of a few rounds
        (2.0, 1.0, 0.9, False),  # the engine's hint is faster
        (2.0, 1.0, 1.5, True),
        (1.0, 2.0, None, False),
    ],
)
def test_the_engine_that_is_clearly_faster_before_a_search_is_chosen(
    own_s: float, other_s: float, hinted_s: float | None, is_other: bool
) -> None:
    chosen = faster(times(own_s, other_s, hinted_s))
    assert (chosen.engine if chosen else OWN) == (OTHER if is_other else OWN)


def test_without_another_engine_none_is_chosen() -> None:
    assert faster([]) is None
    assert faster(times(1.0, 2.0)[:1]) is None


def test_an_engine_that_was_held_up_all_the_time_is_left_out(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line said "ONNX Runtime nan ms"."""
    own, other = get_engine("openvino"), get_engine("onnxruntime")
    monkeypatch.setattr(Race, "latency_s", lambda *_: math.nan)
    timed = engine_times(own, own.load(model), [other], model, [FEEDS], hint=False)
    assert [time.engine for time in timed] == [OWN]


def test_each_engine_is_timed_and_short_calls_on_one_thread_too(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = get_engine("openvino"), get_engine("onnxruntime")
    monkeypatch.setattr(Race, "latency_s", lambda *_: 1e-4)  # the other engine is faster
    timed = engine_times(own, own.load(model), [other], model, [FEEDS], hint=True)
    assert [time.engine for time in timed] == [OWN, OTHER]
    assert all(time.one_thread_s for time in timed)
    assert timed[0].hinted_s, "where another engine is faster, the hint's time decides"
    assert timed[1].hinted_s is None


def test_an_engine_that_does_not_run_the_model_is_left_out(
    model: Path, tmp_path: Path
) -> None:
    own, other = get_engine("openvino"), get_engine("onnxruntime")
    no_model = tmp_path / "none.onnx"
    no_model.write_bytes(b"no model")
    assert not engine_times(own, own.load(model), [other], no_model, [FEEDS], hint=True)


@pytest.mark.parametrize("fails", ["load", "run"])
def test_a_plugins_engine_that_fails_is_left_out(
    model: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may raise anything, and nobody named it."""
    own, other = get_engine(OWN), get_engine(OTHER)
    session = own.load(model)

    def broken(*_: object) -> None:
        raise TypeError("a plugin's fault")

    if fails == "load":
        monkeypatch.setattr(type(other), "load", broken)
    else:
        monkeypatch.setattr(type(other.load(model)), "lend", broken)
        monkeypatch.setattr(type(other.load(model)), "run", broken)
    assert engine_times(own, session, [other], model, [FEEDS], hint=False) == []


def test_an_engine_that_fails_on_one_thread_has_its_time_on_all(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = get_engine(OWN), get_engine(OTHER)

    def broken(*_: object) -> None:
        raise TypeError("a plugin's fault")

    monkeypatch.setattr(type(other), "on_one_thread", broken)
    timed = engine_times(own, own.load(model), [other], model, [FEEDS], hint=False)
    assert [time.engine for time in timed] == [OWN, OTHER]
    assert timed[1].one_thread_s is None


def test_one_thread_counts_where_it_is_clearly_faster() -> None:
    alone = EngineTime(engine=OWN, call_s=1.0, one_thread_s=0.5)
    assert alone.gain_of_one_thread == 2.0
    assert EngineTime(engine=OWN, call_s=1.0, one_thread_s=0.98).gain_of_one_thread == 1.0
    assert alone.text == "OpenVINO 1e+03 ms (500 on one thread)"
    assert math.isclose(times(2.0, 1.0, 0.5)[0].unsearched_s, 0.5)


@pytest.mark.parametrize(
    ("engine", "policy", "runs_in"),
    [
        (None, "auto", OTHER),
        ("auto", "auto", OTHER),
        ("openvino", "auto", OWN),
        (None, "auto:bf16", OWN),  # ONNX Runtime has no bf16 on a CPU
    ],
)
def test_a_search_moves_to_the_faster_engine_unless_one_is_named(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str | None,
    policy: str,
    runs_in: str,
) -> None:
    monkeypatch.setattr(EngineSubject, "engine_times", lambda *_, **__: times(2e-3, 1e-3))
    data = {"x": np.random.default_rng(1).standard_normal((20, 8)).astype(np.float32)}
    result = finecast.tune(
        str(model), data=data, metric="snr_db", max_drop=5.0, engine=engine, policy=policy
    )
    assert result.engine == runs_in
    moved = "ONNX Runtime was chosen: in a quick comparison fp32 takes 1 ms a call there, 2 in"
    assert result.lines[0] == f"{result.verdict.value}: {result.why}"
    assert any(moved in line for line in result.lines) is (runs_in == OTHER)
    line = "a call of fp32 in a quick comparison of engines: OpenVINO 2 ms"
    told = any(line in text for text in result.lines)
    assert told is (engine != "openvino")


def test_an_engine_that_is_kept_though_another_is_a_little_faster_has_a_reason(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line named the faster one, and the search went on in the other."""
    monkeypatch.setattr(EngineSubject, "engine_times", lambda *_, **__: times(2e-3, 1.95e-3))
    data = {"x": np.random.default_rng(1).standard_normal((20, 8)).astype(np.float32)}
    result = finecast.tune(str(model), data=data, metric="snr_db", max_drop=5.0)
    assert result.engine == "openvino:CPU"
    (line,) = (text for text in result.lines if "quick comparison" in text)
    assert "OpenVINO is kept unless another is x1.1 as fast" in line
