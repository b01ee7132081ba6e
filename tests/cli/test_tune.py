from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper, parser

from finecast.errors import ExitCode
from finecast.measure.study import Study
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


@pytest.mark.parametrize("verb", ["tune", "convert"])
def test_a_folder_of_data_is_told_how_to_be_given(
    finecast: Finecast, net: Path, tmp_path: Path, verb: str
) -> None:
    """The output lies in it, and that was the error."""
    answer = finecast(verb, net, "-o", tmp_path / "t.onnx", "--data", tmp_path)
    assert answer.code == ExitCode.USAGE
    assert "save all samples in one file, named as the inputs" in answer.err


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
    assert again["reused_trials"] == len(repeated)
    # The baseline and plans that were not tried before are evaluated, and the winner and what
    # the engine gives by its hint again.
    fresh = 1 + len(again["trials"]) - len(repeated)
    assert 0 <= again["evaluations"] - fresh <= 1 + len(again["baselines"])


def test_a_finished_run_is_resumed_without_force(
    finecast: Finecast, net: Path, data: Path, tmp_path: Path
) -> None:
    """It searches again: what is asked for now need not be what was asked for then."""
    out, plan = tmp_path / "t.onnx", tmp_path / "t.plan.json"
    args = ["tune", net, "-o", out, "--data", data]
    finecast("convert", net, "-o", out, "--auto-cast", "all", "--plan-out", plan)
    Study(tmp_path / "t.study.db")
    assert "outputs exist" in finecast(*args).err
    stated = json.loads(plan.read_text(encoding="utf-8"))
    plan.write_text(json.dumps(stated | {"model": "another"}), encoding="utf-8")
    assert finecast(*args, "--resume").code == 2  # it is another model's run
    plan.write_text(json.dumps(stated), encoding="utf-8")
    answer = finecast(*args, "--resume")
    assert "an earlier run finished" in answer.err
    assert answer.code in (0, 1)
    assert "improved" in answer.out or "unchanged" in answer.out


@pytest.fixture
def products(tmp_path: Path) -> list[str | Path]:
    """A command whose model is faster in bf16 on its target, where nothing is measured."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
    net (float[n, 512] x) => (float[n, 512] y) {
      a = MatMul (x, w)
      y = MatMul (a, w)
    }"""
    made = parser.parse_model(text)
    made.graph.initializer.append(numpy_helper.from_array(np.eye(512, dtype=np.float32), "w"))
    path, data = tmp_path / "products.onnx", tmp_path / "products.npz"
    onnx.save(made, path)
    x = np.random.default_rng(0).standard_normal((64, 512))
    np.savez(data, x=x.astype(np.float32))
    options = ["--data", data, "--target", "trn1", "--tolerance", "0.5", "--json", "--force"]
    return ["tune", path, "-o", tmp_path / "t.onnx", *options]


def test_what_a_run_replaces_is_not_stale(
    finecast: Finecast, products: list[str | Path]
) -> None:
    for _ in range(2):
        answer = finecast(*products)
        assert answer.json["verdict"] == "improved", answer.err
        assert answer.json["stale"] == []
        assert "STALE" not in answer.err


def test_a_model_that_was_tuned_is_not_taken_for_fp32(
    finecast: Finecast, products: list[str | Path], tmp_path: Path
) -> None:
    assert "converted by finecast before" not in finecast(*products).err
    (tmp_path / "t.onnx").rename(tmp_path / "low.onnx")
    answer = finecast("tune", tmp_path / "low.onnx", *products[2:])
    assert answer.code != 0
    assert "converted by finecast before, to auto:bf16,fp16,tf32" in answer.err


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


@pytest.fixture
def learnt(net: Path, data: Path) -> dict[str, np.ndarray]:
    """Data whose labels are the model's own answers."""
    arrays = dict(np.load(data))
    session = onnxruntime.InferenceSession(str(net), providers=["CPUExecutionProvider"])
    scores = np.asarray(session.run(None, {"x": arrays["x"]})[0])
    return {"x": arrays["x"], "label": scores.argmax(axis=1)}


def nan_in(x: np.ndarray) -> np.ndarray:
    broken = x.copy()
    broken[5, 3] = np.nan
    return broken


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (lambda d: d | {"label": d["label"].astype(str)}, [], "text: the labels are such as"),
        (
            lambda d: d | {"label": d["label"] + 1},
            [],
            "no class of output 'y'",
        ),
        (lambda d: d | {"x": nan_in(d["x"])}, [], "array 'x' holds NaN"),
        (lambda d: {k: v[:1] for k, v in d.items()}, [], "over 1 decision says nothing"),
        (dict, ["--tolerance", "5"], "relative tolerance 5 lets every result pass"),
        (dict, ["--max-drop", "1"], "lets every result pass"),
        (dict, ["--lower-is-better"], "of top1 more is better"),
        (dict, ["--metric", "top5"], "top5 of 4 classes is right whatever the model says"),
    ],
)
def test_metrics_that_mean_nothing_are_refused(
    finecast: Finecast, net: Path, learnt: dict[str, np.ndarray], tmp_path: Path,
    change: Callable[[Any], dict[str, np.ndarray]], options: list[str], words: str,
) -> None:  # fmt: skip
    path, out = tmp_path / "d.npz", tmp_path / "t.onnx"
    np.savez(path, **change(learnt))  # pyright: ignore[reportArgumentType]
    args = ["tune", net, "-o", out, "--data", path, "--metric", "top1", "--json", *options]
    answer = finecast(*args)
    assert answer.code == ExitCode.USAGE, answer.err
    assert words in answer.err
    assert answer.err.count("\n") == 1
    assert not out.exists()


