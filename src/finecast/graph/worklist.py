"""Walks over a graph: what is still to be looked at, each value or node once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Worklist(Generic[T]):
    """Ids to look at, each once, the newest first.

    To iterate gives what was added before and what is added meanwhile.

    Attributes:
        seen: All that was added.
    """

    def __init__(self, starts: Iterable[T | None]) -> None:
        self.seen: set[T] = set()
        self._waiting: list[T] = []
        self.add(starts)

    def add(self, more: Iterable[T | None]) -> None:
        """Add those that are new; None stands for an input or output that is not there."""
        new = dict.fromkeys(x for x in more if x is not None and x not in self.seen)
        self.seen.update(new)
        self._waiting += new

    def __iter__(self) -> Iterator[T]:
        while self._waiting:
            yield self._waiting.pop()
