"""A model is loaded, and run, in another process before an engine does so in this one.

Some models crash an engine's library: OpenVINO 2026.4 ends the process where it compiles two
steps of a neural ODE, and where it reads a convolution without weights. What kills the other
process is one error here. Each model is tried once, with the settings that it is loaded with,
and so is its first run. What the library raises there is ignored: it is raised here, too.

Law: a dry run decides nothing but that. Where no process can be started, and for
models in memory beyond ``MOST_BYTES``, nothing is tried.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from finecast.errors import EngineError
from finecast.frontends import dry_run_worker
from finecast.frontends.worker import Answer, Worker, WorkerDiedError

MOST_BYTES: Final = 256 << 20
"""Of a model in memory: it would have to be sent. A path to a file of any size is not."""
_STAGES: Final = {"read": "as it read", "compiled": "as it compiled", "run": "as it ran"}

Feed: TypeAlias = tuple[str, Any, Any]
"""An input's name, its array, and the library's number of a type that numpy lacks, or None."""


class CrashedError(EngineError):
    """A model that ends the process of the engine which loads or runs it."""


def _untried(
    request: Mapping[str, Any], payload: bytes, tell_stage: Callable[[str], None]
) -> Answer:
    del request, payload, tell_stage
    return {"status": "untried"}, b""


class _Library:
    """An engine's library in another process, and what was tried in it."""

    def __init__(self, name: str, title: str) -> None:
        self.title = title
        self.worker = Worker(dry_run_worker.__file__, name, instead=_untried)
        self.loaded: dict[str, str] = {}
        self.ran: set[str] = set()


_workers: Final = {
    "openvino": _Library("openvino", "OpenVINO"),
    "onnxruntime": _Library("onnxruntime", "ONNX Runtime"),
    "tensorflow": _Library("tensorflow", "TensorFlow"),
}


def warm_up(library: str) -> None:
    """Start the process unless it runs, without waiting for it: 0.1 to 0.5 s of a core."""
    _workers[library].worker.warm_up()


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array; of a type that numpy lacks, its bytes as unsigned integers."""
    if array.dtype.kind == "V" or array.dtype.name.startswith(("bfloat", "float8")):
        return array.view(np.dtype(f"u{array.dtype.itemsize}"))
    return array


def _files(model: Path) -> list[Path]:
    """The model's file, and what may lie beside it with its tensors."""
    beside = (model.with_suffix(".bin"), model.with_name(f"{model.name}.data"))
    # Path.is_file raises where the name with .data is too long for the file system.
    return [model, *(part for part in beside if os.path.isfile(part))]


@dataclass(slots=True, kw_only=True)
class DryRun:
    """A model as ``library`` is about to load it, and then to run it for the first time.

    Attributes:
        library: ``openvino``, ``onnxruntime`` or ``tensorflow``.
        settings: What it is loaded with, as ``dry_run_worker`` reads it.
        model: Its path or bytes; None if it is not tried.
        where: What errors name.
        fix: What a user can do if it crashes.
    """

    library: str
    settings: Mapping[str, Any]
    model: Path | bytes | None
    where: str = ""
    fix: str = ""
    _key: str = field(default="", init=False)

    def load(self) -> DryRun:
        """Load the model in the other process; returns the dry run, for its first run.

        Raises:
            CrashedError: If that ends the process.
        """
        if isinstance(self.model, bytes) and len(self.model) > MOST_BYTES:
            self.model = None
        if self.model is None:
            return self
        known, self._key = _workers[self.library].loaded, self._identity(self.model)
        if self._key not in known:
            known[self._key] = ""
            try:
                self._send_model()
            except CrashedError as error:
                known[self._key] = error.what
                raise
        elif known[self._key]:
            raise CrashedError(known[self._key], where=self.where, fix=self.fix)
        return self

    def run(self, feeds: Sequence[Feed]) -> None:
        """Run the model in the other process, unless it ran there before.

        Raises:
            CrashedError: If that ends the process.
        """
        if self.model is None or not self._key:
            return
        done = _workers[self.library].ran
        if self._key not in done and all(
            array.dtype.kind not in "OU" for _, array, _ in feeds
        ):
            raw = [(name, _plain(array), kind) for name, array, kind in feeds]
            stated = [(name, a.dtype.str, a.shape, kind) for name, a, kind in raw]
            request = {"call": "run", "key": self._key, "feeds": stated}
            payload = b"".join(a.tobytes() for _, a, _ in raw)
            if self._ask(request, payload) == "absent":
                self._send_model()
                self._ask(request, payload)
            done.add(self._key)
        self.model = None

    def _identity(self, model: Path | bytes) -> str:
        """Equal for models that are the same, with the same settings."""
        found = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode())
        if isinstance(model, bytes):
            found.update(model)
        else:
            for part in _files(model):
                state = part.stat()
                found.update(f"{part.resolve()} {state.st_mtime_ns} {state.st_size}".encode())
        return found.hexdigest()

    def _send_model(self) -> None:
        model = self.model
        assert model is not None
        request: dict[str, Any] = {"call": "load", "key": self._key, "settings": self.settings}
        if isinstance(model, bytes):
            self._ask({**request, "bytes": len(model)}, model)
        else:
            size = sum(part.stat().st_size for part in _files(model))
            path = os.fspath(model.absolute())
            self._ask({**request, "bytes": size, "path": path}, b"")

    def _ask(self, request: Mapping[str, Any], payload: bytes) -> str:
        library = _workers[self.library]
        try:
            header, _ = library.worker.ask(request, payload)
        except WorkerDiedError as error:
            stage = _STAGES.get(error.stage, "before it read")
            raise CrashedError(
                f"{library.title} {error} {stage} the model", where=self.where, fix=self.fix
            ) from error
        status: str = header["status"]
        return status
