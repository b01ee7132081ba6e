"""Peak memory of loading and running a model, in a process of its own.

A fresh process, because the high-water mark of this one never goes down. The mark is
the kernel's ``VmHWM``; ``ru_maxrss`` would start at this process's own, which a child
inherits. This module is what a ``worker_process`` runs there, too.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from finecast.engines.base import Array, Feeds
from finecast.errors import EngineError
from finecast.files.staging import staging
from finecast.processes.memory import status_bytes
from finecast.processes.worker import Limits, Worker, WorkerDiedError

_LIMITS: Final[Limits] = {"seconds": 600}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Resident bytes: with the engine imported but no model, and at the peak."""

    idle_bytes: int
    peak_bytes: int

    @property
    def model_bytes(self) -> int:
        """What loading and running the model added."""
        return self.peak_bytes - self.idle_bytes


def peak_memory(model: Path, engine: str, feeds: Feeds) -> MemoryUse:
    """Load ``model`` in ``engine`` (``openvino``, ``onnxruntime:CUDA``) and run it once.

    Raises:
        EngineError: If the engine cannot load or run it.
    """
    worker = Worker(__file__, instead=None, environment={})
    with staging() as folder:
        path = folder / "feeds.npz"
        np.savez(path, allow_pickle=False, **dict(feeds))
        request = {"model": str(model), "engine": engine, "feeds": str(path)}
        try:
            header, _ = worker.call(request, limits=_LIMITS)
        except WorkerDiedError as error:
            raise EngineError(
                f"cannot measure memory: its process {error}", where=str(model)
            ) from error
        finally:
            worker.end()
    if header["status"] == "raised":
        *_, reason = (header["kind"], *header["text"].strip().splitlines())
        raise EngineError(f"cannot measure memory: {reason}", where=str(model))
    return MemoryUse(**header["use"])


def resident_peak_bytes() -> int:
    """This process's largest resident set so far."""
    peak = status_bytes("VmHWM")
    if peak:
        return peak
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def answer(request: Mapping[str, Any], *_: Any) -> tuple[Mapping[str, Any], bytes]:
    """What ``worker_process`` answers: the bytes that the model of a request takes there."""
    from finecast.engines import get_engine
    from finecast.engines.base import DTYPES

    engine = get_engine(request["engine"])
    idle = resident_peak_bytes()
    session = engine.load(Path(request["model"]))
    arrays: dict[str, Array] = {}
    with np.load(request["feeds"], allow_pickle=False) as data:
        for spec in session.inputs:
            array = data[spec.name]
            # npz keeps the bytes of ml_dtypes' types, not their names
            arrays[spec.name] = (
                array.view(DTYPES[spec.dtype]) if array.dtype.kind == "V" else array
            )
    session.run(arrays)
    peak = resident_peak_bytes()
    return {"status": "done", "use": {"idle_bytes": idle, "peak_bytes": peak}}, b""
