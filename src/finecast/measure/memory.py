"""Peak memory of loading and running a model, in a process of its own.

A fresh process, because the high-water mark of this one never goes down. The mark is
the kernel's ``VmHWM``; ``ru_maxrss`` would start at this process's own, which a child
inherits. Run as ``python -m finecast.measure.memory MODEL ENGINE FEEDS.npz``, this module is
that process.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finecast.engines.base import Array, Feeds
from finecast.errors import EngineError, FinecastError
from finecast.files.staging import staging
from finecast.terminal import claim_standard_output

_TIMEOUT_S = 600
_STATUS = Path("/proc/self/status")


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
    with staging() as folder:
        path = folder / "feeds.npz"
        np.savez(path, allow_pickle=False, **dict(feeds))
        # -P: what lies in the current folder must not shadow the engine's library
        command = [sys.executable, "-P", "-m", __name__, str(model), engine, str(path)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise EngineError(
                f"measuring memory took over {_TIMEOUT_S} s", where=str(model)
            ) from error
    if done.returncode:
        raise EngineError(f"cannot measure memory: {_reason(done)}", where=str(model))
    return MemoryUse(**json.loads(done.stdout))


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:  # often SIGKILL, by which the kernel ends what takes all memory
        return f"its process got {signal.Signals(-done.returncode).name}"
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def resident_peak_bytes() -> int:
    """This process's largest resident set so far."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _child(model: Path, engine: str, feeds: Path) -> MemoryUse:
    from finecast.engines import get_engine
    from finecast.engines.base import DTYPES

    loaded = get_engine(engine)
    idle = resident_peak_bytes()
    session = loaded.load(model)
    arrays: dict[str, Array] = {}
    with np.load(feeds, allow_pickle=False) as data:
        for spec in session.inputs:
            array = data[spec.name]
            # npz keeps the bytes of ml_dtypes' types, not their names
            arrays[spec.name] = (
                array.view(DTYPES[spec.dtype]) if array.dtype.kind == "V" else array
            )
    session.run(arrays)
    return MemoryUse(idle_bytes=idle, peak_bytes=resident_peak_bytes())


def _main() -> int:
    model, engine, feeds = sys.argv[1:]
    claim_standard_output()
    try:
        use = _child(Path(model), engine, Path(feeds))
    except FinecastError as error:
        sys.stderr.write(f"{error}\n")
        return int(error.exit_code)
    sys.stdout.write(
        json.dumps({"idle_bytes": use.idle_bytes, "peak_bytes": use.peak_bytes}) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(_main())
