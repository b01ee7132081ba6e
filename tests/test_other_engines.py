"""A look at a tuned file in the engines that it was not made in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import finecast
from finecast.api.other_engines import in_other_engines
from finecast.measure.racing import Interval, Race
from finecast.plugin import title_of
from finecast.tuning.result import InOtherEngine

FEEDS = {"x": np.ones((2, 4), np.float32)}


def saved(path: Path, op: str, domain: str = "") -> Path:
    """A model of one op."""
    node = helper.make_node(op, ["x"], ["y"], domain=domain)
    made = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 4]) for n in "xy"]
    graph = helper.make_graph([node], "g", made[:1], made[1:])
    opsets = [helper.make_opsetid(d, 17 if not d else 1) for d in dict.fromkeys(("", domain))]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.save(model, path)
    return path


def test_both_files_are_timed_in_the_other_engine(tmp_path: Path) -> None:
    files = saved(tmp_path / "a.onnx", "Relu"), saved(tmp_path / "b.onnx", "Tanh")
    for made_in, other in (("openvino:CPU", "onnxruntime"), ("onnxruntime", "openvino")):
        (found,) = in_other_engines(*files, made_in, FEEDS)
        assert found.engine.startswith(other)
        assert found.speed is not None
        assert found.speed.median > 0


def test_a_file_that_does_not_run_there_is_told(tmp_path: Path) -> None:
    files = saved(tmp_path / "a.onnx", "Relu"), saved(tmp_path / "b.onnx", "Nothing", "other")
    (found,) = in_other_engines(*files, "openvino", FEEDS)
    assert found.speed is None
    assert found.text.startswith("in ONNX Runtime this file does not run: ")
    assert found.to_dict()["why"]


def test_nothing_is_told_where_fp32_does_not_run(tmp_path: Path) -> None:
    files = saved(tmp_path / "a.onnx", "Nothing", "other"), saved(tmp_path / "b.onnx", "Relu")
    assert not [*in_other_engines(*files, "openvino", FEEDS)]
    assert not [*in_other_engines(tmp_path / "none.onnx", files[1], "openvino", FEEDS)]


@pytest.mark.parametrize(("median", "told"), [(0.5, True), (1.5, False)])
def test_a_slower_file_is_told_by_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, median: float, told: bool
) -> None:
    speed = Interval(low=median - 0.1, median=median, high=median + 0.1)
    monkeypatch.setattr(Race, "speed", lambda *_: speed)
    files = saved(tmp_path / "a.onnx", "Relu"), saved(tmp_path / "b.onnx", "Tanh")
    found = finecast.blame(*files, data=FEEDS, max_error=9.0, progress=False)
    slower = [
        text
        for text in found.warnings
        if "in OpenVINO this file is slower than fp32 is there" in text
    ]
    assert bool(slower) is told


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [(0.5, 0.9, "slower than"), (0.9, 1.1, "about as fast as"), (1.1, 1.3, "faster than")],
)
def test_the_whole_interval_decides_what_is_said(low: float, high: float, told: str) -> None:
    speed = Interval(low=low, median=(low + high) / 2, high=high)
    assert told in InOtherEngine(engine="onnxruntime:CPU", speed=speed).text


def test_engines_have_names_that_people_know() -> None:
    assert title_of("openvino:CPU") == "OpenVINO"
    assert title_of("openvino:GPU") == "OpenVINO on GPU"
    assert title_of("emulator:trn1") == "emulator:trn1"
