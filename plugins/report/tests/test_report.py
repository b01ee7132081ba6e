"""``finecast report``: from a plan, a study or a report's data; and ``tune --report``."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import onnx
import pytest

import finecast
from finecast.cli import main
from finecast.errors import ExitCode, UsageError
from finecast.measure.study import Study
from finecast.reports.plan_report import check_content

DIGITS = Path(__file__).parents[3] / "examples" / "digits"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what ``tune --report`` leaves; for a target, whose times are modelled."""
    folder = tmp_path_factory.mktemp("report")
    shutil.copy(DIGITS / "digits.onnx", folder / "m.onnx")
    words = [
        "tune",
        str(folder / "m.onnx"),
        "-o",
        str(folder / "low.onnx"),
        "--metric",
        "top1",
    ]
    words += ["--data", str(DIGITS / "digits_eval.npz"), "--target", "avx512-vnni"]
    words += ["--max-trials", "1", "--report", str(folder / "r.html")]
    assert main(words) == 0
    return folder


def words(*given: object) -> int:
    return main(["report", *map(str, given)])


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_tune_writes_a_page_and_keeps_its_data(run: Path) -> None:
    assert (run / "r.html").read_text().startswith("<!doctype html>")
    kept = Study(run / "low.study.db").record()
    assert kept is not None
    content = json.loads(kept)
    check_content(content, where="study")
    assert content["model"]["name"] == "m.onnx"
    assert content["result"]["target"] == "avx512-vnni"
    assert all("facts" in v for v in content["values"] if v["from"] == "input")
    assert content["kernels"] == {}
    assert any(
        text.startswith("kernels: avx512-vnni is not here") for text in content["unknown"]
    )


def test_a_plan_finds_its_study(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert words(run / "low.plan.json") == 0
    said = " ".join(printed(capsys).split())  # wrapped lines
    assert "as fast, modelled for avx512-vnni" in said
    assert words(run / "low.plan.json", "--json") == 0
    assert json.loads(printed(capsys)) == json.loads(printed_study(run, capsys))


def printed_study(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert words(run / "low.study.db", "--json") == 0
    return printed(capsys)


def test_outputs_are_written_once(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, explorer = tmp_path / "r.html", tmp_path / "explorer"
    assert words(run / "low.plan.json", "-o", page, "--model-explorer", explorer) == 0
    assert f"wrote {explorer / 'graph.json'}" in printed(capsys)
    assert words(run / "low.plan.json", "-o", page) == ExitCode.USAGE
    assert words(run / "low.plan.json", "-o", page, "--force") == 0
    assert words(run / "low.plan.json", "-o", tmp_path / "r.json") == 0
    assert words(tmp_path / "r.json", "-o", tmp_path / "again.html") == 0
    assert (tmp_path / "again.html").read_text() == page.read_text()


def test_a_plan_without_its_study_tells_what_it_knows(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "alone.plan.json"
    shutil.copy(run / "low.plan.json", plan)
    assert words(plan, "--json") == 0
    alone = json.loads(printed(capsys))
    assert alone["result"] is None
    assert "inputs" not in alone["ops"][0]
    assert words(plan, run / "m.onnx", "--json") == 0
    with_model = json.loads(printed(capsys))
    assert with_model["ops"][0]["inputs"]
    assert words(plan, "--study", run / "low.study.db", "--json") == 0
    assert json.loads(printed(capsys))["result"]["verdict"] == "improved"


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["m.onnx"], "plan"),
        (["none.plan.json"], "No such file"),
        (["low.plan.json", "-o", "r.pdf"], ".html or .json"),
        (["low.plan.json", "-o", "low.plan.json"], "same file"),
        (["low.study.db", "--study", "low.study.db"], "something that is no plan"),
        (["low.plan.json", "--study", "none.db"], "no such study"),
    ],
)
def test_mistakes_are_one_line(
    run: Path,
    given: list[str],
    what: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(run)
    assert words(*given) == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert what in line


def test_changes_and_culprits_are_shown(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    low, found = tmp_path / "low.onnx", tmp_path / "blame.json"
    made = finecast.convert(run / "m.onnx", low, "all:bf16", verify=False, progress=False)
    old = tmp_path / "old.plan.json"
    old.write_text(made.plan.to_json())
    data = DIGITS / "digits_eval.npz"
    one = ["blame", str(run / "m.onnx"), str(low), "--data", str(data), "--json"]
    assert main([*one, "--max-error", "0.002"]) == ExitCode.NOT_IMPROVED
    found.write_text(printed(capsys))
    plan, page = run / "low.plan.json", tmp_path / "r.html"
    assert words(plan, "--diff", old, "--blame", found, "-o", page) == 0
    said = " ".join(printed(capsys).split())
    assert f"From {old}: 25 ops in both" in said
    assert f"{low}: " in said or "low.onnx: " in said
    assert words(run / "low.study.db", "--diff", old) == ExitCode.USAGE
    assert "has no plan that can be compared" in capsys.readouterr().err
    assert words(plan, "--blame", old) == ExitCode.USAGE
    assert "blame has no 'low'" in capsys.readouterr().err
    assert words(plan, "--blame", page) == ExitCode.USAGE
    assert "it is no JSON" in capsys.readouterr().err


def test_another_model_is_refused(run: Path, tmp_path: Path) -> None:
    model, other = onnx.load(DIGITS / "digits.onnx"), tmp_path / "other.onnx"
    next(node for node in model.graph.node if node.op_type == "Relu").op_type = "Tanh"
    onnx.save(model, other)
    with pytest.raises(UsageError, match=r"another model.*written as other ops: 1"):
        finecast.report(run / "low.plan.json", model=other)


def test_a_study_of_another_hand_is_refused(run: Path, tmp_path: Path) -> None:
    study = tmp_path / "low.study.db"
    shutil.copy(run / "low.study.db", study)
    with closing(sqlite3.connect(study)) as db, db:
        db.execute("UPDATE records SET content = '{\"kind\": 1}'")
    with pytest.raises(UsageError, match="not a report that is read here"):
        finecast.report(study)


def test_a_study_without_a_finished_run_says_so(tmp_path: Path) -> None:
    Study(tmp_path / "s.db")
    with pytest.raises(UsageError, match="no finished run"):
        finecast.report(tmp_path / "s.db")


@pytest.mark.parametrize(
    ("content", "text"), [(b"", "it is empty"), (b"not a database" * 9, "it is no database")]
)
def test_a_study_is_not_called_a_plan(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "m.study.db"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=f"not a study: {text}"):
        finecast.report(path)
