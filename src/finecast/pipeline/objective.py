"""What the search minimises: time of a call, time under load, or bytes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from finecast.naming import look_up


class Objective(Enum):
    """What the search minimises; the accuracy is kept under any objective."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    SIZE = "size"
    MEMORY = "memory"

    @classmethod
    def parse(cls, text: str) -> Objective:
        """The objective called ``text``, in upper or lower case.

        Raises:
            UsageError: If there is none of that name.
        """
        named = {one.value: one for one in cls}
        return look_up(text, named, what="objective", where="--objective")

    @classmethod
    def of(cls, given: Objective | str) -> Objective:
        """An objective, given as such or by its name.

        Raises:
            UsageError: If there is none of that name.
        """
        return given if isinstance(given, Objective) else cls.parse(given)

    @property
    def words(self) -> Words:
        """The words for results by this objective."""
        return _WORDS[self]

    def keyed(self, runner: str) -> str:
        """The runner's name in a study's keys: trials of other objectives do not count."""
        return runner if self is Objective.LATENCY else f"{runner} for {self.value}"

    @property
    def of_time(self) -> bool:
        """Whether the objective is a time, so that slow formats cannot serve it."""
        return self in (Objective.LATENCY, Objective.THROUGHPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Words for results by an objective.

    A plan may be ``better`` than fp32, ``best``, or N times ``as_good`` as fp32. ``gain`` is
    the heading of the column of N.
    """

    better: str
    best: str
    as_good: str
    gain: str


_WORDS: Final = {
    Objective.LATENCY: Words(
        better="faster",
        best="fastest",
        as_good="as fast",
        gain="speed",
    ),
    Objective.THROUGHPUT: Words(
        better="of more throughput",
        best="best",
        as_good="as much throughput",
        gain="throughput",
    ),
    Objective.SIZE: Words(
        better="smaller",
        best="smallest",
        as_good="as small",
        gain="smaller",
    ),
    Objective.MEMORY: Words(
        better="of less memory",
        best="one of least memory",
        as_good="as little in memory",
        gain="less memory",
    ),
}
