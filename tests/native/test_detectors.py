"""Detectors of all forms and libraries: agreement is of classes, and boxes are near or not."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from scipy.stats import spearmanr

import finecast
from finecast import api
from finecast.data.deviation import deviation
from finecast.data.metrics import by_output
from finecast.engines import get_engine, installed
from finecast.planning.detections import joined_outputs
from finecast.planning.slices import slices_of
from finecast.rules.policy import Policy
from tests.models.detectors import CLASSES, PLACES, WIDTH, detector, samples

DATA = samples()
SCORED = {
    "apart": {"scores", "boxes"},
    "scores first": {"scores", "boxes"},
    "normalized": {"y[:, :, 4:14]", "y[:, :, 0:4]"},
    "centres": {"y[:, :, 4:14]", "y[:, :, 0:4]"},
    "fixed rows": {"every[:, :, 5]", "every[:, :, 4]", "every[:, :, 0:4]"},
    "rows": {"rows"},
}


@pytest.fixture(scope="module", params=SCORED)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("detector") / f"{request.param}.onnx"
    onnx.save(detector(request.param), path)
    return path


def shares(report: Any) -> dict[str, float]:
    return by_output(report.metric)


def test_agreement_is_of_classes_in_every_form(saved: Path) -> None:
    """bf16 keeps every box and changes 2% of the classes: agreement was 1."""
    report = finecast.emulate(saved, "trn1", "all:bf16", data=DATA)
    found = shares(report)
    assert {*found} == SCORED[saved.stem]
    assert report.metric == min(found.values())
    assert 0.9 < report.metric < 0.99
    boxes = [share for name, share in found.items() if "boxes" in name or "0:4" in name]
    assert all(share == 1 for share in boxes)
    taken = [text for text in report.warnings if "holds coordinates" in text]
    assert bool(taken) == (saved.stem == "apart")
    assert all("name others with of" in text for text in taken)


@pytest.mark.skipif(not installed("openvino"), reason="OpenVINO is not installed")
@pytest.mark.parametrize("form", ["apart", "normalized", "centres"])
def test_ir_is_judged_as_onnx_is(form: str, tmp_path: Path) -> None:
    import openvino

    path = tmp_path / "net.onnx"
    onnx.save(detector(form), path)
    report = finecast.emulate(openvino.convert_model(path), "trn1", "all:bf16", data=DATA)
    assert {*shares(report)} == SCORED[form]
    assert 0.9 < report.metric < 0.99


def detections(y: Any) -> tuple[Any, Any, Any]:
    """Whether there is an object at a place, its class and its box."""
    scores = y[..., 4:]
    return scores.max(-1) > 0.3, scores.argmax(-1), y[..., :4]


def f1(got: Any, wanted: Any) -> float:
    """Of objects beside fp32's: there, of one class, with half of their area in common."""
    (there, kind, box), (there_too, kind_too, box_too) = detections(got), detections(wanted)
    sides = np.minimum(box, box_too)[..., 2:] - np.maximum(box, box_too)[..., :2]
    common = np.clip(sides, 0, None).prod(-1)
    areas = (b[..., 2:] - b[..., :2] for b in (box, box_too))
    near = common > 0.5 * (sum(a.prod(-1) for a in areas) - common)
    found = there & there_too & (kind == kind_too) & near
    return 2 * float(found.sum()) / float(there.sum() + there_too.sum())


# Of these ops those in the format: from the scores' product alone to all of the model.
LADDER = {
    "bf16": ["MatMul_3", "MatMul_0", "MatMul_[03]", "MatMul_[23]", "MatMul_.", ""],
    "int8": ["MatMul_3", "MatMul_0", "MatMul_[03]", ""],
    "int8,bf16": [""],
}


