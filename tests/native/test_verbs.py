"""The command line takes a new frontend's files in each verb."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from finecast.cli import main
from tests.native import toy
from tests.native.networks import FRONTENDS

WEIGHTS = [np.eye(4, dtype=np.float32) * np.float32(0.3) for _ in range(2)]


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    toy.install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    row = next(f for f in FRONTENDS if f.suffix == ".toy")
    row.write(tmp_path / "net.toy", WEIGHTS)
    np.savez(tmp_path / "data.npz", x=np.ones((8, 4), np.float32))
    return tmp_path / "net.toy"


@pytest.mark.parametrize(
    ("line", "made"),
    [
        ("inspect net.toy --json", ""),
        ("explain net.toy product0 --auto-cast all --auto-cast-type bf16 --json", ""),
        ("convert net.toy -o low.toy --json --auto-cast all --auto-cast-type bf16", "low.toy"),
        ("tune net.toy -o low.toy --json --data data.npz", "low.toy"),
    ],
    ids=lambda text: text.partition(" ")[0],
)
def test_each_verb(
    net: Path, line: str, made: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 0
    assert json.loads(capsys.readouterr().out)
    assert not made or net.with_name(made).is_file()


@pytest.mark.parametrize("option", ["--engine openvino", "--target trn1"])
def test_what_it_does_not_do_is_one_line(
    net: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"tune net.toy -o low.toy --data data.npz {option}"
    assert main(line.split()) == 2
    assert "a toy runs by itself" in " ".join(capsys.readouterr().err.split())
    assert not net.with_name("low.toy").exists()


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("model.pt", "a pickle or TorchScript of PyTorch", "torch.export.save"),
        ("model.H5", "a Keras model of the old kind", "export(FOLDER)"),
        ("model.h5", "a Keras model of the old kind", "safe_mode=False if it has Lambda"),
        ("model.Weights.h5", "weights of a Keras model without its layers", "load_weights"),
        ("low.plan.json", "a plan of finecast's", "finecast apply PLAN MODEL"),
        ("graph.pbtxt", "a graph of TensorFlow's as text", "as .pb"),
        ("saved_model.pb", "SavedModel without its variables", "give the folder"),
        ("model.bin", "weights without their model", "the .xml of OpenVINO's"),
        ("data.npz", "data and not a model", "by --data"),
        ("model.safetensors", "weights without the model", "torch.export.save"),
        ("inference.json", "a graph of PaddlePaddle or MXNet", "FLAGS_enable_pir_api=0"),
        ("model.mlmodel", "a Core ML model", "that it was converted from"),
        ("model.engine", "what a compiler made of a model", "that it was built from"),
    ],
)
def test_files_of_others_are_told_apart(
    name: str, what: str, fix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x80\x02{}")
    assert main(["inspect", str(path)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert what in told
    assert fix in told
