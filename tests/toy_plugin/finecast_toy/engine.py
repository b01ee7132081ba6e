"""An engine that runs ONNX models by the standard's own definitions of ops, IR by OpenVINO."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx.reference import ReferenceEvaluator

from finecast.engines import (
    DTYPES,
    Array,
    Engine,
    Feeds,
    ModelSource,
    Session,
    get_engine,
    ordered_feeds,
    read_source,
)


def devices() -> tuple[str, ...]:
    """The devices that the engine has here."""
    return ("CPU",)


class ReferenceEngine(Engine):
    """ONNX's reference evaluator."""

    name = "reference"

    def __init__(self, device: str) -> None:
        self.device = device

    def load(self, model: Any, *, profiling: bool = False) -> Session:
        """A session of the model; profiles of ONNX models are not known."""
        if not isinstance(model, bytes) and not str(model).endswith(".onnx"):
            return get_engine("openvino").load(model, profiling=profiling)
        runs = ReferenceEvaluator(str(model) if isinstance(model, Path) else model)
        return ReferenceSession(source=read_source(model), runs=runs)


@dataclass(kw_only=True)
class ReferenceSession(Session):
    """A model that the evaluator runs."""

    source: ModelSource
    runs: ReferenceEvaluator

    def __post_init__(self) -> None:
        """State the ports."""
        self.inputs, self.outputs = self.source.inputs, self.source.outputs

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """The outputs by name."""
        arrays = ordered_feeds(feeds, self.inputs)
        named = {spec.name: array for spec, array in zip(self.inputs, arrays, strict=True)}
        results: Any = self.runs.run(None, named)
        return {
            spec.name: np.asarray(array).astype(DTYPES[spec.dtype])
            for spec, array in zip(self.outputs, results, strict=True)
        }
