"""Callbacks by which long work reports how far it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called as work goes on."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """``done`` of ``total`` steps of ``stage`` are done; ``total`` may be an estimate."""
        ...


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""
    del stage, done, total
