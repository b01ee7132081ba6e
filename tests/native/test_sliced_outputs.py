"""Boxes and scores in one output: what any verb reports is the error of the worst slice."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

import finecast
from finecast.cli import main
from finecast.data.golden import GoldenSamples
from finecast.data.metrics import by_output
from finecast.engines import installed
from finecast.engines.base import Feeds, Session, TensorSpec, joined_arrays
from finecast.errors import UsageError
from tests.frontends.tools import parse
from tests.kernels import skip_without_int8

WIDTH, BOXES, SCORES = 64, 4, 12
X = 3 * np.random.default_rng(1).standard_normal((96, WIDTH)).astype(np.float32)
TARGET = "avx512-bf16"


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scores whose logits are small beside their bias, and boxes of hundreds of pixels."""
    rng = np.random.default_rng(0)
    count = BOXES + SCORES
    model = parse(
        f"""net (float[n, {WIDTH}] x) => (float[n, {count}] y) {{
        a = MatMul(x, w1) b = Relu(a) c = MatMul(b, w2) d = Add(c, bias)
        e = Sigmoid(d) f = Mul(e, scale) y = Add(f, offset) }}""",
        opset=17,
    )
    arrays = {
        "w1": rng.standard_normal((WIDTH, 256)) / 8,
        "w2": rng.standard_normal((256, count)) / 16,
        "bias": np.repeat([0.0, -5.0], [BOXES, SCORES]),
        "scale": np.repeat([400.0, 1.0], [BOXES, SCORES]),
        "offset": np.repeat([300.0, 0.0], [BOXES, SCORES]),
    }
    model.graph.initializer.extend(
        numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items()
    )
    path = tmp_path_factory.mktemp("detector") / "detector.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.skipif(not installed("openvino"), reason="OpenVINO is not installed")
def test_convert_and_verify_tell_the_error_of_scores(detector: Path, tmp_path: Path) -> None:
    skip_without_int8()
    low = tmp_path / "low.onnx"
    done = finecast.convert(detector, low, "all:int8", data={"x": X}, lock=True)
    errors = done.verified.outputs
    assert [*errors] == ["y[:, 4:16]", "y[:, 0:4]"]
    assert done.verified.relative_error == errors["y[:, 4:16]"] > 3 * errors["y[:, 0:4]"]
    assert {*finecast.verify(low).deviations} == {*errors}
    named = finecast.convert(
        detector, tmp_path / "n.onnx", "all:int8", data={"x": X}, slices=1
    )
    assert len(named.verified.outputs) == BOXES + SCORES
    with pytest.raises(UsageError, match="no output has an axis 2"):
        finecast.convert(detector, tmp_path / "o.onnx", "all:int8", data={"x": X}, slices=2)


def test_tune_and_blame_judge_by_the_worst_slice(detector: Path) -> None:
    """The noise of the boxes alone passes, and of all numbers together."""
    found = finecast.tune(
        detector, policy="all:bf16", data={"x": X}, metric="snr_db", tolerance=30.0,
        target=TARGET,
    )  # fmt: skip
    assert [*found.tuned.outputs] == ["y[:, 4:16]", "y[:, 0:4]"]
    assert found.tuned.metric == min(found.tuned.outputs.values())
    assert [*found.output_errors] == ["y[:, 4:16]", "y[:, 0:4]"]
    assert "y[:, 4:16]" in "".join(found.lines)
    low = finecast.convert(detector, policy="all:bf16", data={"x": X}).model
    told = finecast.blame(detector, low, data={"x": X}, max_error=0.004)
    assert not told.passed
    assert told.value > 2 * found.output_errors["y[:, 0:4]"]


def test_the_agreement_of_classes_is_not_that_of_boxes(detector: Path) -> None:
    """bf16 keeps which coordinate is the largest; many classes of small scores change."""
    report = finecast.emulate(detector, "trn1", "all:bf16", data={"x": X})
    assert report.metric_name == "agreement"
    (worst, value), (other, boxes) = by_output(report.metric).items()
    assert (worst, other) == ("y[:, 4:16]", "y[:, 0:4]")
    assert report.metric == value < boxes
    assert f"metric by output, worst first: {worst} {value:.4g}" in str(report)
    assert report.samples == report.to_dict()["samples"] == len(X)
    assert f"relative output error on {len(X)} samples" in str(report)


def test_the_absolute_errors_name_their_slices(
    detector: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest error of the scores was said alone where boxes are off by more."""
    np.savez(tmp_path / "x.npz", x=X)
    low, data = str(tmp_path / "low.onnx"), str(tmp_path / "x.npz")
    assert main(["convert", str(detector), "-o", low, "--auto-cast", "all",
                 "--auto-cast-type", "bf16", "--data", data]) == 0  # fmt: skip
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"largest absolute 0\.0\d+ \(both of y\[:, 4:16\], absolute of y\[:, 0:4\] \d", printed
    )


class Given(Session):
    """Gives what it is given."""

    def __init__(self, factor: float) -> None:
        self.inputs = self.outputs = [TensorSpec(name="x", dtype="fp64", shape=(None, None))]
        self.factor = np.repeat([1.0, factor], [BOXES, SCORES])

    def run(self, feeds: Feeds) -> dict[str, NDArray[np.generic]]:
        return {"y": feeds["x"] * self.factor}


def test_scores_that_drift_are_beyond_the_tolerance_that_boxes_have() -> None:
    rng = np.random.default_rng(2)
    sizes = np.repeat([500.0, 1.0], [BOXES, SCORES])
    calls: list[Feeds] = [{"x": sizes * rng.uniform(0.5, 1, (n, sizes.size))} for n in (20, 3)]
    samples = GoldenSamples.of(Given(1.0), Given(1.0), calls)
    assert {*samples.tolerances} == {"y[:, 0:4]", "y[:, 4:16]"}
    drift = samples.deviations(Given(1.01))
    assert drift == pytest.approx({"y[:, 4:16]": 0.01, "y[:, 0:4]": 0.0})
    whole = GoldenSamples(calls=calls, outputs=samples.outputs, tolerances={"y": 0.01})
    assert [*whole.deviations(Given(1.01))] == ["y"]  # a lock of an earlier release


def test_calls_are_joined_along_the_axis_in_which_they_differ() -> None:
    def shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
        return joined_arrays([np.zeros(one) for one in shapes]).shape

    assert shape((2, 3), (2, 3)) == (4, 3)
    assert shape((2, 3, 4), (1, 3, 4)) == (3, 3, 4)
    assert shape((2, 3, 4), (2, 3, 1)) == (2, 3, 5)
    assert shape((2, 3), (1, 4)) == (10,)
    assert shape((), ()) == (2,)
    assert shape((2, 3), (6,)) == (12,)
