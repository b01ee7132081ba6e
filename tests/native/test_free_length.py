"""Models whose outputs have as many rows as numbers cross a threshold, through every verb."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import openvino
import pytest

import finecast
from finecast.data.metrics import get_metric
from finecast.data.workload import DataWorkload
from tests.native.drawn import write_drawn

SHAPES = {"w": (64, 256), "u": (256, 4), "v": (256, 3)}
CROSSING = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[n,64] x) => (int64[2,k] idx) <float t = {1.0}> {
  a = MatMul(x, w)
  g = Greater(a, t)
  idx = NonZero(g)
}
"""
DETECTOR = """
<ir_version: 8, opset_import: ["" : OPSET]>
net (float[n,40,64] x) => (float[k,4] boxes, float[k] scores, int64[k] classes)
<int64[1] most = {30}, float[1] iou = {0.5}, float[1] least = {0.5}, int64[2] ends = {0, 2},
 int64 one = {1}, float size = {40}> {
  h = MatMul(x, w)
  f = Relu(h)
  o = MatMul(f, u)
  s = Mul(o, size)
  halves = Abs(s)
  low = Sub(s, halves)
  boxes_of = Add(low, s)
  l = MatMul(f, v)
  p = Sigmoid(l)
  by_class = Transpose <perm = [0, 2, 1]> (p)
  chosen = NonMaxSuppression(boxes_of, by_class, most, iou, least)
  of_box = Gather <axis = 1> (chosen, ends)
  boxes = GatherND(boxes_of, of_box)
  scores = GatherND(by_class, chosen)
  classes = Gather <axis = 1> (chosen, one)
}
"""
CHOSEN = "int64[k,3] chosen"
X = np.random.default_rng(2).standard_normal((32, 64)).astype(np.float32)
IMAGES = np.random.default_rng(3).standard_normal((6, 40, 64)).astype(np.float32)


def crossing(folder: Path, suffix: str) -> Path:
    path = write_drawn(folder / "m.onnx", CROSSING, {"w": SHAPES["w"]})
    if suffix == ".onnx":
        return path
    read = openvino.Core().read_model(path)
    openvino.save_model(read, path.with_suffix(suffix), compress_to_fp16=False)
    return path.with_suffix(suffix)


@pytest.fixture(params=[10, 11, 18])
def detector(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """With NMS of each operation set; before 11 it gives the numbers of boxes alone."""
    text = DETECTOR.replace("OPSET", str(request.param))
    if request.param == 10:
        text = text.replace("float[k,4] boxes, float[k] scores, int64[k] classes", CHOSEN)
        text = text.partition("  of_box =")[0] + "}"
    return write_drawn(tmp_path / "d.onnx", text, SHAPES)


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
def test_crossings_are_locked_verified_and_blamed(suffix: str, tmp_path: Path) -> None:
    """The lock had no tolerance, verify ended in a traceback, and blame saw no error."""
    model, low = crossing(tmp_path, suffix), tmp_path / f"low{suffix}"
    done = finecast.convert(
        model, low, "all:bf16", data={"x": X}, engine="openvino", lock=True, progress=False
    )
    found = done.to_dict()["verified"]
    assert 0.001 < found["relative_error"] < 0.2
    assert "rows are not there" in found["note"]
    assert done.lock is not None
    stated = json.loads(done.lock.read_text())
    (tolerance,) = stated["samples"]["tolerances"].values()
    assert tolerance == pytest.approx(found["relative_error"] / 2)
    assert finecast.verify(low).deviations == {"idx": 0.0}
    # By default blame computes as the types state, and OpenVINO with the kernels of this CPU.
    as_stated, as_run = (
        finecast.blame(model, low, data={"x": X}, engine=engine, progress=False)
        for engine in (None, "openvino")
    )
    assert 0.001 < as_stated.value < 0.2
    assert as_run.value == pytest.approx(found["relative_error"], rel=0.5)
    for blamed in (as_stated, as_run):
        assert not blamed.passed
        assert len(blamed.culprits) == 1


def test_another_row_drifts(tmp_path: Path) -> None:
    """Rows that moved are no drift, rows that are lost are."""
    low = tmp_path / "low.onnx"
    finecast.convert(
        crossing(tmp_path, ".onnx"), low, "all:bf16", data={"x": X}, lock=True, progress=False
    )
    session = openvino.Core().compile_model(low, "CPU")

    def moved(feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        return [session(feeds)[0][:, ::-1]]

    def lost(feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        return [session(feeds)[0][:, ::2]]

    def numbers(run: object) -> str:
        checks = finecast.verify(low, deployed=run).checks
        return next(one.state.value for one in checks if one.name == "numbers")

    assert numbers(moved) == "holds"
    assert numbers(lost) == "drifted"


def test_a_detector_is_compared_box_by_box(detector: Path, tmp_path: Path) -> None:
    low = tmp_path / "low.onnx"
    done = finecast.convert(
        detector, low, "all:bf16", data={"x": IMAGES}, lock=True, progress=False
    )
    found = done.to_dict()["verified"]
    assert set(found["outputs"]) in ({"boxes", "scores", "classes"}, {"chosen"})
    assert found["relative_error"] < 0.3
    assert finecast.verify(low).deviations == dict.fromkeys(found["outputs"], 0.0)
    assert finecast.blame(detector, low, data={"x": IMAGES}, progress=False).value < 0.3


@pytest.mark.parametrize(
    ("metric", "least"), [("agreement", 0.95), ("cosine", 0.95), ("snr_db", 15.0)]
)
def test_metrics_of_rows(metric: str, least: float, tmp_path: Path) -> None:
    """Each sent to another: agreement to cosine, cosine to agreement."""
    model = finecast.load(crossing(tmp_path, ".onnx"))
    reference = model.reference()
    data = finecast.DataOptions(data={"x": X}, metric=metric)
    workload = model.workload(data, reference)
    assert isinstance(workload, DataWorkload)
    assert workload.evaluate(reference, None) == get_metric(metric).ideal
    low = tmp_path / "low.onnx"
    finecast.convert(tmp_path / "m.onnx", low, "all:bf16", progress=False)
    score = workload.evaluate(finecast.load(low).reference(), reference)
    assert least < score < (get_metric(metric).ideal or 0)


@pytest.mark.slow
def test_a_model_of_free_length_is_tuned(tmp_path: Path) -> None:
    """By times of a device that is not here: what plans lose is measured in rows.

    There are several batches, and rows are matched within each.
    """
    found = finecast.tune(
        crossing(tmp_path, ".onnx"),
        tmp_path / "low.onnx",
        data={"x": np.concatenate([X, X + 1, X - 1])},
        metric="agreement",
        tolerance=0.05,
        target="trn1",
        policy="auto:bf16",
        progress=False,
    )
    assert found.improved
    assert 0.95 <= found.accuracy["tuned"] <= 1
    assert 0 < found.measured_error < 0.5
    # Errors of rows do not add up: an op named by a predicted share may make the output worse.
    said = found.report().to_dict()["summary"]
    assert said["limits"] == []
    assert said["heading"].startswith("Which ops limit precision is not known")
    assert "most of the squared error" not in str(found)
