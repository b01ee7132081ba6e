"""Reporting on long work: callbacks that say how far it is, and what shows them to a user."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, Protocol, Self

from finecast.errors import UsageError
from finecast.terminal import one_line, safe, write

_EVERY_S: Final = 10.0
"""Least time between two lines of progress in a file or a pipe: short work writes none."""
_FIRST: Final = "load"
"""What is waited for until the first report."""
_PHASE: Final = 0.15
"""The share of what is left that a phase takes: tune has about a dozen of them."""
_WAIT_S: Final = 30.0
"""Seconds after which a phase without steps is shown as two thirds done."""
_LATE: Final = 0.1
"""The share of what was left that is shown for the time beyond an estimate."""
_LEAST_LEFT_S: Final = 1.0
_MOST: Final = 0.99
"""The most that is shown as done before the end."""
_REDRAWN_S: Final = 0.2
"""Least time between two states of a line that is written anew in its place."""


class Progress(Protocol):
    """Called as work goes on."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """``done`` of ``total`` steps of ``stage`` are done; ``total`` may be an estimate."""
        ...


class Notice(str):
    """A stage that is no work but a remark on it, shown at once: how long it will take."""

    __slots__ = ()


class ExpectedTime(Notice):
    """A remark on how long all work takes: about ``most_s`` seconds at most."""

    __slots__ = ("most_s",)
    most_s: float

    def __new__(cls, text: str, most_s: float) -> Self:
        """The remark ``text``."""
        made = super().__new__(cls, text)
        made.most_s = most_s
        return made


class Detail(Notice):
    """A remark for those who ask for details: what was measured, and why."""

    __slots__ = ()


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""
    del stage, done, total


class Phases:
    """Progress that is passed on to ``report``, and the seconds of each phase so far.

    Law: the seconds since ``start_s``, by ``time.perf_counter``, add up over the phases, and
    the time until the first call is the ``first`` phase's. A phase is a stage without what
    follows ``" of "`` in it.
    """

    def __init__(self, report: Progress, first: str, start_s: float) -> None:
        self._report, self._phase, self._last = report, first, start_s
        self._seconds: dict[str, float] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        """As ``Progress``; the time since the last call is that call's phase's."""
        if not isinstance(stage, Notice):
            self._count()
            self._phase = stage.partition(" of ")[0]
        self._report(stage, done, total)

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, the longest first."""
        self._count()
        return dict(sorted(self._seconds.items(), key=lambda found: -found[1]))

    def _count(self) -> None:
        now = time.perf_counter()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._last
        self._last = now


@contextmanager
def reporting(progress: Progress | bool, title: str) -> Generator[Progress]:
    """The callback of a caller of the Python API.

    Args:
        progress: A callback; True to show a bar on a terminal and a line in a notebook, and
            nothing elsewhere; False to show nothing.
        title: What is done.

    Raises:
        UsageError: If ``progress`` is none of these.
    """
    if not isinstance(progress, bool) and not callable(progress):
        raise UsageError(
            f"{progress!r} reports no progress",
            where="progress",
            fix="give True, False, or a function of a stage, the steps done and their number",
        )
    if callable(progress):
        yield progress
    elif progress and (sys.stderr.isatty() or in_notebook()):
        with shown(title) as report:
            yield report
    else:
        yield silent


