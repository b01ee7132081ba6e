"""How a stage ended, whose failure it was, and the lines in which a process says so."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

_CHANNEL: Final = "ZOO_CHANNEL"
"""The environment variable with the file descriptor that ``say`` writes to."""

# What libraries colour their errors with.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


BUILD: Final = "build"
"""The stage before all others: importing the libraries and building the network."""


class Status(StrEnum):
    """How a stage ended: well, or by whose failure."""

    OK = "ok"
    FINECAST = "finecast"
    """What worked in fp32 fails, or is wrong, after finecast."""
    EXPORT = "export"
    """``torch.onnx.export`` raises, or what it wrote is invalid."""
    ENGINE = "engine"
    """The engine, or ``torch.compile``, fails without finecast, too."""
    NETWORK = "network"
    """The library cannot build the network or run it in fp32."""
    SKIPPED = "skipped"
    """A stage that this one builds on failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One stage of one network; ``figures`` by name, ``notes`` are whole sentences."""

    network: str
    stage: str
    status: Status
    seconds: float = 0.0
    cause: str = ""
    figures: dict[str, float] = field(default_factory=dict[str, float])
    notes: tuple[str, ...] = ()
    trace: str = ""

    def replaced_by(self, later: Outcome) -> bool:
        """Whether ``later`` is of the same stage; one of building stands for all stages."""
        same_stage = self.stage == later.stage or BUILD in {self.stage, later.stage}
        return self.network == later.network and same_stage

    def as_json(self) -> dict[str, Any]:
        """Fields by name; ``from_json`` takes them back."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Outcome:
        """The outcome that ``as_json`` wrote."""
        notes = tuple(content["notes"])
        given: dict[str, Any] = {
            **content,
            "status": Status(content["status"]),
            "notes": notes,
        }
        return cls(**given)


class StageError(Exception):
    """A stage failed, and this is whose failure it is."""

    def __init__(self, status: Status, cause: str) -> None:
        super().__init__(cause)
        self.status = status
        self.cause = cause


class WrongNumbersError(StageError):
    """Numbers are off by more than rounding explains."""


@contextmanager
def during(status: Status, step: str) -> Generator[None]:
    """What fails in here is ``status``'s failure; so it is if the process dies in here.

    Raises:
        StageError: For any exception within.
    """
    say({"step": step, "status": status})
    try:
        yield
    except StageError:
        raise
    except Exception as error:
        raise StageError(status, f"{step}: {_first_line(error)}") from error


def own_stdout() -> None:
    """Keep stdout for ``say``: what libraries print, their C++ too, goes to stderr."""
    sys.stdout.flush()
    channel = os.dup(1)
    os.dup2(2, 1)
    os.environ[_CHANNEL] = str(channel)


def say(content: dict[str, Any]) -> None:
    """One line of JSON for the process that started this one."""
    channel = int(os.environ.get(_CHANNEL, "1"))
    os.write(channel, (json.dumps(content) + "\n").encode())


def traceback_of(error: StageError) -> str:
    """The traceback of what ``error`` reports."""
    return "".join(traceback.format_exception(error.__cause__ or error))


def _first_line(error: Exception) -> str:
    plain = _COLOURS.sub("", str(error))
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
