"""An ONNX model as the subject of ``fit``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from finecast.compat.neural_compressor.config import MixedPrecisionConfig
from finecast.engines import get_engine
from finecast.errors import UsageError
from finecast.files import write_bytes
from finecast.formats import Format
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import OnnxFile
from finecast.policy import Policy, Scope
from finecast.tuner.analysis import Planner, make_planner

# The engine that runs what INC gave to a backend of ONNX Runtime's; OpenVINO on the CPU,
# because ONNX Runtime has no bf16 arithmetic there.
_ENGINES: Mapping[str, str] = {
    "default": "openvino",
    "onnxrt_cuda_ep": "onnxruntime:CUDA",
    "onnxrt_trt_ep": "onnxruntime:Tensorrt",
    "onnxrt_dnnl_ep": "onnxruntime:Dnnl",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxResult:
    """A converted model; ``model`` is its ModelProto, ``lowered`` counts low nodes."""

    model: onnx.ModelProto
    lowered: int

    def save(self, root: str | Path) -> None:
        """Write the ONNX file; into a folder, as ``best_model.onnx``.

        Raises:
            UsageError: If it cannot be written.
        """
        is_folder = str(root).endswith(("/", os.sep)) or Path(root).is_dir()
        path = Path(root) / "best_model.onnx" if is_folder else Path(root)
        write_bytes(path, self.model.SerializeToString(), make_folder=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxSubject:
    """An ONNX file with its planner: ``types`` are the nodes that rules leave a low format."""

    original: onnx.ModelProto
    file: OnnxFile
    planner: Planner
    types: Mapping[str, str]

    @classmethod
    def of(cls, model: Any, settings: MixedPrecisionConfig, low: Format) -> OnnxSubject:
        """Read the model.

        Raises:
            UsageError: If ``inputs`` or ``outputs`` name what the model does not have.
            ModelError: If it is not a valid model.
            EngineError: If the backend's provider is not installed.
        """
        proto = model if isinstance(model, onnx.ModelProto) else onnx.load(str(model))
        file = (
            _file(proto) if isinstance(model, onnx.ModelProto) else frontend.load(Path(model))
        )
        ports = {p.name for p in (*proto.graph.input, *proto.graph.output)}
        unknown = [n for n in (*settings.inputs, *settings.outputs) if n not in ports]
        if unknown:
            raise UsageError(f"{unknown[0]!r} is no input or output of the model")
        engine = get_engine(_ENGINES[settings.backend])
        policy = Policy(scope=Scope.AUTO, formats=(low,))
        planner = make_planner(frontend.prepare(file, policy), policy, engine)
        types = {
            n.name: n.native.rpartition("::")[2]
            for n in planner.graph.float_nodes
            if low in planner.permissions[n.id].formats
        }
        return cls(original=proto, file=file, planner=planner, types=types)

    def build(self, kept: frozenset[str]) -> OnnxResult:
        """Everything that may be low and is not kept is."""
        low = self.planner.policy.format
        formats = {
            i: low
            if low in p.formats and self.planner.graph.nodes[i].name not in kept
            else Format.FP32
            if Format.FP32 in p.formats
            else next(iter(p.formats))
            for i, p in self.planner.permissions.items()
        }
        plan = self.planner.plan(formats, "converted by neural_compressor's interface")
        applied = frontend.apply(self.file, plan)
        lowered = sum(f is low for f in formats.values())
        return OnnxResult(model=ir.to_proto(applied.model), lowered=lowered)

    def predict(self, model: onnx.ModelProto, inputs: Any) -> Any:
        """Outputs on one batch: a mapping by name, or values in the order of the inputs."""
        session = self.planner.engine.load(model.SerializeToString())
        names = [spec.name for spec in session.inputs]
        given = inputs if isinstance(inputs, tuple | list) else (inputs,)
        feeds = inputs if isinstance(inputs, Mapping) else dict(zip(names, given, strict=True))
        outputs = list(session.run({n: np.asarray(x) for n, x in feeds.items()}).values())
        return outputs[0] if len(outputs) == 1 else outputs

    def slow(self, low: Format) -> str:
        """What probing the engine's device says of ``low``."""
        found = self.planner.engine.capabilities().get(low)
        if found is None or not found.runs:
            return found.reason if found else "not a format of this engine"
        return "" if found.worthwhile else f"{found.speed or 0:.2f} of fp32's speed (measured)"


def _file(proto: onnx.ModelProto) -> OnnxFile:
    with tempfile.TemporaryDirectory(prefix="finecast-") as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(proto, str(path))
        return frontend.load(path)
