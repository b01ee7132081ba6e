"""Too little memory, too few open files: the error names the limit, and nothing is left."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from finecast.cli import main
from finecast.errors import EngineError, ExitCode, UsageError, not_imported
from finecast.files.staging import staging
from finecast.processes import memory
from finecast.processes.memory import limit_error

resource = pytest.importorskip("resource")
LINUX = sys.platform == "linux"


def convert(net: Path, kind: int, most: int) -> subprocess.CompletedProcess[str]:
    """Convert a net in a process that may have at most so much of a resource."""
    temporary = net.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    options = ("--auto-cast", "all", "--no-verify", "--force")
    # finecast limits OpenBLAS's threads itself.
    without = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    verb = ("convert", str(net), "-o", str(net.with_name("low.onnx")))
    return subprocess.run(
        [sys.executable, "-m", "finecast", *verb, *options],
        env={**without, "TMPDIR": str(temporary)},
        preexec_fn=lambda: resource.setrlimit(kind, (most, most)),
        capture_output=True,
        text=True,
        check=False,
    )


def left(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".finecast-*")]


@pytest.mark.skipif(not LINUX, reason="needs limits as Linux has them")
@pytest.mark.parametrize("most", [6, 8, 10])
def test_too_few_open_files(net: Path, most: int) -> None:
    done = convert(net, resource.RLIMIT_NOFILE, most)
    if done.returncode != ExitCode.DONE:
        assert done.returncode == ExitCode.USAGE
        assert "too many open files" in done.stderr.splitlines()[-1]
    assert not left(net.parent)


@pytest.mark.skipif(not LINUX, reason="needs limits as Linux has them")
@pytest.mark.parametrize("most_mb", [150, 222, 368, 560, 590, 660])
def test_too_little_memory(net: Path, most_mb: int) -> None:
    done = convert(net, resource.RLIMIT_AS, most_mb << 20)
    if done.returncode != ExitCode.DONE:
        assert done.returncode == ExitCode.MEMORY, done.stderr
        assert "out of memory" in done.stderr.splitlines()[-1]
    assert not left(net.parent)


@pytest.mark.skipif(not LINUX, reason="needs limits as Linux has them")
def test_openblas_has_its_buffer_before_other_work(net: Path) -> None:
    """Without it OpenBLAS ends the process where a later product gets no memory."""
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from finecast.processes.memory import reserve_memory\n"
        "reserve_memory()\n"
        "import numpy as np\n"
        "squares = np.ones((300, 300)), np.empty((300, 300))\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used, used))\n"
        "np.matmul(squares[0], squares[0], out=squares[1])\n"
        "print(squares[1][0, 0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout == "300.0\n", done.stderr


def test_a_file_that_was_written_before_a_failure_is_named(
    net: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("finecast.native.conversion.speed_of", fails)
    output = tmp_path / "written.onnx"
    verb = ["convert", str(net), "-o", str(output), "--op", "MatMul=bf16"]
    assert main([*verb, "--auto-cast", "all", "--auto-cast-type", "bf16"]) == ExitCode.MEMORY
    assert output.exists()
    assert f"{output} was written whole" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (ModuleNotFoundError("No module named 'openvino'"), "OpenVINO is not installed"),
        (ImportError("libGL.so.1: no such file"), "cannot be imported: libGL.so.1"),
    ],
)
def test_a_library_that_fails_to_load_is_not_called_absent(
    cause: ImportError, text: str
) -> None:
    assert text in not_imported("OpenVINO", cause, install="pip install openvino").what


def of(cause: BaseException, error: Exception | None = None) -> Exception:
    error = error or EngineError("OpenVINO has no device 'CPU' here", fix="use one of none")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "cause",
    [
        MemoryError("10 GB"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("bad allocation"),
        ImportError("engine.so: failed to map segment from shared object"),
        of(RuntimeError("could not create: can't alloc")),
    ],
    ids=str,
)
def test_a_lack_of_memory_is_seen_behind_an_error(cause: BaseException) -> None:
    found = limit_error(of(cause))
    assert found is not None
    assert found.exit_code == ExitCode.MEMORY
    assert found.what.startswith("out of memory")


def test_errors_at_the_limit_of_addresses_come_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limit_error(of(ValueError("x"))) is None
    monkeypatch.setattr(memory, "_reached_limit", lambda: 400_000_000)
    found = limit_error(of(ValueError("x")))
    assert found is not None
    assert found.exit_code == ExitCode.MEMORY
    assert found.what == (
        "out of memory: the limit of 400 MB was reached, and what failed was: OpenVINO has no"
        " device 'CPU' here"
    )
    assert limit_error(UsageError("no such file")) is None


def test_exceptions_that_come_of_one_another_are_walked_once() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert limit_error(one) is None


@pytest.mark.skipif(not LINUX, reason="needs limits as Linux has them")
def test_a_temporary_folder_goes_where_no_file_can_be_opened(tmp_path: Path) -> None:
    """All but one of the files that this process may open are open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []
    try:
        with staging(tmp_path) as folder:
            (folder / "inner").mkdir()
            (folder / "inner" / "file").write_text("x")
            highest = os.open(os.devnull, os.O_RDONLY)
            opened.append(highest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
            with suppress(OSError):
                while True:
                    opened.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in opened:
            os.close(descriptor)
    assert left(tmp_path) == []