def test_errors_by_slices_order_plans_as_f1_does(tmp_path: Path) -> None:
    """Boxes are four orders larger than most scores: errors of the whole are theirs."""
    proto, path = detector("pixels"), tmp_path / "net.onnx"
    onnx.save(proto, path)
    data = samples(2000)
    wanted: Any = get_engine("onnxruntime").load(proto.SerializeToString()).run(data)["y"]
    assert len(slices_of(wanted)) == 2
    errors: list[float] = []
    of_all: list[float] = []
    scores: list[float] = []
    for formats, levels in LADDER.items():
        for level in levels:
            others = (re.compile(f"^(?!{level})"),) if level else ()
            policy = replace(Policy.parse(f"all:{formats}"), exclude=others)
            low = finecast.convert(
                path, policy=policy, target="avx512-bf16", data=DATA, verify=False
            ).model
            engine = get_engine("emulator:avx512-bf16")
            got: Any = engine.load(low.SerializeToString()).run(data)["y"]
            errors.append(deviation(got, wanted).relative)
            of_all.append(float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted)))
            scores.append(f1(got, wanted))
    assert max(scores) - min(scores) > 0.01
    ranks: list[Any] = [spearmanr(one, scores) for one in (errors, of_all)]
    by_slices, whole = (-float(one.statistic) for one in ranks)
    assert by_slices > 0.9
    assert whole < by_slices - 0.1
    # Of 5,400 objects ten more or less are noise.
    for first, second in permutations(range(len(errors)), 2):
        if errors[first] < errors[second]:
            assert scores[first] > scores[second] - 0.002


def test_blame_and_tune_are_of_classes(tmp_path: Path) -> None:
    path = tmp_path / "apart.onnx"
    onnx.save(detector("apart"), path)
    low = finecast.convert(path, policy="all:bf16", data=DATA).model
    told = finecast.blame(path, low, data=DATA, metric="agreement", max_drop=0.01)
    assert not told.passed
    assert "agreement of scores" in told.verdict
    tuned = finecast.tune(
        path, policy="all:bf16", data=DATA, max_drop=0.01, target="avx512-bf16"
    )
    assert {*tuned.baseline.outputs} == SCORED["apart"]
    assert tuned.tuned.metric >= 0.99
    assert any("agreement is of output 'scores'" in text for text in tuned.warnings)
    kld = finecast.emulate(path, "trn1", "all:bf16", data=DATA, metric="kld", of="scores")
    assert [*shares(kld)] == ["scores"]


def test_what_the_graph_joins_is_known_to_sessions_of_the_fp32_model(tmp_path: Path) -> None:
    path = tmp_path / "normalized.onnx"
    onnx.save(detector("normalized"), path)
    session = api.load(path).reference()
    (join,) = session.joined.values()
    assert (join.axis, join.sizes) == (2, (4, CLASSES))
    assert {*session.joined} == {"y"}


def test_a_module_is_judged_as_files_are() -> None:
    torch = pytest.importorskip("torch")
    nn = torch.nn

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(WIDTH, 64)
            self.place, self.kind = nn.Linear(64, PLACES * 4), nn.Linear(64, PLACES * CLASSES)

        def forward(self, x: Any) -> Any:
            read = torch.relu(self.body(x))
            boxes = torch.sigmoid(self.place(read)).view(-1, 4, PLACES)
            scores = torch.sigmoid(self.kind(read) - 5).view(-1, PLACES, CLASSES)
            return torch.cat([boxes, scores.transpose(1, 2)], dim=1).transpose(1, 2)

    torch.manual_seed(0)
    x = torch.from_numpy(DATA["x"])
    model = api.load(Detector().eval(), example_inputs=(x,))
    (join,) = joined_outputs(model.read_graph()).values()
    assert (join.axis, join.sizes) == (2, (4, CLASSES))
    report = finecast.emulate(
        Detector().eval(), "trn1", "all:bf16", data=DATA, example_inputs=(x,)
    )
    assert [str(name).partition("[")[2] for name in shares(report)] == [
        ":, :, 4:14]", ":, :, 0:4]",
    ]  # fmt: skip
