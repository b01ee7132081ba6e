"""Runs onnx's C++ passes in a process of their own.

Hostile models make them crash, never end, or take all memory (onnx 1.23). Then only that
process dies, and here one clear error is raised.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import onnx

from finecast.errors import ModelError
from finecast.frontends.onnx import native_worker

_LOG = logging.getLogger(__name__)

_TITLES: Final = {
    "infer": "shape inference",
    "convert": "version converter",
    "inline": "inliner",
    "check": "checker",
}
_FIX: Final = "check the sizes and attributes that the model declares, and export it again"
_FILE = native_worker.__file__


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
    return onnx.ModelProto.FromString(_worker.run(name, message, options, bounds))


def check(path: Path) -> None:
    """Run ``onnx.checker`` with strict shape inference over a file; see ``transform``.

    Raises:
        PassError, PassDiedError: As ``transform``.
        OSError: If there is no such file.
    """
    bounds = OF_FILES.of(path.stat().st_size)
    _worker.run("check", os.fsencode(path.absolute()), {}, bounds)


def warm_up() -> None:
    """Start the process unless it runs, without waiting for it: that takes 0.2 s."""
    _worker.warm_up()


_Answer: TypeAlias = tuple[Mapping[str, Any], bytes]


class _Child:
    """A process that runs ``native_worker``, and the pipes to it.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(self) -> None:
        # -P keeps the file's folder, which has a types.py, out of sys.path. numpy's threads
        # would only take memory.
        self.process = subprocess.Popen(
            [sys.executable, "-P", _FILE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        self.pipes: tuple[Any, Any] = (self.process.stdin, self.process.stdout)
        self.ready = False

    def ask(self, request: Mapping[str, Any], payload: bytes) -> _Answer:
        """The answer to a request.

        On any error the process is ended: the next request would read the rest of an answer.
        """
        try:
            stdin = self.pipes[0]
            stdin.write(json.dumps({**request, "size": len(payload)}).encode() + b"\n")
            stdin.write(payload)
            stdin.flush()
            return self.receive()
        except BaseException:
            self.end()
            raise

    def receive(self) -> _Answer:
        """The next message of the process; raises EOFError if it ended."""
        line = self.pipes[1].readline()
        if not line.endswith(b"\n"):
            raise EOFError
        header: dict[str, Any] = json.loads(line)
        payload = self.pipes[1].read(header["size"])
        if len(payload) < header["size"]:
            raise EOFError
        return header, payload

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in self.pipes:
            with suppress(OSError):  # closing flushes, and nobody reads that any more
                pipe.close()

    def disown(self) -> None:
        """Forget the process in a fork of its parent, and close the pipes.

        While they are open here it would outlive the parent.
        """
        self.process.returncode = 0
        for pipe in self.pipes:
            pipe.raw.close()


class _Worker:
    """The one child process: started on first use, and again after it died."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.child: _Child | None = None
        self.startable = bool(sys.executable) and not getattr(sys, "frozen", False)

    def run(
        self,
        name: str,
        payload: bytes,
        options: Mapping[str, int],
        bounds: Mapping[str, float],
    ) -> bytes:
        with self.lock:
            child = self.serving()
            if child is None:
                header, result = native_worker.answer(name, payload, options)
            else:
                request = {"pass": name, "options": options, **bounds}
                header, result = _asked(child, request, payload)
        if header["status"] == "done":
            return result
        if header["status"] == "raised":
            raise PassError(header["text"])
        raise PassDiedError(f"onnx's {_TITLES[name]} {header['text']} on the model", fix=_FIX)

    def warm_up(self) -> None:
        if self.lock.acquire(blocking=False):  # if that fails, the child is at work
            try:
                self.start()
            finally:
                self.lock.release()

    def serving(self) -> _Child | None:
        """The child, once it has said that it is ready; None if none can be started."""
        child = self.start()
        if child is not None and not child.ready:
            try:
                child.receive()
                child.ready = True
            except EOFError:  # it cannot import onnx, or sys.executable is no Python
                self.end()
                self.startable = False
                _LOG.debug("onnx's passes run in this process: their own did not start")
        return self.child

    def start(self) -> _Child | None:
        if self.child is not None and self.child.process.poll() is not None:
            self.end()
        if self.child is None and self.startable:
            try:
                self.child = _Child()
            except OSError as error:
                self.startable = False
                _LOG.debug("onnx's passes run in this process: %s", error)
        return self.child

    def end(self) -> None:
        if self.child is not None:
            self.child.end()
            self.child = None


def _asked(child: _Child, request: Mapping[str, Any], payload: bytes) -> _Answer:
    """The child's answer, or one that says how it died."""
    start = time.monotonic()
    try:
        header, result = child.ask(request, payload)
    except (OSError, EOFError):
        if time.monotonic() - start < request["seconds"]:
            text = f"crashed ({_named(child.process.returncode)})"
        else:
            text = f"did not end in {request['seconds']:.0f} s"
        return {"status": "died", "text": text}, b""
    if header["status"] == "died":  # out of memory: the process may not free what it took
        child.end()
    return header, result


def _named(status: int) -> str:
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"exit status {status}"


_worker = _Worker()


def _after_fork() -> None:
    """Forget the child, which is the parent's, and the lock, which a thread of it may hold."""
    if _worker.child is not None:
        _worker.child.disown()
    _worker.child, _worker.lock = None, threading.Lock()


atexit.register(_worker.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
