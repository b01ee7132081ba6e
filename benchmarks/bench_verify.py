"""Which planted drifts ``finecast verify`` catches, on the digits net in int8.

    python -m benchmarks.bench_verify

The net is converted and locked here. Each drift is planted, and ``verify`` runs in a process
of its own, as on another machine. Reported are the checks that drifted or were told; one that
does not catch its drift misses the bar.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import numpy_helper

import finecast
from benchmarks.common import report

DIGITS: Final = Path(__file__).parent.parent / "examples" / "digits"


def _changed_weight(folder: Path) -> None:
    proto = onnx.load(folder / "low.onnx")
    weight = max(proto.graph.initializer, key=lambda one: len(one.raw_data))
    array = np.array(numpy_helper.to_array(weight))
    array.flat[0] ^= 64
    weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    onnx.save(proto, folder / "low.onnx")


def _stated(**engine: str) -> Callable[[Path], None]:
    """Say in the lock that another engine wrote it: the one here is then newer, or older."""

    def plant(folder: Path) -> None:
        path = folder / "low.lock.json"
        found = json.loads(path.read_text())
        found["engine"] |= engine
        path.write_text(json.dumps(found))

    return plant


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """What is planted: in the files, in the environment, or in the engine's settings."""

    name: str
    check: str
    plant: Callable[[Path], None] | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    setting: str = ""


def _limit(name: str, check: str, sets: str) -> Drift:
    return Drift(name=name, check=check, environment={"ONEDNN_MAX_CPU_ISA": sets})


DRIFTS: Final = (
    Drift(name="none", check=""),
    Drift(name="bf16 hint", check="settings", setting="INFERENCE_PRECISION_HINT=bf16"),
    _limit("AVX512 without VNNI: sums saturate", "numbers", "AVX512_CORE"),
    _limit("AVX2", "kernels", "AVX2"),
    Drift(name="an older engine", check="engine", plant=_stated(version="2027.0.0")),
    Drift(name="a changed weight", check="model", plant=_changed_weight),
    Drift(name="cache in 8 bits", check="settings", setting="KV_CACHE_PRECISION=u8"),
    Drift(
        name="dynamic quantization",
        check="settings",
        setting="DYNAMIC_QUANTIZATION_GROUP_SIZE=32",
    ),
    Drift(name="one thread", check="settings", setting="INFERENCE_NUM_THREADS=1"),
    Drift(name="denormals", check="settings", setting="CPU_DENORMALS_OPTIMIZATION=YES"),
    Drift(
        name="a variable of the environment",
        check="settings",
        environment={"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"},
    ),
)


def found(drift: Drift) -> dict[str, Any]:
    """What ``verify`` says of a fresh model with this drift."""
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), DIGITS / "digits_eval.npz"
        model = DIGITS / "digits.onnx"
        options: dict[str, Any] = {"policy": "all:int8", "lock": True, "progress": False}
        finecast.convert(model, folder / "low.onnx", data=data, **options)
        if drift.plant is not None:
            drift.plant(folder)
        command = [sys.executable, "-m", "finecast", "verify", "low.onnx", "--json"]
        command += ["--set", drift.setting] if drift.setting else []
        run = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | drift.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return {**json.loads(run.stdout), "exit_code": run.returncode}


def main() -> None:
    """A line for each drift."""
    for drift in DRIFTS:
        seen = found(drift)
        states = {c["name"]: c["state"] for c in seen["checks"] if c["state"] != "holds"}
        caught = drift.check in states if drift.check else not states.keys() - {"speed"}
        report(
            "verify",
            drift.name,
            float(caught),
            "caught" if drift.check else "quiet",
            bar=1.0,
            at_least=True,
            checks=", ".join(f"{name} {state}" for name, state in states.items())
            or "all hold",
            worst_deviation=max(seen["deviations"].values()),
            exit_code=seen["exit_code"],
        )


if __name__ == "__main__":
    main()
