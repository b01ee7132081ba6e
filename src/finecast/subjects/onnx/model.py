"""An ONNX model, opened: each verb's work on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finecast.devices.emulation import Emulation
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import OnnxFile, from_model
from finecast.frontends.onnx.opset import stated_for_engines
from finecast.pipeline.program import Program
from finecast.planning.plan import Plan
from finecast.subjects.engine.model import EngineModel
from finecast.subjects.engine.source import check_trust
from finecast.subjects.onnx.program import OnnxProgram
from finecast.subjects.onnx.source import OnnxSource


def read(path: Path, *, trust: bool = False) -> OnnxModel:
    """Open the model in a file; nothing in such a file is ever executed.

    Raises:
        UsageError: If ``trust`` is given: there is nothing to trust.
    """
    check_trust(path, trust=trust)
    return OnnxModel(file=stated_for_engines(frontend.load(path)))


def take(model: Any) -> OnnxModel:
    """Open an onnx.ModelProto, an onnx_ir.Model or an ``OnnxFile``."""
    file = model if isinstance(model, OnnxFile) else from_model(model)
    return OnnxModel(file=stated_for_engines(file))


@dataclass(slots=True, kw_only=True)
class OnnxModel(OnnxSource, EngineModel):
    """An ONNX model, opened."""

    def to_fp32(self, from_type: str) -> OnnxModel:
        """The model with its ops of that type in fp32; inputs and outputs keep their types."""
        return OnnxModel(file=frontend.take_to_fp32(self.file, from_type))

    def source_for(self, plan: Plan) -> OnnxModel:
        """Converted to fp32 from the type that the plan names, if it names one."""
        return OnnxModel(file=frontend.planned(self.file, plan))

    def program(self, emulation: Emulation) -> Program:
        """The model with its accumulations written out as the device computes them."""
        return OnnxProgram(source=self, emulation=emulation)
