"""No command destroys a file of the user's."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest

import finecast as api
from finecast.errors import ExitCode, UsageError
from finecast.measure.study import Study
from finecast.planning.plan import Plan
from tests.cli.conftest import Answer

Finecast = Callable[..., Answer]


@pytest.fixture
def here(tmp_path: Path, net: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that commands read; the model has its tensors beside it."""
    monkeypatch.chdir(tmp_path)
    model = onnx.load(net)
    net.unlink()
    for tensor in model.graph.initializer:  # external data is made of raw bytes alone
        array = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save(
        model,
        net,
        save_as_external_data=True,
        location="weights.data",
        size_threshold=0,
    )
    data.rename("val.npz")
    np.savez("calib.npz", x=np.zeros((4, 16), np.float32))
    Path("mine.py").write_text(
        "def score(run): return 1.0\ndef feeds(): yield {}\ndef rule(node): return None\n"
    )
    Path("old.plan.json").write_text("{}")
    Path("link.onnx").symlink_to("net.onnx")
    Path("hard.onnx").hardlink_to("net.onnx")
    Path("program.hlo").write_text("")
    Path("program.neff").write_text("")
    Path("net.pt2").write_text("")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


TUNE = "tune net.onnx --data val.npz --calib calib.npz --rules mine.py --force"
EVAL = "tune net.onnx --eval mine.py:score --calib mine.py:feeds --force"
CONVERT = "convert net.onnx --data val.npz --calib calib.npz --rules mine.py --force"
APPLY = "apply old.plan.json net.onnx --data val.npz --force"
LADDER = "ladder net.onnx --target trn1 --data val.npz --calib calib.npz --force"


@pytest.mark.parametrize(
    "line",
    [
        *(
            f"{verb} -o {output}"
            for verb in (TUNE, CONVERT, APPLY, LADDER)
            for output in ("net.onnx", "./net.onnx", "link.onnx", "hard.onnx")
        ),
        *(f"{verb} -o val.npz" for verb in (TUNE, CONVERT, APPLY, LADDER)),
        *(f"{verb} -o calib.npz" for verb in (TUNE, CONVERT, LADDER)),
        f"{TUNE} -o mine.py",
        f"{EVAL} -o mine.py",
        f"{APPLY} -o old.plan.json",
        *(
            f"{CONVERT} -o low.onnx --plan-out {path}"
            for path in (
                "net.onnx",
                "low.onnx",
                "LOW.onnx",
                "low.onnx.data",
                "weights.data",
                "val.npz",
                "mine.py",
            )
        ),
        f"{LADDER} --compile program.neff",
        "convert net.pt2 -o net.pt2 --force",
        "convert net.pt2 -o low.pt2 --plan-out net.pt2 --force",
        "tune net.pt2 -o ./net.pt2 --data val.npz --force",
        "tune net.pt2 -o val.npz --data val.npz --force",
        f"{LADDER} --compile program.hlo -o program.neff",
    ],
)
def test_two_paths_of_a_command_are_never_one_file(
    finecast: Finecast, here: Path, line: str
) -> None:
    before = contents(here)
    answer = finecast(*line.split())
    assert answer.code == ExitCode.USAGE, answer.err
    assert "are the same file" in answer.err
    assert answer.err.count("\n") == 1
    assert contents(here) == before


