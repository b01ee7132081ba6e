from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from finecast.errors import ExitCode
from tests.cli.conftest import Answer

Finecast = Callable[..., Answer]


def test_report_and_exit_code(
    finecast: Finecast, net: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "tuned.onnx"
    options = ["--data", data, "--metric", "agreement", "--json"]
    answer = finecast("tune", net, "-o", out, *options)
    assert answer.code in (ExitCode.DONE, ExitCode.NOT_IMPROVED), answer.err
    report = answer.json
    assert {"metric", "latency_ms", "size_bytes"} <= report["baseline"].keys()
    assert report["baseline"].keys() == report["tuned"].keys()
    assert report["evaluations"] >= 1
    assert report["verdict"] == ("unchanged" if answer.code else "improved")
    # Whether a net this small gains is the machine's business; a file is there if it does.
    assert out.exists() == (answer.code == ExitCode.DONE)
    assert (tmp_path / "tuned.plan.json").exists() == out.exists()
    if answer.code:
        assert report["tuned"] == report["baseline"]
        assert report["casts"] == 0
        assert report["ops"] == {"fp32": 3}


def test_evaluation_function(finecast: Finecast, net: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import numpy as np\n"
        "X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)\n"
        "def score(run):\n"
        "    out = run({'x': X})\n"
        "    assert list(out) == ['y']\n"
        "    return float(out['y'].sum())\n"
        "def feeds():\n"
        "    yield {'x': X}\n"
    )
    options = ["--eval", f"{mine}:score", "--calib", f"{mine}:feeds", "--json"]
    answer = finecast("tune", net, "-o", tmp_path / "t.onnx", *options)
    assert answer.code in (ExitCode.DONE, ExitCode.NOT_IMPROVED), answer.err
    assert answer.json["baseline"]["metric"] == pytest.approx(8, abs=1e-4)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"z": (4, 16)}, "'x' is missing"),
        ({"x": (4, 8)}, "shape"),
        ({"x": (0, 16)}, "no samples"),
        ({"x": (4, 16), "label": (3,)}, "samples"),
        ({"x": (4, 16)}, "labels"),
    ],
)
def test_data_that_does_not_fit(
    finecast: Finecast,
    net: Path,
    tmp_path: Path,
    arrays: dict[str, tuple[int, ...]],
    words: str,
) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, **{k: np.zeros(s, np.float32) for k, s in arrays.items()})  # pyright: ignore[reportArgumentType]
    out = tmp_path / "t.onnx"
    answer = finecast("tune", net, "-o", out, "--data", path, "--metric", "top1")
    assert answer.code == ExitCode.USAGE
    assert words in answer.err
    assert answer.err.count("\n") == 1
    assert not out.exists()


def test_nan_in_the_baseline_names_the_op(
    finecast: Finecast, net: Path, data: Path, tmp_path: Path
) -> None:
    model = onnx.load(net)
    bias = next(t for t in model.graph.initializer if t.name == "b")
    bias.CopyFrom(onnx.numpy_helper.from_array(np.full(4, np.nan, np.float32), "b"))
    broken = tmp_path / "nan.onnx"
    onnx.save(model, broken)
    options = ["--data", data, "--metric", "top1"]
    answer = finecast("tune", broken, "-o", tmp_path / "t.onnx", *options)
    assert answer.code == ExitCode.FAILED
    assert "NaN" in answer.err
    assert "'bias'" in answer.err


def test_resume_repeats_no_trial(
    finecast: Finecast, net: Path, data: Path, tmp_path: Path
) -> None:
    args = ["tune", net, "-o", tmp_path / "t.onnx", "--data", data, "--json", "--force"]
    first = finecast(*args).json
    again = finecast(*args, "--resume").json
    tried = {t["plan"] for t in first["trials"]}
    repeated = [t for t in again["trials"] if t["plan"] in tried]
    # Only the baseline and plans that were not tried before are evaluated.
    assert again["evaluations"] == 1 + len(again["trials"]) - len(repeated)


def test_a_model_with_external_data(
    finecast: Finecast, net: Path, data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "apart"
    folder.mkdir()
    source = folder / "net.onnx"
    onnx.save(
        onnx.load(net),
        source,
        save_as_external_data=True,
        location="net.data",
        size_threshold=0,
    )
    answer = finecast("tune", source, "-o", tmp_path / "t.onnx", "--data", data, "--json")
    assert answer.code in (ExitCode.DONE, ExitCode.NOT_IMPROVED), answer.err
    assert answer.json["probes"] > 0
