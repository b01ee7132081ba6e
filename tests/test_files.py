"""No file of a command is written that the command reads, whatever it is called."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from finecast.errors import UsageError
from finecast.files import CommandFiles, writing


def same(path: Path) -> Path:
    return path


def dotted(path: Path) -> Path:
    return path.parent / ".." / path.parent.name / path.name


def relative(path: Path) -> Path:
    return Path(os.path.relpath(path))


def symlinked(path: Path) -> Path:
    link = path.parent / "link"
    link.symlink_to(path)
    return link


def hard_linked(path: Path) -> Path:
    link = path.parent / "hard"
    link.hardlink_to(path)
    return link


def in_linked_folder(path: Path) -> Path:
    (path.parent / "folder").symlink_to(path.parent)
    return path.parent / "folder" / path.name


NAMES = [same, dotted, relative, symlinked, hard_linked, in_linked_folder]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.write_text("of the user's")
    return path


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("output_first", [False, True])
def test_what_is_read_is_not_written(
    model: Path, name: Callable[[Path], Path], force: bool, output_first: bool
) -> None:
    other = name(model)
    files = CommandFiles(force=force)
    if output_first and force and not other.is_symlink():  # a link is no output anyway
        files.write("-o", other)
        with pytest.raises(UsageError, match=r"MODEL and -o are the same file.*-o another"):
            files.read("MODEL", model)
    else:
        files.read("MODEL", model)
        with pytest.raises(UsageError, match=r"-o and MODEL are the same file.*-o another"):
            files.write("-o", other, replaces=False)


@pytest.mark.parametrize("name", [same, dotted, relative, in_linked_folder, symlinked])
def test_no_file_is_written_twice(tmp_path: Path, name: Callable[[Path], Path]) -> None:
    files = CommandFiles(force=True)
    files.write("-o", tmp_path / "new")
    with pytest.raises(UsageError, match="plan_out and -o are the same file"):
        files.write("--plan-out", name(tmp_path / "new"))


def test_of_files_to_come_case_makes_no_other(tmp_path: Path) -> None:
    files = CommandFiles()
    files.write("-o", tmp_path / "New")
    with pytest.raises(UsageError, match="are the same file"):
        files.write("--plan-out", tmp_path / "nEW")


@pytest.mark.parametrize("force", [False, True])
def test_what_is_written_beside_an_output_counts(model: Path, force: bool) -> None:
    data = model.with_name("low.data")
    data.write_text("of the user's")
    files = CommandFiles(force=force)
    files.read("the data", data)
    with pytest.raises(UsageError, match=r"-o \(with low.data\) and the data are the same"):
        files.write("-o", model.with_name("low"), beside=[model.with_name("low.data")])


@pytest.mark.parametrize("first", ["read", "write"])
def test_nothing_is_written_into_a_folder_that_is_read(tmp_path: Path, first: str) -> None:
    folder = tmp_path / "saved_model"
    (folder / "variables").mkdir(parents=True)
    within = tmp_path / "saved_model" / ".." / "saved_model" / "variables" / "low.xml"
    files = CommandFiles(force=True)
    claims = {
        "read": lambda: files.read("MODEL", folder),
        "write": lambda: files.write("--output", within),
    }
    claims.pop(first)()
    with pytest.raises(UsageError, match="output is in a folder that is read"):
        claims.popitem()[1]()
    beside = CommandFiles(force=True)
    beside.read("MODEL", folder)
    beside.write("--output", tmp_path / "saved_model_low")


def test_two_inputs_may_be_one_file(model: Path) -> None:
    files = CommandFiles()
    files.read("MODEL", model, None, dotted(model))


def test_only_force_replaces(model: Path) -> None:
    files = CommandFiles()
    files.write("-o", model)
    with pytest.raises(UsageError, match="output exists"):
        files.check_replaced()
    plan = model.with_suffix(".json")
    plan.touch()
    files.write("--plan-out", plan)
    both = rf"outputs exist \({model}, {plan}\)"
    with pytest.raises(UsageError, match=both), files.locked():
        pass
    CommandFiles(force=True).write("-o", model)
    CommandFiles().write("--study", model, replaces=False)


@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_file_is_never_replaced(tmp_path: Path, force: bool) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="no ordinary file"):
        CommandFiles(force=force).write("-o", pipe)
    with pytest.raises(UsageError, match="is a directory"):
        CommandFiles(force=force).write("-o", tmp_path)


def test_stale_is_what_was_there_and_was_not_replaced(tmp_path: Path) -> None:
    for name in ("kept", "replaced", "study"):
        (tmp_path / name).write_text("of before")
    files = CommandFiles(force=True)
    for name in ("kept", "replaced", "new"):
        files.write(name, tmp_path / name)
    files.write("study", tmp_path / "study", replaces=False)
    (tmp_path / "staged").write_text("of now")
    (tmp_path / "staged").replace(tmp_path / "replaced")
    (tmp_path / "new").write_text("of now")
    assert files.stale() == ()  # nothing was begun: the names may still be refused
    files.check_replaced()
    assert files.stale() == (tmp_path / "kept",)


@pytest.mark.parametrize("ends", [KeyboardInterrupt, ValueError])
def test_what_an_interrupted_command_wrote_is_removed(
    tmp_path: Path, ends: type[BaseException]
) -> None:
    """An error after a model was written, as of a report, leaves the model."""
    names = ("m.xml", "m.bin", "old.json", "kept.json", "study.db", "folder")
    model, data, old, kept, study, folder = (tmp_path / name for name in names)
    for path in (old, kept):
        path.write_text("before")
    files = CommandFiles(force=True)
    files.write("the model", model, beside=[data])
    files.write("the plan", old)
    files.write("the lock", kept)
    files.write("the study", study, replaces=False)
    files.write("a SavedModel", folder, folder="saved_model.pb")

    def works() -> None:
        for path in (data, model, study):
            path.write_text("now")
        folder.mkdir()
        (folder / "saved_model.pb").write_text("now")
        old.write_text("now, and longer")
        raise ends

    with pytest.raises(ends), files.locked():
        works()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == ({"kept.json", "study.db"} if ends is KeyboardInterrupt else {*names})


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc here")
def test_a_folder_that_takes_no_files_is_refused_at_once() -> None:
    """Whatever rights the user has in it."""
    with pytest.raises(UsageError, match="not writable"):
        CommandFiles().write("-o", Path("/proc/model.onnx"))


@pytest.mark.parametrize("leads_to", ["file", "nothing"])
def test_a_link_is_no_output(tmp_path: Path, leads_to: str) -> None:
    # it would be replaced by the model, and what it leads to keep the old one
    if leads_to == "file":
        (tmp_path / "real.onnx").write_text("old")
    link = tmp_path / "link.onnx"
    link.symlink_to(tmp_path / "real.onnx")
    files = CommandFiles(force=True)
    with pytest.raises(UsageError, match=r"output is a link to .*real\.onnx"):
        files.write("-o", link)
    # what is added to is followed
    CommandFiles().write("--study", link, replaces=False)


def test_a_link_is_no_folder_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "saved_model.pb").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UsageError, match="output is a link"):
        CommandFiles(force=True).write("-o", tmp_path / "link", folder="saved_model.pb")


def test_a_name_that_is_too_long_is_to_be_shorter(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 300)
    with pytest.raises(UsageError, match="choose a shorter name"), writing(path):
        path.write_text("")
