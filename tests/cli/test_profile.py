from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import parser

from finecast.cli import main
from finecast.data.options import DataOptions
from finecast.engines import ONNX, installed, reading
from finecast.errors import ExitCode, UsageError
from finecast.measure import timing

NET = """<ir_version: 10, opset_import: ["" : 17]>
net (float[N,T] x) => (float[N,T] y) {
  [add] s = Add(x, x)
  [soft] y = Softmax(s)
}"""
QUICK = ["--seconds", "0", "--runs", "3", "--dim", "T=64"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "net[1].onnx"
    path.write_bytes(parser.parse_model(NET).SerializeToString())
    return str(path)


@pytest.mark.parametrize("engine", reading(ONNX))
def test_json_figures(engine: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not installed(engine):
        pytest.skip(f"{engine} is not installed")
    options = ["--engine", engine, "--batch", "4", "--ops", "--json", *QUICK]
    assert main(["profile", model, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["engine"] == f"{engine}:CPU"
    (row,) = found["models"]
    assert row["batch"] == 4
    assert row["latency_ms"]["runs"] == 3
    assert row["latency_ms"]["p10"] <= row["latency_ms"]["median"] <= row["latency_ms"]["p90"]
    assert row["throughput_per_s"] == pytest.approx(4e3 / row["latency_ms"]["median"])
    assert row["speedup"]["median"] == 1
    assert row["memory_bytes"]["peak"] > row["memory_bytes"]["model"]
    assert {name for k in row["ops"] for name in k["ops"]} <= {"add", "soft"}


def test_a_model_beside_itself_is_timed_twice(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a user sees how far noise goes; it was timed once, and was as fast as itself."""
    calls = count(1)

    def slower(turns: timing.Turns, name: str) -> timing.Took:
        turns.calls[name]()
        seconds = 1e-3 * next(calls)
        return timing.Took(wall_s=seconds, used_s=seconds)

    monkeypatch.setattr(timing.Turns, "_timed", slower)
    assert main(["profile", model, model, "--no-memory", "--json", *QUICK]) == 0
    first, second = json.loads(capsys.readouterr().out)["models"]
    assert first["latency_ms"]["median"] != second["latency_ms"]["median"]


def test_table_of_several_models(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    twin = other / Path(model).name
    twin.write_bytes(Path(model).read_bytes())
    assert main(["profile", model, str(twin), "--no-memory", "--ops", *QUICK]) == 0
    out = capsys.readouterr().out
    assert "net[1].onnx" in out  # brackets are no markup
    assert "speedup" in out
    assert "soft" in out


def test_data_gives_the_feeds(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "data.npz"
    np.savez(file, x=np.ones((6, 9), np.float32), y=np.zeros(6))
    options = ["--data", str(file), "--labels", "y", "--batch", "5", "--no-memory", "--json"]
    assert main(["profile", model, *options, *QUICK[:4]]) == 0
    assert json.loads(capsys.readouterr().out)["models"][0]["batch"] == 5


def test_an_input_that_all_samples_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """<ir_version: 10, opset_import: ["" : 17]>
    net (float[N,T] x, float[K,T] e) => (float[N,K] y) {
      [turn] t = Transpose(e)
      [product] y = MatMul(x, t)
    }"""
    path = tmp_path / "net.onnx"
    path.write_bytes(parser.parse_model(text).SerializeToString())
    np.savez(tmp_path / "d.npz", x=np.ones((6, 9), np.float32), e=np.ones((3, 9), np.float32))
    options = ["--data", str(tmp_path / "d.npz"), "--sample-axis", "e=none", "--no-memory"]
    assert main(["profile", str(path), *options, "--json", *QUICK[:4]]) == 0
    assert json.loads(capsys.readouterr().out)["models"][0]["batch"] == 6


@pytest.mark.parametrize(
    ("options", "message", "code"),
    [
        (["--engine", "abacus"], "unknown engine", ExitCode.USAGE),
        (["--engine", "torch:CUDA"], "does not run .onnx files", ExitCode.USAGE),
        ([], "give --dim T=SIZE", ExitCode.USAGE),
        (["--dim", "T"], "is not NAME=SIZE", ExitCode.USAGE),
        (["--dim", "T=0"], "from 1 on; arrays that are empty", ExitCode.USAGE),
        (["--sample-axis", "x=0"], "--sample-axis is given without data", ExitCode.USAGE),
        (["--data", "/none.npz"], "cannot read the data", ExitCode.USAGE),
    ],
)
def test_bad_options(
    model: str,
    options: list[str],
    message: str,
    code: ExitCode,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["profile", model, *options]) == code
    assert message in capsys.readouterr().err


def test_a_model_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "/none.onnx"]) == ExitCode.USAGE
    assert "No such file" in capsys.readouterr().err


def test_dim_sizes() -> None:
    texts: Any = ["T=64", "x.1=3"]
    assert DataOptions(dims=texts).dims == {"T": 64, "x.1": 3}
    texts = ["=3"]
    with pytest.raises(UsageError):
        DataOptions(dims=texts)


def test_a_function_gives_the_feeds(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import numpy as np\ndef feeds():\n    yield {'x': np.ones((7, 3), np.float32)}\n"
    )
    options = ["--calib", f"{mine}:feeds", "--no-memory", "--json", *QUICK[:4]]
    assert main(["profile", model, *options]) == 0
    assert json.loads(capsys.readouterr().out)["models"][0]["batch"] == 7


def test_trust_without_code_to_trust(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", model, "--trust"]) == ExitCode.USAGE
    assert "no code in these files is executed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "engine", "said"),
    [
        ("net.xml", "onnxruntime", "does not run .xml files (NAME): use --engine openvino,"),
        ("net.TFLITE", "onnxruntime", "does not run .tflite files (NAME): use --engine open"),
        ("net.pt", "onnxruntime", "a .pt file is a pickle or TorchScript of PyTorch (NAME)"),
    ],
)
def test_an_engine_that_does_not_run_such_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, engine: str, said: str
) -> None:
    """Its own message is that of a broken ONNX file."""
    path = tmp_path / name
    path.write_bytes(b"<net/>")
    assert main(["profile", str(path), "--engine", engine]) == ExitCode.USAGE
    assert said.replace("NAME", str(path)) in capsys.readouterr().err


@pytest.mark.parametrize("path", ["absent.onnx", "absent.xml", "absent"])
def test_files_that_are_missing(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", path]) == ExitCode.USAGE
    assert path in capsys.readouterr().err
