"""The one supervisor of processes: code in C++ that may crash is called in one of its own.

``worker_process`` is that process, and calls go to it by pipes. How it is started, what a call
may take, and how it ended are said here for all of them: what kills it raises one clear error.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias, TypedDict

from finecast.processes import worker_process

_LOG = logging.getLogger(__name__)

Answer: TypeAlias = tuple[Mapping[str, Any], bytes]
"""A header with a ``status``, and a payload."""
Answering: TypeAlias = Callable[[Mapping[str, Any], bytes, Callable[..., None]], Answer]
Telling: TypeAlias = Callable[[str, str], None]
"""Gets what a process tells before its answer: a kind, as ``stdout``, and a text."""
_EXITS_S: Final = 1.0
# numpy's threads would only take memory.
_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1"}
IN_WORKER: Final = {"FINECAST_IN_WORKER": "1"}
"""Set in a process that may crash itself: it starts no further ones against crashes."""


class Limits(TypedDict, total=False):
    """What a call may take; ``worker_process.serve`` says how the process holds to it."""

    memory: float
    more_memory: float | None
    seconds: float


def _nobody(*_: object) -> None:
    """Tell nobody."""


class WorkerDiedError(Exception):
    """The process died at a call; the text says how."""


class _Child:
    """A process that runs a file, and the pipes to it.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        # -P keeps the file's folder, whose modules have names as those of libraries, out of
        # sys.path. The process leads a group, which ends with it.
        self.process = subprocess.Popen(
            [sys.executable, "-P", worker_process.__file__, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environment),
            process_group=0 if hasattr(os, "killpg") else None,
        )
        self.pipes: tuple[Any, Any] = (self.process.stdin, self.process.stdout)
        self.ready = False

    def call(self, request: Mapping[str, Any], payload: bytes, tell: Telling) -> Answer:
        """The answer to a request; ``tell`` gets what is told on the way.

        On any error the process is ended: the next call would read the rest of an answer, and
        one that is out of memory may not free what it took.

        Raises:
            WorkerDiedError: If it dies.
        """
        start, limit_s = time.monotonic(), request.get("seconds", math.inf)
        try:
            stdin = self.pipes[0]
            stdin.write(json.dumps({**request, "size": len(payload)}).encode() + b"\n")
            stdin.write(payload)
            stdin.flush()
            while "tells" in (answer := self.receive())[0]:
                tell(answer[0]["tells"], answer[0]["text"])
            return _of_living(answer)
        except (OSError, EOFError) as error:
            with suppress(subprocess.TimeoutExpired):  # its exit status tells how it died
                self.process.wait(_EXITS_S)
            self.end()
            crashed = time.monotonic() - start < limit_s
            status = _named(self.process.returncode)
            text = f"crashed ({status})" if crashed else f"did not end in {limit_s:.0f} s"
            raise WorkerDiedError(text) from error
        except BaseException:
            self.end()
            raise

    def receive(self) -> Answer:
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
        if hasattr(os, "killpg"):
            with suppress(OSError):  # all of them have ended
                os.killpg(self.process.pid, signal.SIGKILL)
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


class Worker:
    """One child process: started on first use, and again after it died.

    Args:
        file: The Python file that answers there, as ``worker_process`` says.
        arguments: What stands behind the file in the process's ``sys.argv``.
        instead: What answers in this process where no other one can be started, or where this
            one may crash itself; None for work that is done in another one alone.
        environment: Variables that differ from those of this process.
    """

    def __init__(
        self,
        file: str,
        *arguments: str,
        instead: Answering | None,
        environment: Mapping[str, str] = _ONE_THREAD,
    ) -> None:
        self.instead = instead
        self.command = (file, *arguments)
        self.environment = environment
        self.lock = threading.Lock()
        self.child: _Child | None = None
        here = instead is not None and IN_WORKER.keys() <= os.environ.keys()
        frozen = getattr(sys, "frozen", False)
        self.startable = bool(sys.executable) and not (here or frozen)
        ref = weakref.ref(self)  # tests make workers that end before the process does
        atexit.register(lambda: (one := ref()) and one.end())
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: (one := ref()) and one.forget())

    def call(
        self,
        request: Mapping[str, Any],
        payload: bytes = b"",
        limits: Limits | None = None,
        tell: Telling = _nobody,
    ) -> Answer:
        """The process's answer, or that of ``instead`` if no process can be started.

        The status ``raised`` comes with the ``kind`` and ``text`` of an error of the file.

        Raises:
            WorkerDiedError: If the process dies.
        """
        with self.lock:
            child = self.serving()
            if child is not None:
                return child.call({**request, **(limits or {})}, payload, tell)
        if self.instead is None:
            raise WorkerDiedError("cannot be started")
        return _of_living(worker_process.answered(self.instead, request, payload, _nobody))

    def warm_up(self) -> None:
        """Start the process unless it runs, without waiting for it."""
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
            except EOFError:  # it lacks a library, or sys.executable is no Python
                self.end()
                self.startable = False
                _LOG.debug("%s did not start: its work is done in this process", self.command)
        return self.child

    def start(self) -> _Child | None:
        """The child, started if it does not run."""
        if self.child is not None and self.child.process.poll() is not None:
            self.end()
        if self.child is None and self.startable:
            try:
                self.child = _Child(self.command, {**os.environ, **self.environment})
            except OSError as error:
                self.startable = False
                _LOG.debug("%s cannot be started: %s", self.command, error)
        return self.child

    def end(self) -> None:
        """End the child, if there is one."""
        if self.child is not None:
            self.child.end()
            self.child = None

    def forget(self) -> None:
        """In a fork: leave the child to the parent, and the lock, which a thread may hold."""
        if self.child is not None:
            self.child.disown()
        self.child, self.lock = None, threading.Lock()


def _of_living(answer: Answer) -> Answer:
    """An answer; raises WorkerDiedError if the process that gave it is of no more use."""
    if answer[0]["status"] == "died":
        raise WorkerDiedError(answer[0]["text"])
    return answer


def _named(status: int) -> str:
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"exit status {status}"
