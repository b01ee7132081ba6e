"""A model is loaded, and run, in another process before an engine does so in this one.

Some models crash an engine's library: OpenVINO 2026.4 ends the process where it compiles two
steps of a neural ODE, and where it reads a convolution without weights. What kills the other
process is one error here. Each model is tried once, with the settings that it is loaded with,
and so is its first run on inputs of each shape, for which engines make kernels anew. What the
library raises there is ignored: it is raised here, too.

A model that is run to see its outputs alone, and never to be timed, need not be loaded here at
all: the other process keeps it and gives its outputs (``DryRun.keep``).

Law: a dry run decides nothing but that. Where no process can be started, nothing is tried;
nor is a run of a model that the other process let go (``dry_run_worker`` says when) and that
cannot be sent again, because its temporary file is gone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import weakref
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from finecast.errors import EngineError
from finecast.frontends import dry_run_worker
from finecast.frontends.dry_run_worker import KernelFacts, arrays_of, plain
from finecast.processes.memory import (
    memory_bytes,
    memory_error,
    most_loaded_bytes,
    most_tried_bytes,
)
from finecast.processes.worker import Answer, Limits, Worker, WorkerDiedError

MOST_BYTES: Final = 256 << 20
"""Of a model in memory that is sent as bytes. Larger ones are passed as a file."""
_MOST_SECONDS: Final = 600.0
"""For a load or a run, beyond what a large model takes: a loop of 2^62 steps never ends."""
_SECONDS_PER_BYTE: Final = 1e-6
"""Of a model that is loaded: a hundred times what OpenVINO 2026.4 takes for weights."""
_ON_CPU: Final = ("CPUExecutionProvider",)
_LIMITED: Final = ("openvino", "onnxruntime")
"""Libraries that run on CPUs without drivers of other devices."""
_STAGES: Final = {"read": "as it read", "compiled": "as it compiled", "run": "as it ran"}

Feed: TypeAlias = tuple[str, Any, Any]
"""An input's name, its array, and the library's number of a type that numpy lacks, or None."""
Shapes: TypeAlias = tuple[tuple[int, ...], ...]
T = TypeVar("T")


class CrashedError(EngineError):
    """A model that ends the process of the engine which loads or runs it."""


class TooLargeError(EngineError):
    """A model that this machine has not enough memory to load."""


def _untried(*_: object) -> Answer:
    return {"status": "untried"}, b""


class _Library:
    """An engine's library in another process, and what was tried in it."""

    def __init__(self, name: str, title: str) -> None:
        self.title = title
        self.worker = Worker(dry_run_worker.__file__, name, instead=_untried)
        # How a model crashed as it was loaded, or ran on inputs of some shapes; "" if not.
        self.loaded: dict[str, str] = {}
        self.ran: dict[tuple[str, Shapes], str] = {}
        self.dropped: list[int] = []

    def drop(self, number: int) -> None:
        """Keep a model no longer: by the next request.

        This is called from wherever the last reference goes, even from a request's own work.
        """
        self.dropped.append(number)


_workers: Final = {
    "openvino": _Library("openvino", "OpenVINO"),
    "onnxruntime": _Library("onnxruntime", "ONNX Runtime"),
    "tensorflow": _Library("tensorflow", "TensorFlow"),
}


_numbers: Final = itertools.count()


def warm_up(library: str) -> None:
    """Start the process unless it runs, without waiting for it: 0.1 to 0.5 s of a core."""
    _workers[library].worker.warm_up()


