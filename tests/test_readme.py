"""The README is short, and the lines that people paste to run a model do run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finecast import cli
from finecast.engines import installed
from finecast.engines.usage import how_to_run

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "examples" / "digits"
needs_openvino = pytest.mark.skipif(not installed("openvino"), reason="needs OpenVINO")


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model in bf16, called as in the README."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(DIGITS / "digits.onnx", tmp_path / "model.onnx")
    options = ["--auto-cast", "all", "--auto-cast-type", "bf16", "--no-verify"]
    assert cli.main(["convert", "model.onnx", "-o", "tuned.onnx", *options]) == 0
    return tmp_path


def test_the_readme_is_read_in_two_minutes() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert len(text.encode()) <= 9_000


@needs_openvino
def test_the_deployment_snippet_runs_in_the_models_own_types(tuned: Path) -> None:
    section = (ROOT / "docs" / "guides" / "deploy.md").read_text().partition("## OpenVINO")[2]
    (snippet,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[:1]
    shutil.copy(DIGITS / "digits_eval.npz", tuned / "data.npz")
    names: dict[str, Any] = {}
    exec(snippet, names)
    with np.load("data.npz") as data:
        label = data["label"]
    scores = names["outputs"]["logits"]
    assert (scores.argmax(axis=1) == label).mean() > 0.97
    assert names["model"].get_property("INFERENCE_PRECISION_HINT").to_string() == "f32"


@needs_openvino
def test_the_line_that_tune_prints_runs(tuned: Path) -> None:
    import openvino

    line = how_to_run(Path("tuned.onnx"), "openvino", ["bf16", "fp32"])
    assert "ONNX Runtime has no bf16 on CPUs" in line
    code = line.removeprefix("run it: ").splitlines()[0]
    model = eval(code, {"openvino": openvino})
    assert model({"image": np.zeros((2, 1, 8, 8), np.float32)})["logits"].shape == (2, 10)


@needs_openvino
def test_the_line_for_throughput_has_the_hint_for_it(tuned: Path) -> None:
    import openvino

    line = how_to_run(Path("tuned.onnx"), "openvino", ["fp32"], throughput=True)
    code = line.removeprefix("run it: ").splitlines()[0]
    model = eval(code, {"openvino": openvino})
    assert model.get_property("PERFORMANCE_HINT").name == "THROUGHPUT"


def test_the_line_is_code_alone_and_notes_follow() -> None:
    for throughput in (False, True):
        text = how_to_run(Path("a.onnx"), "openvino", ["int8_weights"], throughput=throughput)
        line, *notes = text.splitlines()
        compile(line.removeprefix("run it: "), "a", "eval")
        assert any("chooses types itself" in note for note in notes)
        assert any("AsyncInferQueue" in note for note in notes) is throughput


def test_the_line_is_that_of_the_engine() -> None:
    line = how_to_run(Path("a.onnx"), "onnxruntime", ["fp32"], throughput=True)
    assert "intra_op_num_threads = 1" in line
    assert "onnxruntime.InferenceSession('a.onnx', options)" in how_to_run(
        Path("a.onnx"), "onnxruntime", ["fp16"]
    )
    assert "torch.export.load('a.pt2')" in how_to_run(Path("a.pt2"), "torch", ["bf16"])
    assert how_to_run(Path("a.onnx"), "emulator:trn1", ["bf16"]) == ""
