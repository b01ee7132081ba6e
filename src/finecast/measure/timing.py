"""Latency on a noisy machine: what is compared runs in turns; processor time, and its lack.

Law: in every round each callable is timed once, so that a disturbance hits all of them. The
order is drawn anew for each round, because a call finds in the processor's caches what the
call before left there: in a fixed order, or one that is reversed from round to round, each
has the same neighbours all the time, and one model differed from itself by 10%. Ratios are
taken within rounds, then their median.

A short call runs twice, and the second one counts: a model in use is called again and again,
and finds its own weights in the caches. The first call, after another model's, took up to
1.8 times as long.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import process_time
from typing import Final

import numpy as np

from finecast.engines.base import Feeds, Session, untimed_of
from finecast.errors import EngineError

# Longer calls are not made twice: filling the caches takes only tenths of a millisecond.
_SHORT_S = 0.02
# Warm-up calls of a callable end after this time: the first call allocates memory, and further
# calls of a slow one gain nothing.
_WARM_S = 0.2


def now_s() -> float:
    """Seconds by the clock that times calls."""
    return time.perf_counter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """What a call took: seconds from its start to its end, and seconds of a processor."""

    wall_s: float
    used_s: float

    def __truediv__(self, calls: int) -> Took:
        """The mean of several calls that took this in all."""
        return Took(wall_s=self.wall_s / calls, used_s=self.used_s / calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A callable that is timed after something else was called."""

    begin: Callable[[], object]
    timed: Callable[[], object]

    def __call__(self) -> None:
        """Call both."""
        self.begin()
        self.timed()


def pass_over(session: Session, feeds: Sequence[Feeds]) -> Callable[[], object]:
    """One run on each of ``feeds``, timed without calls that only make a state.

    Feeds that have such calls are alone.
    """
    if any(map(untimed_of, feeds)):
        (only,) = feeds
        return Begun(begin=partial(session.begin, only), timed=partial(session.go_on, only))
    return partial(_run_all, session, feeds)


def _run_all(session: Session, feeds: Sequence[Feeds]) -> None:
    for call in feeds:
        session.run(call)


@dataclass(slots=True)
class Turns:
    """Callables that are timed in rounds, one call each, in an order drawn for each round.

    A callable that raises EngineError is in ``failed``, and is not called again.
    """

    calls: Mapping[str, Callable[[], object]]
    failed: dict[str, EngineError] = field(default_factory=dict[str, EngineError])
    _random: random.Random = field(init=False)
    _twice: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Seed the order, so that each process has the same."""
        self._random = random.Random(0)

    def warm_up(self, calls: int) -> None:
        """Call each up to ``calls`` times; if all are short, timed calls are second calls."""
        longest = 0.0
        for name in self.calls:
            end, took_s = now_s() + _WARM_S, float("inf")
            for _ in range(calls):
                took = self._caught(self._timed, name)
                if took is None:
                    break
                took_s = took.wall_s
                if now_s() > end:
                    break
            if name not in self.failed:
                longest = max(longest, took_s)
        self._twice = longest < _SHORT_S

    def round(self, names: Collection[str]) -> dict[str, Took]:
        """What one call of each took; of those that do not fail."""
        order = [name for name in self.calls if name in names and name not in self.failed]
        self._random.shuffle(order)
        took = {name: self._caught(self._in_turn, name) for name in order}
        return {name: one for name, one in took.items() if one is not None}

    def _caught(self, timed: Callable[[str], Took], name: str) -> Took | None:
        try:
            return timed(name)
        except EngineError as error:
            self.failed[name] = error
            return None

    def _in_turn(self, name: str) -> Took:
        if self._twice:
            self.calls[name]()
        return self._timed(name)

    def _timed(self, name: str) -> Took:
        call = self.calls[name]
        if isinstance(call, Begun):
            call.begin()
            call = call.timed
        used_before_s, start = used_s(), now_s()
        call()
        wall_s = now_s() - start
        return Took(wall_s=wall_s, used_s=used_s() - used_before_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Wall times of single calls, in seconds, in the order of the rounds."""

    samples_s: tuple[float, ...]

    @property
    def runs(self) -> int:
        """How many calls were timed."""
        return len(self.samples_s)

    @property
    def median_s(self) -> float:
        """Median time of a call."""
        return self.quantile_s(0.5)

    @property
    def p10_s(self) -> float:
        """The time that one call in ten stays under."""
        return self.quantile_s(0.1)

    @property
    def p90_s(self) -> float:
        """The time that nine calls in ten stay under."""
        return self.quantile_s(0.9)

    @property
    def iqr_s(self) -> float:
        """Distance between the quartiles."""
        return self.quantile_s(0.75) - self.quantile_s(0.25)

    def quantile_s(self, q: float) -> float:
        """The ``q`` quantile of the times."""
        return float(np.quantile(self.samples_s, q))


# -------------------------------- time that was computed, time that was waited for a processor

# One folder for each thread. In a thread's file "schedstat" Linux keeps the nanoseconds that
# it ran, and those that it was ready to run while others did (man 5 proc; sched-stats.rst).
_THREADS: Final = Path("/proc/self/task")

# A machine is busy if this process was denied more than this share of the processor time that
# it wanted: an idle one denies less than .01, one with a single other busy process .3.
_BUSY: Final = 0.1


def used_s() -> float:
    """Seconds that the threads of this process have computed, in sum."""
    return process_time()


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Seconds of a processor that threads of this process had, and those that they lacked.

    ``waits_s`` are the latter by thread, of those that run.
    """

    used_s: float = 0.0
    waited_s: float = 0.0
    waits_s: Mapping[str, float] = field(default_factory=dict[str, float], repr=False)

    @classmethod
    def now(cls) -> Demand:
        """Both since the threads started; no wait where the system does not count it."""
        waits_s = _waits_s()
        return cls(used_s=used_s(), waited_s=sum(waits_s.values()), waits_s=waits_s)

    def since(self, before: Demand) -> Demand:
        """Both since ``before``. A thread that ended takes its wait along, and no other's."""
        waits_s = {
            thread: max(0.0, wait_s - before.waits_s.get(thread, 0.0))
            for thread, wait_s in self.waits_s.items()
        }
        waited_s = sum(waits_s.values())
        return Demand(used_s=self.used_s - before.used_s, waited_s=waited_s, waits_s=waits_s)

    def __add__(self, other: Demand) -> Demand:
        """Both of two stretches of time."""
        return Demand(
            used_s=self.used_s + other.used_s, waited_s=self.waited_s + other.waited_s
        )

    @property
    def total_s(self) -> float:
        """Seconds of a processor that were wanted."""
        return self.used_s + self.waited_s

    @property
    def is_busy(self) -> bool:
        """Whether other processes had so much that times tell of them."""
        return self.denied > _BUSY

    @property
    def denied(self) -> float:
        """The share of these that other processes had."""
        return self.waited_s / self.total_s if self.total_s else 0.0


def _waits_s() -> dict[str, float]:
    waits_s: dict[str, float] = {}
    with suppress(OSError):  # no Linux
        for thread in _THREADS.iterdir():
            with suppress(OSError, IndexError):  # it has ended meanwhile
                waits_s[thread.name] = 1e-9 * int(
                    (thread / "schedstat").read_text().split()[1]
                )
    return waits_s