def in_notebook() -> bool:
    """Whether a notebook shows what is written to stderr."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


class Overall:
    """How much of all work is done, of which no more is known than the phase and its steps.

    Laws: it grows in every phase, with steps or with time, never falls, and is below 1 until
    the end. A phase takes a fixed share of what was left before it, until it is known how long
    all takes: from then on time alone counts.
    """

    def __init__(self) -> None:
        self._phase, self._start, self._since = "", 0.0, time.monotonic()
        self._steps = self._most = 0.0
        self._began, self._left_s = self._since, 0.0

    def expect(self, most_s: float) -> None:
        """All takes ``most_s`` from the start on; what is left grows with time."""
        self._start, self._since = self.done(), time.monotonic()
        self._left_s = max(most_s - (self._since - self._began), _LEAST_LEFT_S)

    def report(self, stage: str, done: int, total: int) -> None:
        """As ``Progress``."""
        phase, now = stage.partition(" of ")[0], time.monotonic()
        if self._left_s:
            return
        if phase != self._phase:
            left = 1 - self._start
            self._start = max(self._start + _PHASE * left * bool(self._phase), self.done())
            self._phase, self._since, self._steps = phase, now, 0.0
        self._steps = max(self._steps, min(done / max(total, 1), 1.0))

    def done(self) -> float:
        """The share that is done now."""
        if self._left_s:
            passed = (time.monotonic() - self._since) / self._left_s
            late = _LATE * (1 - math.exp(min(1 - passed, 0.0)))
            within = (1 - _LATE) * min(passed, 1.0) + late
            self._most = max(self._most, self._start + (_MOST - self._start) * within)
            return self._most
        waited = 1 - math.exp((self._since - time.monotonic()) / _WAIT_S)
        within = self._steps + (1 - self._steps) * waited * bool(self._phase)
        share = self._start + _PHASE * (1 - self._start) * within
        self._most = max(self._most, min(share, _MOST))
        return self._most


@contextmanager
def shown(title: str, *, steps: bool = False) -> Generator[Progress]:
    """Progress on stderr: a bar on a terminal, one line that changes in a notebook.

    In a file or a pipe it is a line now and then. Each ``Detail`` is a line if ``steps`` are
    asked for.
    """
    if not sys.stderr.isatty():
        lines = _Lines(title, redrawn=in_notebook(), steps=steps)
        try:
            yield lines.report
        finally:
            lines.end()
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Task, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar
    from rich.progress_bar import ProgressBar
    from rich.table import Column

    whole = Overall()

    class Growing(BarColumn):
        """A bar that is computed anew each time it is drawn."""

        def render(self, task: Task) -> ProgressBar:
            task.completed = whole.done()
            return super().render(task)

    words = TextColumn(
        "{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
    )
    columns = (words, Growing(bar_width=20), TimeElapsedColumn())
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=True, expand=True) as bar:
        whole.report(_FIRST, 0, 1)
        task = bar.add_task(f"{title}: {_FIRST}", total=1)

        def report(stage: str, done: int, total: int) -> None:
            text = escape(safe(f"{title}: {stage}"))
            if isinstance(stage, ExpectedTime):
                whole.expect(stage.most_s)
            if isinstance(stage, Notice):
                if steps or not isinstance(stage, Detail):
                    bar.console.print(text)
                return
            whole.report(stage, done, total)
            bar.update(task, description=text + _steps(done, total))

        yield report


def _steps(done: int, total: int) -> str:
    """How many steps are done, where there are several."""
    return f", {done} of {total}" if total > 1 else ""


class _Lines:
    """Progress as lines, or as one line that is ``redrawn``, not too often."""

    def __init__(self, title: str, *, redrawn: bool, steps: bool) -> None:
        self._title, self._redrawn, self._steps = title, redrawn, steps
        self._start = time.monotonic()
        self._last = self._start - _REDRAWN_S if redrawn else self._start
        self._width = 0
        self._waiting = threading.Timer(_EVERY_S, self._wait)
        self._waiting.daemon = True
        self._waiting.start()

    def _wait(self) -> None:
        """Say what is waited for before the first report: loading may be all of it."""
        self._write(one_line(f"{self._title}: {_FIRST}, after {_EVERY_S:.0f} s"))

    def report(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        self._waiting.cancel()
        if isinstance(stage, Detail) and not self._steps:
            return
        if isinstance(stage, Notice):
            self._write(one_line(f"{self._title}: {stage}"))
            self.end()
            return
        if now - self._last < (_REDRAWN_S if self._redrawn else _EVERY_S):
            return
        self._last = now
        steps, took = _steps(done, total), now - self._start
        self._write(one_line(f"{self._title}: {stage}{steps}, after {took:.0f} s"))

    def end(self) -> None:
        """End the line that was redrawn, if there is one, and wait for nothing."""
        self._waiting.cancel()
        if self._width:
            self._width = 0
            write(sys.stderr, "")

    def _write(self, text: str) -> None:
        if not self._redrawn:
            write(sys.stderr, text)
            return
        write(sys.stderr, "\r" + text.ljust(self._width), end="")
        self._width = len(text)