def test_a_baseline_at_the_level_of_chance_is_a_warning(
    finecast: Finecast, net: Path, data: Path, learnt: dict[str, np.ndarray], tmp_path: Path
) -> None:
    options = ["--metric", "Accuracy", "--target", "trn1", "--json"]
    answer = finecast("tune", net, "-o", tmp_path / "t.onnx", "--data", data, *options)
    assert answer.json["metric"] == "accuracy"
    (warning,) = answer.json["warnings"]
    assert "is at the level of guessing among 4 classes" in warning
    assert f"warning: {warning}" in answer.err
    path = tmp_path / "d.npz"
    np.savez(path, x=learnt["x"], label=np.eye(4)[learnt["label"]])
    answer = finecast("tune", net, "-o", tmp_path / "t.onnx", "--data", path, *options)
    (warning,) = answer.json["warnings"]
    assert "each is read as the class it marks" in warning
    assert answer.json["baseline"]["metric"] == 1.0


@pytest.mark.parametrize("metric", ["f1", "perplexity", "mse", "mae"])
def test_metrics_by_name(
    finecast: Finecast, net: Path, learnt: dict[str, np.ndarray], tmp_path: Path, metric: str
) -> None:
    path = tmp_path / "d.npz"
    hot = np.eye(4, dtype=np.float32)[learnt["label"]]
    np.savez(path, x=learnt["x"], label=hot if metric.startswith("m") else learnt["label"])
    options = ["--data", path, "--metric", metric.upper(), "--target", "trn1", "--json"]
    answer = finecast("tune", net, "-o", tmp_path / "t.onnx", *options)
    if metric == "perplexity":  # the net ends in a Softmax
        assert answer.code == ExitCode.USAGE
        assert "needs logits" in answer.err
    else:
        assert answer.code in (ExitCode.DONE, ExitCode.NOT_IMPROVED), answer.err


def test_inputs_that_all_samples_share(
    finecast: Finecast, net: Path, learnt: dict[str, np.ndarray], tmp_path: Path
) -> None:
    path = tmp_path / "d.npz"
    np.savez(path, **learnt)  # pyright: ignore[reportArgumentType]
    args = ["tune", net, "-o", tmp_path / "t.onnx", "--data", path, "--target", "trn1"]
    answer = finecast(*args, "--metric", "top1", "--sample-axis", "x=NONE", "--json")
    assert answer.json["baseline"]["metric"] == 1.0
    for word, said in (
        ("y=none", "unknown input 'y'"),
        ("x=last", "'x=last' is not NAME=none or NAME=AXIS"),
    ):
        answer = finecast(*args, "--sample-axis", word)
        assert answer.code == ExitCode.USAGE
        assert said in answer.err


@pytest.mark.parametrize(
    ("objective", "column"),
    [("size", "smaller"), ("memory", "MB in memory"), ("throughput", "calls/s")],
)
def test_what_the_objective_counts_is_in_the_table(
    finecast: Finecast, net: Path, data: Path, tmp_path: Path, objective: str, column: str
) -> None:
    options = ["--data", data, "--metric", "agreement", "--objective", objective]
    answer = finecast("tune", net, "-o", tmp_path / "t.onnx", *options)
    assert answer.code in (ExitCode.DONE, ExitCode.NOT_IMPROVED), answer.err
    assert column in " ".join(answer.out.split())
    report = finecast("tune", net, "-o", tmp_path / "u.onnx", *options, "--json").json
    assert report["objective"] == objective
    assert report["gain"] >= 1
    assert report["baseline"].keys() == report["tuned"].keys()
    counted = {"memory": "memory_bytes", "throughput": "calls_per_s"}.get(objective)
    assert counted is None or report["baseline"][counted] > 0


def test_an_objective_that_is_none(
    finecast: Finecast, net: Path, data: Path, tmp_path: Path
) -> None:
    options = ["--data", data, "--metric", "agreement", "--objective", "sise"]
    answer = finecast("tune", net, "-o", tmp_path / "t.onnx", *options)
    assert answer.code == ExitCode.USAGE
    assert "did you mean size" in answer.err
    answer = finecast(
        *("tune", net, "-o", tmp_path / "t.onnx", *options[:-1], "throughput"),
        *("--target", "trn1"),
    )
    assert answer.code == ExitCode.USAGE
    assert "one request at a time" in answer.err


def test_a_limit_of_time_that_loading_used_up_is_said_at_once(
    finecast: Finecast, net: Path, data: Path, tmp_path: Path
) -> None:
    """Loading took more than all of it, and a line told of two minutes to come."""
    call = ("tune", net, "-o", tmp_path / "o.onnx", "--data", data, "--metric", "cosine")
    said = finecast(*call, "--timeout", "0.001").err.replace("\n", " ")
    # On a busy machine another phase than loading may have taken longest.
    assert re.search(r"the --timeout of 0\.001 s is over: [a-z ]+ took", said)
    assert "one plan is tried, and the search ends" in said
    assert "in all, as it looks now" not in said
