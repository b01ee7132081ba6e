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
    assert len(text.splitlines()) <= 100
    assert len(text.encode()) <= 8_000


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


ZEROS = {"image": ((2, 1, 8, 8), "float32")}


@needs_openvino
def test_the_code_that_tune_prints_runs_as_pasted(tuned: Path) -> None:
    for throughput in (False, True):
        code = how_to_run(
            Path("tuned.onnx"),
            "openvino",
            ["bf16", "fp32"],
            inputs=ZEROS,
            throughput=throughput,
        )
        assert max(map(len, code)) <= 80
        names: dict[str, Any] = {}
        exec("\n".join(code), names)
        assert names["outputs"]["logits"].shape == (2, 10)
        stated = names["model"].get_property("PERFORMANCE_HINT")
        served = getattr(stated, "name", stated)  # OpenVINO gives the default as text
        assert (served == "THROUGHPUT") is throughput
        notes = [line for line in code if line.startswith("#")]
        assert any("chooses types itself" in note for note in notes)
        assert any("AsyncInferQueue" in note for note in notes) is throughput
        assert any("ONNX Runtime has no bf16 on CPUs" in note for note in notes)


def test_the_code_is_that_of_the_engine() -> None:
    code = how_to_run(Path("a.onnx"), "onnxruntime", ["fp32"], throughput=True)
    assert "options.intra_op_num_threads = 1" in code
    assert not any("matmulnbits" in line for line in code)
    for label in ("int4_weights", "uint4"):
        of_4_bits = how_to_run(Path("a.onnx"), "onnxruntime", [label])
        assert any("matmulnbits" in line for line in of_4_bits)
    found = how_to_run(Path("a.onnx"), "onnxruntime", ["fp16"], inputs=ZEROS)
    assert "model = onnxruntime.InferenceSession('a.onnx', options)" in found
    assert "program = torch.export.load('a.pt2')" in how_to_run(Path("a.pt2"), "torch", [])
    assert how_to_run(Path("a.onnx"), "emulator:trn1", ["bf16"]) == ()
    beams = {"ids": ((4, 7), "int64"), "beam_idx": ((4,), "int32")}
    texts = how_to_run(Path("a.xml"), "openvino", ["bf16"], inputs=beams)
    assert "    'beam_idx': numpy.arange(4, dtype='int32')," in texts
    gpu = how_to_run(Path("a.onnx"), "openvino:GPU", ["fp16"])
    assert any("'GPU'" in line for line in gpu)
