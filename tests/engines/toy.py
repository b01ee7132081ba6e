"""An engine in as few lines as one takes: ONNX's reference evaluator, at stated times.

A step takes 1 ms, a quarter of it where it gives bf16, and a cast 50 us, on a clock of the
engine's own that ``install`` puts under finecast's timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from finecast import engines
from finecast.engines import probe
from finecast.engines.base import (
    DTYPES,
    Array,
    Engine,
    Feeds,
    KernelTime,
    Session,
    dtype_label,
    ordered_feeds,
)
from finecast.engines.source import ModelSource, read_source
from finecast.errors import EngineError, UsageError
from finecast.measure import timing
from finecast.plugin import EngineEntry

STEP_S: Final = 1e-3
SPEED: Final = {"bf16": 4.0}
CAST_S: Final = 5e-5
TICK_S: Final = 1e-6
ROW: Final = EngineEntry(
    name="toy",
    module=__name__,
    factory="ToyEngine",
    requires="onnx",
    install="pip install onnx",
)


@dataclass
class Clock:
    """Time that this engine's runs move; stands for the module ``time``."""

    now_s: float = 0.0

    def perf_counter(self) -> float:
        self.now_s += TICK_S  # what waits for time to pass does not wait for ever
        return self.now_s


CLOCK: Final = Clock()


def install(monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine's name, known to the whole package until the test ends."""
    monkeypatch.setattr(engines, "ENGINES", {**engines.ENGINES, "toy": ROW})
    monkeypatch.setattr(probe, "_cache", {})
    for name, value in (("_BUDGET_S", 0.0), ("_FEWEST_TURNS", 2), ("_ALIKE", 2)):
        monkeypatch.setattr(probe, name, value)  # stated times need no repetition
    for timed in (timing, probe):
        monkeypatch.setattr(timed, "time", CLOCK)
    return "toy"


def devices() -> tuple[str, ...]:
    """The devices that it finds here."""
    return (ROW.device,)


class ToyEngine(Engine):
    """Runs each step of a model by ONNX's own definition of the op."""

    name = "toy"

    def __init__(self, device: str) -> None:
        if device not in devices():
            raise EngineError(f"the toy has no device {device!r}", fix="use CPU")
        self.device = device

    def load(self, model: Path | bytes, *, profiling: bool = False) -> ToySession:
        source = read_source(model)
        try:
            runs = ReferenceEvaluator(str(model) if isinstance(model, Path) else model)
        except NotImplementedError as error:
            op = next((s.op for s in source.steps if "." in s.op), "one of its ops")
            raise EngineError(f"the toy cannot load the model: no kernel for {op}") from error
        return ToySession(
            source=source, runs=runs, kernels=_kernels(runs.proto_), profiling=profiling
        )


@dataclass(kw_only=True)
class ToySession(Session):
    source: ModelSource
    runs: ReferenceEvaluator
    kernels: list[KernelTime]
    profiling: bool

    def __post_init__(self) -> None:
        self.inputs, self.outputs = self.source.inputs, self.source.outputs

    def run(self, feeds: Feeds) -> dict[str, Array]:
        arrays = ordered_feeds(feeds, self.inputs)
        named = {s.name: a for s, a in zip(self.inputs, arrays, strict=True)}
        try:
            found: Any = self.runs.run(None, named)
        except Exception as error:  # numpy's and the evaluator's own share no base
            text = " ".join(str(error).split())
            raise EngineError(f"the toy cannot run the model: {text}") from error
        CLOCK.now_s += sum(k.time_s for k in self.kernels)
        return {
            # numpy gives products of bf16 in fp32
            spec.name: np.asarray(array).astype(DTYPES[spec.dtype])
            for spec, array in zip(self.outputs, found, strict=True)
        }

    def profile(self, feeds: Feeds, *, repeats: int = 5) -> list[KernelTime]:
        if not self.profiling:
            raise UsageError("this session has no profile", fix="load with profiling=True")
        del repeats  # every run takes the same time
        self.run(feeds)
        return sorted(self.kernels, key=lambda k: -k.time_s)


def _kernels(proto: onnx.ModelProto) -> list[KernelTime]:
    """The stated time of every step, by the type of what it gives."""
    graph = onnx.shape_inference.infer_shapes(proto).graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.output)}
    found: list[KernelTime] = []
    for node in graph.node:
        code = types.get(node.output[0], onnx.TensorProto.FLOAT)
        label = dtype_label(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(code)))
        time_s = CAST_S if node.op_type == "Cast" else STEP_S / SPEED.get(label, 1.0)
        name = node.name or node.output[0]
        found.append(
            KernelTime(
                kernel=name, kind=node.op_type, ops=(name,), format=label, time_s=time_s
            )
        )
    return found
