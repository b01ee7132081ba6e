"""An ONNX model as the subject of ``fit``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from finecast.compat.neural_compressor.config import MixedPrecisionConfig
from finecast.compat.neural_compressor.lowest import all_low_but
from finecast.compat.neural_compressor.onnx_result import (
    GivenModel,
    OnnxResult,
    given_model,
)
from finecast.compat.neural_compressor.places import engine_that_runs
from finecast.engines.base import Engine
from finecast.errors import UsageError
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import OnnxFile
from finecast.naming import unknown_name
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.planner import Planner
from finecast.rules.policy import Policy, Scope
from finecast.subjects.engine.planning import make_planner


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxFit:
    """An ONNX file with its planner; ``types`` has nodes that rules permit a low format."""

    source: GivenModel
    planner: Planner
    engine: Engine
    types: Mapping[str, str]
    known: Mapping[str, str]

    @classmethod
    def of(cls, model: Any, settings: MixedPrecisionConfig, low: Format) -> OnnxFit:
        """Read the model.

        Raises:
            UsageError: If ``inputs`` or ``outputs`` name what the model does not have.
            ModelError: If it is not a valid model.
            EngineError: If the backend's provider is not installed.
        """
        source = given_model(model)
        file = source.file
        engine = engine_that_runs(file.path, settings.device, settings.backend)
        check_ports(file, settings.ports)
        policy = Policy(scope=Scope.AUTO, formats=(low,))
        planner = make_planner(frontend.prepare(file, policy), policy, engine)
        known = {n.name: n.native.rpartition("::")[2] for n in planner.graph.nodes}
        types = {
            n.name: known[n.name]
            for n in planner.graph.float_nodes
            if low in planner.permissions[n.id].formats
        }
        return cls(source=source, planner=planner, engine=engine, types=types, known=known)

    @property
    def original(self) -> Any:
        """The model's ModelProto; its path, if it is too large for one message."""
        file = self.source.file
        fits = frontend.fits_one_message(file.model)
        return frontend.to_proto(file.model) if fits else str(file.path)

    def build(self, kept: frozenset[str]) -> OnnxResult:
        """The model with every op low that may be and is not in ``kept``."""
        plan, lowered = all_low_but(self.planner, kept)
        return OnnxResult(
            source=self.source,
            converted=frontend.apply(self.source.file, plan).model,
            lowered=len(lowered),
            products=sum(by_name(op).matmul_engine for op in lowered),
        )

    def predictor(self, model: onnx.ModelProto | str) -> Callable[[Any], Any]:
        """Outputs on one batch: a mapping by name, or values in the order of the inputs."""
        return predictor(self.engine, model)

    def slow(self, low: Format) -> str:
        """Why ``low`` gains nothing on the engine's device, measured; empty if it does."""
        found = self.engine.capabilities().get(low)
        if found is None or not found.runs:
            return found.reason if found else "not a format of this engine"
        return "" if found.worthwhile else f"{found.speed or 0:.2f} of fp32's speed (measured)"


def check_ports(file: OnnxFile, given: Sequence[str]) -> None:
    """Raise UsageError for a name that no input and no output has."""
    ends = (*file.model.graph.inputs, *file.model.graph.outputs)
    ports = [p.name or "" for p in ends]
    for name in given:
        if name not in ports:
            raise unknown_name(name, ports, what="input or output", where="of the model")


def predictor(engine: Engine, model: onnx.ModelProto | str) -> Callable[[Any], Any]:
    """Outputs on one batch: a mapping by name, or values in the order of the inputs."""
    given = Path(model) if isinstance(model, str) else model.SerializeToString()
    session = engine.load(given)
    ports = [spec.name for spec in session.inputs]

    def predict(inputs: Any) -> Any:
        outputs = list(session.run(feeds_of(inputs, ports)).values())
        return outputs[0] if len(outputs) == 1 else outputs

    return predict


def feeds_of(inputs: Any, ports: Sequence[str]) -> dict[str, Any]:
    """The inputs of one batch by name.

    Raises:
        UsageError: If there are not as many as ``ports``.
    """
    listed = inputs if isinstance(inputs, tuple | list) else (inputs,)
    if not isinstance(inputs, Mapping) and len(listed) != len(ports):
        raise UsageError(
            f"a batch has {len(listed)} inputs, and the model {len(ports)}",
            where=", ".join(ports),
            fix="let the data loader give them in this order, or by name in a dict",
        )
    ordered = zip(ports, listed, strict=False)  # not read where it is a mapping
    feeds: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else dict(ordered)
    return {name: np.asarray(x) for name, x in feeds.items()}