@pytest.mark.parametrize("output", ["weights", "weights.data"])
@pytest.mark.parametrize("verb", [TUNE, CONVERT, APPLY, LADDER])
def test_the_model_s_external_data_is_no_output(
    finecast: Finecast, here: Path, verb: str, output: str
) -> None:
    """It is refused by its name, before the model is read."""
    before = contents(here)
    answer = finecast(*f"{verb} -o {output}".split())
    assert answer.code == ExitCode.USAGE, answer.err
    assert "name it weights.onnx" in answer.err
    assert answer.err.count("\n") == 1
    assert contents(here) == before


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize("content", [b"", b"letter", b"SQLite format 3\0" + bytes(200), None])
def test_what_is_no_study_is_never_opened_for_writing(
    finecast: Finecast, here: Path, content: bytes | None, force: list[str]
) -> None:
    mine = here / "low.study.db"
    if content is not None:
        mine.write_bytes(content)
    else:
        with closing(sqlite3.connect(mine)) as db, db:
            db.execute("CREATE TABLE letters (text)")
    before = contents(here)
    options = ["--data", "val.npz", *force]
    for resume in ([], ["--resume"]):
        answer = finecast("tune", "net.onnx", "-o", "low.onnx", *options, *resume)
        assert answer.code == ExitCode.USAGE
        assert "not a finecast study" in answer.err
        assert contents(here) == before


def test_a_study_that_was_tampered_with_is_an_error(finecast: Finecast, here: Path) -> None:
    for number, change in enumerate(
        (
            "CREATE TABLE more (x)",
            "CREATE TRIGGER t AFTER INSERT ON trials BEGIN DELETE FROM trials; END",
            "ALTER TABLE trials DROP COLUMN name",
            "DROP TABLE trials",
        )
    ):
        path = here / f"{number}.db"
        Study(path)
        with closing(sqlite3.connect(path)) as db, db:
            db.execute(change)
        path.replace(here / "low.study.db")
        answer = finecast("tune", "net.onnx", "-o", "low.onnx", "--data", "val.npz")
        assert answer.code == ExitCode.USAGE
        assert "not a finecast study: its tables are others" in answer.err


def test_tensors_beside_the_output_are_checked_before_any_work(
    finecast: Finecast, here: Path
) -> None:
    (here / "low.onnx.data").write_text("of the user's")
    before = contents(here)
    options = ["--data", "val.npz", "--external-data"]
    answer = finecast("convert", "net.onnx", "-o", "low.onnx", *options)
    assert answer.code == ExitCode.USAGE
    assert "output exists (low.onnx.data)" in answer.err
    assert contents(here) == before


def test_the_python_api_refuses_too(here: Path) -> None:
    before = contents(here)
    model = here / "net.onnx"
    plan = Plan(model="m", policy="all:bf16", opset=17, decisions=())
    same, name = "are the same file", "name it .*weights.onnx"
    outputs = {"net.onnx": same, "hard.onnx": same, "val.npz": same, "weights": name}
    for output, refusal in ((here / path, text) for path, text in outputs.items()):
        with pytest.raises(UsageError, match=refusal):
            api.convert(model, output, data=here / "val.npz", force=True)
        with pytest.raises(UsageError, match=refusal):
            api.apply(plan, api.load(model), output, data=here / "val.npz", force=True)
        with pytest.raises(UsageError, match=refusal):
            api.tune(model, output, data=here / "val.npz", force=True)
    with pytest.raises(UsageError, match="are the same file"):
        api.tune(model, data=here / "val.npz", study=here / "val.npz")
    assert contents(here) == before


@pytest.mark.parametrize("verb", ["convert", "apply", "tune"])
def test_an_older_output_is_called_stale_by_what_fails(
    finecast: Finecast, net: Path, data: Path, tmp_path: Path, verb: str
) -> None:
    old, plan, other = tmp_path / "low.onnx", tmp_path / "plan.json", tmp_path / "other.onnx"
    assert finecast("convert", net, "-o", old, "--plan-out", plan).code == ExitCode.DONE
    before, model = old.read_bytes(), onnx.load(net)
    del model.graph.node[1:]
    model.graph.output[0].name = model.graph.node[0].output[0]
    onnx.save(model, other)
    fails = {
        "convert": ("convert", net, "-o", old, "--exclude", "no such node"),
        "apply": ("apply", plan, other, "-o", old),
        "tune": ("tune", net, "-o", old, "--data", data, "--exclude", "no such node"),
    }
    answer = finecast(*fails[verb], "--force")
    assert answer.code not in (ExitCode.DONE, ExitCode.NOT_IMPROVED)
    assert f"warning: STALE: {old} is there from before" in answer.err
    assert old.read_bytes() == before
    fresh = [tmp_path / "new.onnx" if word == old else word for word in fails[verb]]
    assert "STALE" not in finecast(*fresh, "--force").err


