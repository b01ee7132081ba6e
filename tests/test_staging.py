"""What a process that was killed left beside its output: the next command removes it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import onnx
import pytest

import finecast
from finecast.files import CommandFiles, locks
from finecast.files.staging import remove_abandoned, staging
from tests.frontends.tools import parse

WRITES = """
import sys
from pathlib import Path
from finecast.files.staging import staging
with staging(Path(sys.argv[1])) as folder:
    (folder / "half.onnx").write_bytes(b"1" * 2_000_000)
    print(folder, flush=True)
    sys.stdin.read()
"""


@contextmanager
def writing_in(place: Path) -> Generator[tuple[subprocess.Popen[str], Path]]:
    """A process that is writing into a staging folder in ``place``."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITES, str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_only_what_the_dead_left_is_removed(tmp_path: Path) -> None:
    strange = tmp_path / ".finecast-mine"
    strange.mkdir()
    (strange / "notes.txt").write_text("kept")
    with writing_in(tmp_path) as (process, folder), staging(tmp_path) as own:
        assert remove_abandoned(tmp_path) == []
        assert folder.is_dir()
        assert own.is_dir()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        told = remove_abandoned(tmp_path)
        left = f"removed {folder.parent} (2.0 MB)"
        assert told == [f"{left}, which process {process.pid} left as it was ended"]
        assert own.is_dir()
    assert [p.name for p in tmp_path.iterdir()] == [".finecast-mine"]


def test_several_folders_are_one_note(tmp_path: Path) -> None:
    with writing_in(tmp_path) as (first, _), writing_in(tmp_path) as (second, _):
        for process in (first, second):
            process.kill()
            process.wait()
        owners = sorted(f"process {p.pid}" for p in (first, second))
        removed = f"removed 2 temporary folders in {tmp_path} (4.0 MB)"
        left = f"which {owners[0]}, {owners[1]} left as they were ended"
        assert remove_abandoned(tmp_path) == [f"{removed}, {left}"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    other, place = tmp_path / "other", tmp_path / "place"
    other.mkdir()
    place.mkdir()
    with writing_in(other) as (process, folder):
        process.kill()
        process.wait()
        (place / ".finecast-link").symlink_to(folder.parent)
        assert remove_abandoned(place) == []
        assert (folder / "half.onnx").is_file()


def test_commands_remove_it_and_say_so(tmp_path: Path) -> None:
    """Where outputs are, and nowhere else."""
    with writing_in(tmp_path) as (process, _):
        process.kill()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    files = CommandFiles()
    files.write("--output", elsewhere / "m.onnx")
    with files.locked() as removed:
        assert removed == []
    onnx.save(parse("g (float[N] x) => (float[N] y) { y = Relu (x) }"), elsewhere / "m.onnx")
    done = finecast.convert(elsewhere / "m.onnx", tmp_path / "low.onnx", "all:bf16")
    assert any(f"which process {process.pid} left" in text for text in done.warnings)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "low.onnx"]


HOLDS = """
import sys
import onnx
from finecast.frontends import onnx as frontend
held = frontend.from_model(onnx.load(sys.argv[1]))
print(held.path, flush=True)
sys.stdin.read()
"""


def test_a_model_in_memory_leaves_nothing_once_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next command removes it, wherever it writes."""
    net, temporary = tmp_path / "net.onnx", tmp_path / "temporary"
    onnx.save(parse("g (float[N] x) => (float[N] y) { y = Relu (x) }"), net)
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(net)],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        held = Path(process.stdout.readline().strip())
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        assert finecast.convert(net, None, "all:bf16", verify=False).warnings == ()
        assert held.is_file()  # its process lives
        process.kill()
    done = finecast.convert(onnx.load(net), None, "all:bf16", verify=False)
    assert any(f"which process {process.pid} left" in text for text in done.warnings)
    assert not held.exists()
    del done
    gc.collect()
    assert [*temporary.iterdir()] == []


@pytest.mark.parametrize("owner", [b"", b"no number", b"\xff\xfe"])
def test_a_folder_that_nobody_signed_stays(owner: bytes, tmp_path: Path) -> None:
    folder = tmp_path / ".finecast-abc"
    folder.mkdir()
    (folder / "owner").write_bytes(owner)
    assert remove_abandoned(tmp_path) == []
    assert folder.is_dir()


def test_a_folder_is_its_processes_until_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process that looks in between would remove it, and say that this one died."""
    left: list[Path] = []

    def release(descriptor: int | None) -> None:
        left.extend(tmp_path.iterdir())
        locks.release(descriptor)

    monkeypatch.setattr(sys.modules[remove_abandoned.__module__], "release", release)
    with staging(tmp_path):
        pass
    assert not left


def test_a_removal_that_is_interrupted_is_finished(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    removed = list[str]()
    remove = tempfile.TemporaryDirectory[str].cleanup

    def interrupted(folder: tempfile.TemporaryDirectory[str]) -> None:
        removed.append(folder.name)
        if len(removed) == 1:
            raise KeyboardInterrupt
        remove(folder)

    monkeypatch.setattr(tempfile.TemporaryDirectory, "cleanup", interrupted)
    with pytest.raises(KeyboardInterrupt), staging(tmp_path):
        pass
    assert len(removed) == 2
    assert not [*tmp_path.iterdir()]
