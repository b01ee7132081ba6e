"""Runs onnx's C++ passes in a process of their own.

Hostile models make them crash, never end, or take all memory (onnx 1.23). Then only that
process dies, and here one clear error is raised. onnx_ir's passes for shapes and the checker
call the same C++ code in the caller's process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import onnx

from finecast.errors import ModelError
from finecast.frontends.onnx import native_worker
from finecast.frontends.worker import Worker, WorkerDiedError

_TITLES: Final = {
    "infer": "shape inference",
    "convert": "version converter",
    "inline": "inliner",
    "check": "checker",
}
_FIX: Final = "check the sizes and attributes that the model declares, and export it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The most memory (bytes) and time that a pass may take, by the size of its input.

    A message of 100,000 nodes has 11.5 MB: the version converter, the most costly pass, takes
    504 MB and 2.5 s for it. Files are mostly weights: for 403 MB the checker takes 786 MB and
    0.6 s.
    """

    memory: int = 2 << 30
    memory_per_byte: int = 128
    seconds: float = 20.0
    seconds_per_byte: float = 10e-6

    def of(self, size: int) -> dict[str, float]:
        """The limits for an input of ``size`` bytes, as ``native_worker.serve`` takes them."""
        return {
            "memory": self.memory + self.memory_per_byte * size,
            "seconds": self.seconds + self.seconds_per_byte * size,
        }


OF_MESSAGES = Bounds()
OF_FILES = Bounds(memory_per_byte=16, seconds_per_byte=1e-6)


class PassError(Exception):
    """A pass refused the model; the text is the first line of its message."""


class PassDiedError(ModelError):
    """A pass crashed, ran out of memory or did not end in time."""


def transform(
    name: Literal["infer", "convert", "inline"], model: onnx.ModelProto, **options: int
) -> onnx.ModelProto:
    """``model`` after the pass.

    If no process can be started, the pass runs in this one, without limits.

    Raises:
        PassError: If the pass refuses the model.
        PassDiedError: If it crashes, takes too much memory or does not end in time.
    """
    message = model.SerializeToString()
    bounds = OF_MESSAGES.of(len(message))
    return onnx.ModelProto.FromString(_run(name, message, options, bounds))


def check(path: Path) -> None:
    """Run ``onnx.checker`` with strict shape inference over a file; see ``transform``.

    Raises:
        PassError, PassDiedError: As ``transform``.
        OSError: If there is no such file.
    """
    bounds = OF_FILES.of(path.stat().st_size)
    _run("check", os.fsencode(path.absolute()), {}, bounds)


def warm_up() -> None:
    """Start the process unless it runs, without waiting for it: that takes 0.2 s."""
    _worker.warm_up()


def _run(
    name: str, payload: bytes, options: Mapping[str, int], bounds: Mapping[str, float]
) -> bytes:
    try:
        request = {"pass": name, "options": options, **bounds}
        header, result = _worker.ask(request, payload)
    except WorkerDiedError as error:
        raise PassDiedError(
            f"onnx's {_TITLES[name]} {error} on the model", fix=_FIX
        ) from error
    if header["status"] == "raised":
        raise PassError(header["text"])
    return result


_worker = Worker(native_worker.__file__, instead=native_worker.answer)
