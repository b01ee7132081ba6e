"""One supervisor of processes: what a call gives, by how the work ended in its process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from finecast.processes.worker import IN_WORKER, Limits, Worker, WorkerDiedError

WORKS = """
from __future__ import annotations
import os, time
from dataclasses import dataclass

@dataclass(slots=True)
class Result:
    number: int

def answer(request, payload, tell):
    how = request["how"]
    if how == "raises":
        raise KeyError("no such thing")
    elif how == "grows":
        raise MemoryError
    elif how == "exits":
        os._exit(3)
    elif how == "sleeps":
        time.sleep(600)
    tell("on its way")
    tell("printed", "stdout")
    return {"status": "done", "number": Result(os.getpid()).number}, payload * 2
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    (tmp_path / "works.py").write_text(WORKS)
    worker = Worker(str(tmp_path / "works.py"), instead=None)
    yield worker
    worker.end()


def pid(worker: Worker) -> int:
    return worker.call({"how": "works"})[0]["number"]


def test_an_answer_and_what_is_told_before_it(worker: Worker) -> None:
    told: list[tuple[str, str]] = []
    header, payload = worker.call(
        {"how": "works"}, b"ab", tell=lambda kind, text: told.append((kind, text))
    )
    assert (header["status"], payload) == ("done", b"abab")
    assert told == [("stage", "on its way"), ("stdout", "printed")]


def test_an_error_of_the_work_is_an_answer(worker: Worker) -> None:
    before = pid(worker)
    header, _ = worker.call({"how": "raises"})
    assert header["status"] == "raised"
    assert (header["kind"], header["text"]) == ("KeyError", "'no such thing'")
    assert pid(worker) == before


@pytest.mark.parametrize(
    ("how", "limits", "told"),
    [
        ("grows", {}, "ran out of memory"),
        ("exits", {}, r"crashed \(exit status 3\)"),
        ("sleeps", {"seconds": 1.0}, "did not end in 1 s"),
    ],
)
def test_what_ends_the_process_is_one_error(
    worker: Worker, how: str, limits: Limits, told: str
) -> None:
    before = pid(worker)
    with pytest.raises(WorkerDiedError, match=told):
        worker.call({"how": how}, limits=limits)
    assert pid(worker) != before


def test_work_that_is_done_apart_alone(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started by a process that may crash itself; where none can be, that is said."""
    (key, value), *_ = IN_WORKER.items()
    monkeypatch.setenv(key, value)
    inner = Worker(*worker.command, instead=None)
    assert pid(inner) != os.getpid()
    inner.end()
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(WorkerDiedError, match="cannot be started"):
        pid(Worker(*worker.command, instead=None))
