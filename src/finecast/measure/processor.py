"""The time that this process computed, and the time that it waited for a processor."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
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
