"""The time that this process computed, and the time that it waited for a processor."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# One folder for each thread. In a thread's file "schedstat" Linux keeps the nanoseconds that
# it ran, and those that it was ready to run while others did (man 5 proc; sched-stats.rst).
_THREADS: Final = Path("/proc/self/task")

# A machine is busy if this process was denied more than this share of the processor time that
# it wanted: an idle one denies less than .01, one with a single other busy process .3.
_BUSY: Final = 0.1


def used_s() -> float:
    """Seconds that the threads of this process have computed, in sum."""
    return time.process_time()


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Seconds of a processor that threads of this process had, and those that they lacked."""

    used_s: float = 0.0
    waited_s: float = 0.0

    @classmethod
    def now(cls) -> Demand:
        """Both since the threads started; no wait where the system does not count it."""
        return cls(used_s=used_s(), waited_s=_waited_s())

    def since(self, before: Demand) -> Demand:
        """Both since ``before``. A thread that ended takes its wait along."""
        return Demand(
            used_s=self.used_s - before.used_s,
            waited_s=max(0.0, self.waited_s - before.waited_s),
        )

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


def _waited_s() -> float:
    waited_ns = 0
    with suppress(OSError):  # no Linux
        for thread in _THREADS.iterdir():
            with suppress(OSError, IndexError):  # it has ended meanwhile
                waited_ns += int((thread / "schedstat").read_text().split()[1])
    return waited_ns * 1e-9