@dataclass(slots=True, kw_only=True)
class DryRun:
    """A model as ``library`` is about to load it, and then to run it on inputs of a new shape.

    Attributes:
        library: ``openvino``, ``onnxruntime`` or ``tensorflow``.
        settings: What it is loaded with, as ``dry_run_worker`` reads it.
        model: Its path or bytes; None if it is not tried.
        data: Further files of the model, by their paths from its folder, as of its weights.
        where: What errors name.
        fix: What a user can do if it crashes.
        key: Tells the model and its settings from others; empty until it is tried.
        number: Tells this dry run from others, which may be of an equal model: each keeps and
            drops its own.
        shapes: Those of the inputs on which it ran.
    """

    library: str
    settings: Mapping[str, Any]
    model: Path | bytes | None
    where: str = ""
    fix: str = ""
    data: Collection[str | Path] = ()
    key: str = field(default="", init=False)
    number: int = field(default_factory=_numbers.__next__, init=False)
    shapes: set[Shapes] = field(default_factory=set[Shapes], init=False)

    def load(self) -> DryRun:
        """Load the model in the other process; returns the dry run, for its runs.

        Raises:
            CrashedError: If that ends the process.
            TooLargeError: If it would take more memory than there is.
        """
        self._try("load")
        return self

    def run(
        self, arrays: Sequence[np.ndarray[Any, Any]], feeds: Callable[[], Sequence[Feed]]
    ) -> None:
        """Run the model in the other process, unless it ran there on such shapes before.

        Args:
            arrays: The inputs.
            feeds: Gives them as the library takes them. It is called if the model is run:
                this function is part of runs that are timed.

        Raises:
            CrashedError: If that ends the process.
        """
        shapes = tuple([array.shape for array in arrays])
        if not self.key or shapes in self.shapes:
            return
        known, at = _workers[self.library].ran, (self.key, shapes)
        if at not in known and all(a.dtype.kind not in "OU" for a in arrays):
            with self._recorded(known, at):
                self.ask_to_run(feeds(), "load", fresh=True)
        self._raise_known(known.get(at, ""))
        self.shapes.add(shapes)
        if isinstance(self.model, bytes):  # the other process holds it
            self.model = None

    def keep(self) -> Kept | None:
        """Load the model in the other process, to be run there; None if it cannot be.

        Then it is loaded here, which raises what the library raises.

        Raises:
            CrashedError: If that ends the process.
        """
        answer = self._try("keep")
        if answer is None or answer[0]["status"] != "done":
            return None
        return Kept(self, answer[0]["told"])

    def _try(self, call: str) -> Answer | None:
        """Load the model in the other process; None if it is not tried, or was before."""
        if self.model is None:
            return None
        self._check_size()
        known, self.key = _workers[self.library].loaded, self._identity(self.model)
        self._raise_known(known.get(self.key, ""))
        if call == "load" and self.key in known:
            return None
        with self._recorded(known, self.key):
            return self._send_model(call)

    def _check_size(self) -> None:
        """Raise TooLargeError for a model that an engine cannot load; it may still read it."""
        model = self.model
        if model is None or not self.settings.get("compile", True):
            return
        size = self._size(model)
        if size > most_loaded_bytes():
            raise TooLargeError(
                f"the model has {size / 1e9:.1f} GB, too much to be loaded in the"
                f" {memory_bytes() / 1e9:.1f} GB of this machine's memory",
                where=self.where,
                fix="use a machine with more memory",
            )

    def _files(self, model: Path) -> list[Path]:
        """The model's own file, or its folder, and those of ``data`` that there are."""
        beside = (model.parent / name for name in self.data)
        # Path.is_file raises where a name is too long for the file system.
        return [model, *(part for part in beside if os.path.isfile(part))]

    def _size(self, model: Path | bytes) -> int:
        """Bytes of the model's files, or of a model that is given as bytes."""
        if isinstance(model, bytes):
            return len(model)
        return sum(part.stat().st_size for part in self._files(model))

    def _raise_known(self, crash: str) -> None:
        """Raise CrashedError if the text is one of a crash."""
        if crash:
            raise CrashedError(crash, where=self.where, fix=self.fix)

    @contextmanager
    def _recorded(self, known: dict[T, str], key: T) -> Generator[None]:
        """Record in ``known`` how what is tried inside the block crashes."""
        known[key] = ""
        try:
            yield
        except CrashedError as error:
            known[key] = error.what
            raise

    def ask_to_run(self, feeds: Sequence[Feed], call: str, *, fresh: bool) -> Answer:
        """Run the model in the other process, which loads it by ``call`` if it lost it."""
        raw = [(name, plain(array), kind) for name, array, kind in feeds]
        stated = [(name, a.dtype.str, a.shape, kind) for name, a, kind in raw]
        request = {"call": "run", "feeds": stated, "fresh": fresh}
        return self.ask(request, b"".join(a.tobytes() for _, a, _ in raw), call)

    def ask(self, request: Mapping[str, Any], payload: bytes, call: str) -> Answer:
        """The other process's answer; it loads the model by ``call`` if it lost it."""
        answer = self._ask(request, payload)
        if answer[0]["status"] == "absent" and self._can_be_sent():
            self._send_model(call)
            answer = self._ask(request, payload)
        return answer

    def _can_be_sent(self) -> bool:
        """Whether the model is still here: its file may have been a temporary one."""
        model = self.model
        return isinstance(model, bytes) or (model is not None and model.exists())

    def _identity(self, model: Path | bytes) -> str:
        """Equal for models that are the same, with the same settings."""
        hasher = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode())
        if isinstance(model, bytes):
            hasher.update(model)
        elif (
            (files := self._files(model)) == [model]
            and model.is_file()
            and model.stat().st_size <= MOST_BYTES
        ):
            # As the same bytes in memory: a written model is one that was tried before.
            hasher.update(model.read_bytes())
        else:
            for part in files:
                state = part.stat()
                hasher.update(f"{part.resolve()} {state.st_mtime_ns} {state.st_size}".encode())
        return hasher.hexdigest()

    def _send_model(self, call: str) -> Answer:
        model = self.model
        assert model is not None
        request: dict[str, Any] = {"call": call, "settings": self.settings}
        if isinstance(model, bytes):
            return self._ask({**request, "bytes": len(model)}, model)
        path = os.fspath(model.absolute())
        return self._ask({**request, "bytes": self._size(model), "path": path}, b"")

    @property
    def _is_limited(self) -> bool:
        """Whether the process has a limit: drivers of other devices reserve many addresses."""
        providers = self.settings.get("providers", _ON_CPU)
        on_cpu = self.settings.get("device", "CPU").startswith("CPU")
        return self.library in _LIMITED and on_cpu and [*providers] == [*_ON_CPU]

    def _ask(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        """The process's answer; it drops models that are kept no longer."""
        library = _workers[self.library]
        named = {"key": self.key, "number": self.number, "drop": library.dropped}
        request = {**request, **named}
        library.dropped, size = [], request.get("bytes", len(payload))
        limits: Limits = {
            "more_memory": most_tried_bytes(size) if self._is_limited else None,
            "seconds": _MOST_SECONDS + _SECONDS_PER_BYTE * size,
        }
        stages = ["before it read"]
        try:
            header, answer = library.worker.call(
                request, payload, limits, lambda _, stage: stages.append(_STAGES[stage])
            )
        except WorkerDiedError as error:
            what = f"{library.title} {error} {stages[-1]} the model"
            raise CrashedError(what, where=self.where, fix=self.fix) from error
        if header["status"] == "raised" and memory_error(RuntimeError(header["text"])):
            what = f"{library.title} is out of memory for the model: {header['text']}"
            raise CrashedError(what, where=self.where, fix=self.fix)
        return header, answer


class Kept:
    """A model that the other process has loaded, and keeps as long as this is held.

    ``told`` is what the library tells of it, as ``dry_run_worker`` says.
    """

    def __init__(self, dry_run: DryRun, told: Mapping[str, Any]) -> None:
        self.told = told
        self._dry_run = dry_run
        library = _workers[dry_run.library]
        weakref.finalize(self, library.drop, dry_run.number).atexit = False

    def kernels(self) -> Sequence[KernelFacts]:
        """Its kernels, in the order in which they run.

        Raises:
            CrashedError: If that ends the process.
            RuntimeError: What the library raises.
        """
        header, _ = _done(self._dry_run.ask({"call": "kernels"}, b"", "keep"))
        kernels: Sequence[KernelFacts] = header["kernels"]
        return kernels

    def run(self, feeds: Sequence[Feed], *, fresh: bool) -> list[np.ndarray[Any, Any]]:
        """Run it, with an empty state if ``fresh``; the outputs in order.

        Raises:
            CrashedError: If that ends the process.
            RuntimeError: What the library raises.
        """
        header, payload = _done(self._dry_run.ask_to_run(feeds, "keep", fresh=fresh))
        return arrays_of(header["outputs"], payload)


def _done(answer: Answer) -> Answer:
    """The answer, or a RuntimeError of what the library raised."""
    header, _ = answer
    if header["status"] != "done":
        raise RuntimeError(header.get("text", header["status"]))
    return answer