def test_an_older_output_is_called_stale(
    finecast: Finecast, net: Path, data: Path, tmp_path: Path
) -> None:
    old, plan = tmp_path / "low.onnx", tmp_path / "low.plan.json"
    old.write_text("of an earlier run")
    plan.write_text("of an earlier run")
    line = ("tune", net, "-o", old, "--data", data, "--auto-cast", "none", "--force")
    answer = finecast(*line, "--json")
    assert answer.code == ExitCode.NOT_IMPROVED
    assert set(answer.json["stale"]) == {str(plan), str(old)}
    for path in (old, plan):
        assert f"warning: STALE: {path} is there from before" in answer.err
        assert path.read_text() == "of an earlier run"  # it may be anyone's: it is kept
    assert finecast(*line[:3], tmp_path / "new.onnx", *line[4:]).err == ""
    found = api.tune(net, old, data=data, policy="none:bf16", force=True)
    assert set(found.stale) == {plan, old}


def test_a_file_of_python_need_not_be_called_so(finecast: Finecast, here: Path) -> None:
    Path("mine").write_bytes(Path("mine.py").read_bytes())
    before = contents(here)
    answer = finecast(*EVAL.replace("mine.py", "mine").split(), "-o", "mine")
    assert answer.code == ExitCode.USAGE
    assert "are the same file" in answer.err
    assert contents(here) == before


@pytest.mark.parametrize("path", [".", "/", ""])
@pytest.mark.parametrize(
    "line",
    [
        "convert net.onnx -o",
        "tune net.onnx --data val.npz -o",
        "convert net.onnx -o low.onnx --plan-out",
        "ladder net.onnx --target trn1 --data val.npz -o",
        "ladder net.onnx --target trn1 --data val.npz --compile",
    ],
)
def test_a_path_without_a_file_name_is_refused(
    finecast: Finecast, here: Path, line: str, path: str
) -> None:
    before = contents(here)
    answer = finecast(*line.split(), path)
    assert answer.code == ExitCode.USAGE, answer.err
    said = ("directory", "folder") if path else ("the value is empty",)
    assert any(words in answer.err for words in said), answer.err
    assert contents(here) == before


@pytest.mark.parametrize(
    "line",
    [
        ["convert", "", "-o", "o.onnx"],
        ["convert", "net.onnx", "-o", ""],
        ["tune", "net.onnx", "-o", "o.onnx", "--data", ""],
        ["convert", "net.onnx", "-o", "o.onnx", "--plan-out", ""],
    ],
)
def test_an_empty_name_is_no_folder(
    finecast: Finecast, net: Path, data: Path, line: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path of no letters is the current folder, of which errors were."""
    monkeypatch.chdir(net.parent)
    answer = finecast(*line)
    assert answer.code == ExitCode.USAGE
    assert " is empty" in answer.err
    assert "unset" in answer.err


@pytest.mark.parametrize("verb", ["inspect", "profile", "convert", "tune", "explain"])
def test_a_pipe_is_not_waited_for(
    finecast: Finecast, net: Path, tmp_path: Path, verb: str
) -> None:
    """A model from a pipe without a writer, or data, which are no archive then."""
    pipe = tmp_path / "pipe.onnx"
    os.mkfifo(pipe)
    writes = ["-o", tmp_path / "o.onnx"] if verb in ("convert", "tune") else []
    read = ["--data", pipe, "--metric", "cosine"] if verb == "tune" else []
    answer = finecast(verb, net if verb == "tune" else pipe, *writes, *read)
    assert answer.code == ExitCode.USAGE
    assert "is no ordinary file" in answer.err
