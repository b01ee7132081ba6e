"""Progress: a bar on a terminal, a line in a notebook, now and then a line in a file."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from finecast import progress
from finecast.errors import UsageError
from finecast.progress import Detail, Notice, Phases, reporting, shown, silent
from tests.cli.test_output import ACTS, NASTY


def test_progress_without_a_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with shown("tuning") as report:
        for moment, stage in ((101, "baseline"), (116, f"a{NASTY}"), (117, "b"), (140, "c")):
            now[0] = moment
            report(stage, 1, 4)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("tuning: a")
    assert first.endswith(", 1 of 4, after 16 s")
    assert not ACTS.search(first)
    assert second == "tuning: c, 1 of 4, after 40 s"


@pytest.mark.parametrize("reports", [False, True])
def test_what_is_waited_for_before_the_first_report_is_said(
    reports: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loading took 45 s of a --timeout of 20, in silence."""
    waiting: list[Callable[[], None]] = []

    class Timer(threading.Timer):
        def start(self) -> None:
            waiting.append(lambda: None if self.finished.is_set() else self.function())

    monkeypatch.setattr(threading, "Timer", Timer)
    with shown("tuning") as report:
        if reports:
            report("baseline", 0, 1)
        waiting[0]()
    assert capsys.readouterr().err == ("" if reports else "tuning: load, after 10 s\n")
    waiting[0]()
    assert capsys.readouterr().err == ""


def test_a_notice_is_shown_at_once_and_is_no_phase(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with shown("tuning") as report:
        phases = Phases(report, "load", time.perf_counter())
        phases("baseline", 0, 1)
        phases(Notice(f"this takes{NASTY} a while"), 0, 1)
        assert {*phases.seconds()} == {"load", "baseline"}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tuning: this takes")
    assert line.endswith("a while")
    assert not ACTS.search(line)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython as a notebook's kernel loads it."""
    shell = SimpleNamespace(kernel=object())
    ipython = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("notebook")
def test_in_a_notebook_one_line_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with reporting(True, "tuning") as report:
        for moment, stage in ((100.0, "sensitivities"), (100.1, "left out"), (103.0, "b")):
            now[0] = moment
            report(stage, 1, 4)
        report(Notice("long work"), 0, 1)
        now[0] = 106.0
        report("c", 1, 4)
    first, second = "tuning: sensitivities, 1 of 4, after 0 s", "tuning: b, 1 of 4, after 3 s"
    notice = "tuning: long work".ljust(len(second))
    drawn = [first, second.ljust(len(first)), f"{notice}\n"]
    drawn.append("tuning: c, 1 of 4, after 6 s\n")
    assert capsys.readouterr().err == "".join(f"\r{line}" for line in drawn)


def test_where_nobody_watches_the_interface_reports_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for given in (True, False):
        with reporting(given, "tuning") as report:
            now[0] += 100.0
            report("stage", 1, 2)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("steps", [True, False])
def test_steps_are_shown_where_they_are_asked_for(
    capsys: pytest.CaptureFixture[str], *, steps: bool
) -> None:
    with shown("tuning", steps=steps) as report:
        report(Detail("benchmark of plan 8"), 1, 1)
    assert capsys.readouterr().err == ("tuning: benchmark of plan 8\n" if steps else "")


def test_a_callback_is_called() -> None:
    with reporting(silent, "tuning") as report:
        assert report is silent


@pytest.mark.parametrize("given", ["yes", 3, None])
def test_anything_else_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="reports no progress"), reporting(given, "tuning"):
        pass


@pytest.mark.usefixtures("notebook")
def test_false_is_silent_in_a_notebook_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert progress.in_notebook()
    with reporting(False, "tuning") as report:
        report("stage", 1, 2)
    assert not capsys.readouterr().err


def test_the_time_is_told_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    seen: list[str] = []

    def report(stage: str, done: int, total: int) -> None:
        del done, total
        seen.append(stage)

    phases = progress.Phases(report, "baseline", 9.0)
    for moment, stage in (
        (12.0, "baseline"),
        (13.0, "timing"),
        (20.0, "evaluation of plan 1"),
    ):
        now[0] = moment
        phases(stage, 0, 1)
    now[0] = 24.0
    assert list(phases.seconds().items()) == [
        ("timing", 7.0), ("baseline", 4.0), ("evaluation", 4.0)
    ]  # fmt: skip
    assert seen == ["baseline", "timing", "evaluation of plan 1"]


def test_the_whole_grows_with_time_once_it_is_known_how_long_all_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a quarter of the time 97% were shown, and stayed so."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    whole = progress.Overall()
    for phase in range(6):
        whole.report(f"phase {phase}", 0, 1)
    now[0] = 10.0
    whole.expect(50.0)
    start, done = whole.done(), list[float]()
    for second in range(11, 100):
        now[0] = float(second)
        whole.report(f"phase {second}", 0, 1)
        done.append(whole.done())
    assert all(a < b for a, b in pairwise([start, *done]))
    assert done[19] - start == pytest.approx((done[39] - start) / 2)
    assert done[39] < done[-1] < 1


def test_the_whole_grows_in_every_phase_and_is_not_full_before_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    whole = progress.Overall()
    stages = [("load", 0, 1), ("baseline", 1, 1), *(("sensitivity", k, 9) for k in range(9))]
    stages += [(f"phase {k}", 0, 1) for k in range(99)]
    done = [whole.done()]
    for stage in stages:
        whole.report(*stage)
        now[0] += 1.0
        done.append(whole.done())
    assert done[0] == 0
    assert all(a < b for a, b in pairwise(done[:25]))
    assert done == sorted(done)
    assert done[-1] < 1
    before = whole.done()
    now[0] += 1e6  # a long wait
    assert before <= whole.done() < 1
    whole.report("load", 0, 1)  # a phase that comes again
    assert whole.done() < 1
