"""No two commands write one file at the same time; what ended holds nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from finecast.errors import UsageError
from finecast.files import CommandFiles
from finecast.files.locks import locked, release_all

HOLDER = """
import sys
from pathlib import Path
from finecast.files.locks import locked
with locked({Path(sys.argv[1]): "it"}):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_elsewhere(path: Path) -> Generator[subprocess.Popen[str]]:
    """Another process holds the lock of ``path``."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_the_error_names_the_process(tmp_path: Path) -> None:
    output = tmp_path / "é out.onnx"
    with held_elsewhere(output) as process:
        wanted = f"-o is being written by another finecast, process {process.pid} .*kill"
        with pytest.raises(UsageError, match=wanted), locked({output: "-o"}):
            pass


def test_a_link_is_no_other_output(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    again = tmp_path / "link" / "out.onnx"
    with (
        held_elsewhere(tmp_path / "out.onnx"),
        pytest.raises(UsageError, match="another finecast"),
        locked({again: "-o"}),
    ):
        pass


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    with held_elsewhere(output) as process:
        process.kill()
        process.wait()
        assert list(tmp_path.iterdir())
        with locked({output: "-o"}):
            pass
    assert not list(tmp_path.iterdir())


def test_the_next_command_in_the_folder_removes_the_locks_of_dead_ones(tmp_path: Path) -> None:
    with (
        held_elsewhere(tmp_path / "dead.onnx") as dead,
        held_elsewhere(tmp_path / "living.onnx") as living,
    ):
        dead.kill()
        dead.wait()
        (tmp_path / ".finecast-mine.lock").write_text("of another program")
        files = CommandFiles(force=False)
        files.write("the output", tmp_path / "other.onnx")
        with files.locked():
            left = {path.name for path in tmp_path.iterdir()}
        names = ("living.onnx", "mine", "other.onnx")
        assert left == {f".finecast-{name}.lock" for name in names}
        wanted = f"process {living.pid}"
        with pytest.raises(UsageError, match=wanted), locked({tmp_path / "living.onnx": "-o"}):
            pass


def test_calls_inside_one_another_pass_and_threads_do_not(tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    refused: list[str] = []

    def other() -> None:
        try:
            with locked({output: "the output"}):
                pass
        except UsageError as error:
            refused.append(error.what)

    with locked({output: "-o"}):
        with locked({output: "the output"}):
            pass
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert refused == [
        "the output is being written by another finecast, another thread of this process"
    ]
    assert not list(tmp_path.iterdir())


def test_where_no_file_can_be_made_there_is_no_lock(tmp_path: Path) -> None:
    with locked({tmp_path / "absent" / "out": "-o", tmp_path / ("n" * 250): "-o"}):
        pass
    assert not list(tmp_path.iterdir())


def test_release_all_leaves_no_file(tmp_path: Path) -> None:
    with locked({tmp_path / "out": "-o"}):
        release_all()
        assert not list(tmp_path.iterdir())


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("kept")
    (tmp_path / ".finecast-low.onnx.lock").symlink_to(victim)
    with locked({tmp_path / "low.onnx": "the output"}):
        assert victim.read_text() == "kept"
    assert victim.read_text() == "kept"
