"""What a tuned model is to have least of: time, also under load, or bytes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from finecast.naming import look_up


class Objective(Enum):
    """What the search makes least of; the accuracy is kept whatever it is."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    SIZE = "size"
    MEMORY = "memory"

    @classmethod
    def parse(cls, text: str) -> Objective:
        """The objective of a name, in any case.

        Raises:
            UsageError: If it is none.
        """
        named = {one.value: one for one in cls}
        return look_up(text, named, what="objective", where="--objective")

    @classmethod
    def of(cls, given: Objective | str) -> Objective:
        """One by its name, or as it is.

        Raises:
            UsageError: If it is none.
        """
        return given if isinstance(given, Objective) else cls.parse(given)

    @property
    def words(self) -> Words:
        """How results are put."""
        return _WORDS[self]

    def keyed(self, runner: str) -> str:
        """What a study keys trials by: those of one objective are not another's."""
        return runner if self is Objective.LATENCY else f"{runner} for {self.value}"

    @property
    def of_time(self) -> bool:
        """Whether a format has to be fast to serve it."""
        return self in (Objective.LATENCY, Objective.THROUGHPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """How an objective is put: a plan that is ``better``, ``best``, ``as_good`` as another.

    ``gain`` heads the column of how many times as good as fp32 a model is.
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
