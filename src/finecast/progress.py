"""How long work reports on itself: a stage, what is done and what is expected."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called as work goes on; ``total`` may be an estimate."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """``done`` of ``total`` steps of ``stage``."""
        ...


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""
    del stage, done, total
