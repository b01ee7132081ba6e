"""onnx's passes in a process of their own: what happens to it there is one error here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import onnx
import pytest

from finecast.frontends.onnx import native, native_worker
from finecast.frontends.onnx.native import PassDiedError, PassError
from finecast.processes.worker import Worker
from tests.frontends import hostile_worker
from tests.frontends.hostile_worker import CRASHES, GROWS, HANGS, NOTHING, PRINTS, SAYS_PID
from tests.frontends.tools import parse

MODEL = parse("g (float[N] x) => (float[N] y) { h = Relu (x) y = Exp (h) }")


@pytest.fixture(autouse=True)
def hostile(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker whose ``convert`` does what its version says."""
    worker = Worker(hostile_worker.__file__, instead=native_worker.answer)
    monkeypatch.setattr(native, "_worker", worker)
    yield
    worker.end()


def ask(version: int) -> onnx.ModelProto:
    return native.transform("convert", MODEL, version=version)


def pid() -> int:
    with pytest.raises(PassError) as error:
        ask(SAYS_PID)
    return int(str(error.value))


def test_a_real_pass_and_the_first_line_of_an_error() -> None:
    inferred = native.transform("infer", MODEL, data_prop=1)
    assert [v.name for v in inferred.graph.value_info] == ["h"]
    assert pid() not in (0, os.getpid())


def test_one_process_serves_all_requests() -> None:
    native.warm_up()
    assert pid() == pid()


def test_ctrl_c_is_not_for_it() -> None:
    before = pid()
    os.kill(before, signal.SIGINT)
    assert pid() == before


def test_ctrl_c_while_it_works() -> None:
    """The interrupt comes through at once, and the next answer is that of the next request."""
    before = pid()
    with interrupted(every_s=0.3):
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            ask(HANGS)
    assert time.monotonic() - start < 10
    assert pid() != before


@contextmanager
def interrupted(*, every_s: float) -> Generator[None]:
    """Ctrl-C until one came through: one that comes just before a read begins is not seen."""
    here, seen = threading.get_ident(), threading.Event()

    def once(number: int, frame: FrameType | None) -> None:
        if not seen.is_set():
            seen.set()
            signal.default_int_handler(number, frame)

    def press() -> None:
        while not seen.wait(every_s):
            signal.pthread_kill(here, signal.SIGINT)

    handler = signal.signal(signal.SIGINT, once)
    keys = threading.Thread(target=press)
    keys.start()
    try:
        yield
    finally:
        seen.set()
        keys.join()
        signal.signal(signal.SIGINT, handler)


def test_what_a_pass_prints_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    assert ask(PRINTS) == MODEL
    assert capfd.readouterr() == ("", "")


def test_a_crash() -> None:
    before = pid()
    with pytest.raises(PassDiedError, match=r"version converter crashed \(SIGSEGV\)"):
        ask(CRASHES)
    assert pid() != before


def test_a_pass_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "OF_MESSAGES", native.Bounds(seconds=0.5))
    before = pid()
    start = time.monotonic()
    with pytest.raises(PassDiedError, match="version converter did not end in"):
        ask(HANGS)
    assert time.monotonic() - start < 10
    assert pid() != before


def test_a_pass_that_takes_all_memory() -> None:
    before = pid()
    with pytest.raises(PassDiedError, match="version converter ran out of memory"):
        ask(GROWS)
    assert pid() != before


def test_a_process_that_others_ended() -> None:
    before = pid()
    os.kill(before, signal.SIGKILL)
    os.waitid(os.P_PID, before, os.WEXITED | os.WNOWAIT)
    assert ask(NOTHING) == MODEL


def test_it_ends_with_the_one_that_started_it() -> None:
    code = (
        "import os, sys; from finecast.frontends.onnx import native\n"
        "native.warm_up(); child = native._worker.serving()\n"
        "print(child.process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    deadline = time.monotonic() + 10
    while runs(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not runs(int(done.stdout))


def runs(number: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def hang() -> None:
    with pytest.raises(PassDiedError):
        ask(HANGS)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_while_a_pass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forked process has a worker of its own; this one's goes on, and ends at its end."""
    before = pid()
    # More than a busy machine takes to get here: it ends when it is killed below.
    monkeypatch.setattr(native, "OF_MESSAGES", native.Bounds(seconds=120))
    at_work = threading.Thread(target=hang)
    at_work.start()
    while not native._worker.lock.locked():
        time.sleep(0.01)
    reader, writer = os.pipe()
    forked = os.fork()
    if not forked:
        try:
            os.write(writer, str(pid()).encode())
        finally:
            native._worker.end()
            os._exit(0)
    os.close(writer)
    assert int(os.read(reader, 99)) not in (0, before)
    os.close(reader)
    os.waitpid(forked, 0)
    os.kill(before, signal.SIGKILL)
    at_work.join()
    assert pid() != before


@pytest.mark.parametrize("executable", ["", "/nowhere/python", "/bin/true"])
def test_where_no_process_can_be_started(
    executable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(
        native, "_worker", Worker(hostile_worker.__file__, instead=native_worker.answer)
    )
    raised = native.transform("convert", MODEL, version=21)
    assert raised.opset_import[0].version == 21
    with pytest.raises(PassError, match=r"\S"):
        native.transform("convert", MODEL, version=9999)


def test_the_checker_takes_a_path_of_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid()  # it started elsewhere
    monkeypatch.chdir(tmp_path)
    onnx.save(MODEL, "m.onnx")
    native.check(Path("m.onnx"))
    broken = onnx.ModelProto.FromString(MODEL.SerializeToString())
    broken.ClearField("opset_import")
    onnx.save(broken, "m.onnx")
    with pytest.raises(PassError, match="opset_import"):
        native.check(Path("m.onnx"))
    with pytest.raises(OSError, match="nowhere"):
        native.check(Path("nowhere.onnx"))


@pytest.mark.parametrize("bounds", [native.OF_MESSAGES, native.OF_FILES])
def test_what_a_pass_may_take_grows_with_what_it_reads(bounds: native.Bounds) -> None:
    least, of_a_gb = bounds.of(0), bounds.of(10**9)
    assert least == {"memory": bounds.memory, "seconds": bounds.seconds}
    grown = {name: of_a_gb[name] - least[name] for name in least}
    assert grown["memory"] == bounds.memory_per_byte * 10**9
    assert grown["seconds"] == pytest.approx(bounds.seconds_per_byte * 1e9)
