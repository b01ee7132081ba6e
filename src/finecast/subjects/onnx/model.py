"""An ONNX model, opened: each verb's work on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from finecast.devices.emulation import Emulation
from finecast.engines.fallen_apart import FallenApart, broken_by, load_with_kernels
from finecast.errors import EngineError
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import OnnxFile, from_model
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
    return OnnxModel(file=frontend.load(path))


def take(model: Any) -> OnnxModel:
    """Open an onnx.ModelProto, an onnx_ir.Model or an ``OnnxFile``."""
    return OnnxModel(file=model if isinstance(model, OnnxFile) else from_model(model))


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

    def fallen_apart(self, plan: Plan, engine: str | None) -> Sequence[FallenApart]:
        """Kernels of the fp32 model whose ops the plan lowers and then run in several kernels.

        Both models are compiled for that, so that large models are refused.
        """
        nodes, size = len(self.file.model.graph), self.size_bytes
        if nodes > _MOST_NODES_COMPILED or size > _MOST_BYTES_COMPILED:
            raise EngineError(
                f"a model of {nodes} nodes and {size / 1e6:.0f} MB would be compiled twice",
                where=self.file.name,
                fix="finecast convert compiles it to verify it, and tells",
            )
        chosen = self.runners(engine)[0]
        _, before = load_with_kernels(chosen, self.file.path)
        _, after = load_with_kernels(chosen, frontend.to_bytes(self.build(plan).model))
        return broken_by(plan, before, after)


# OpenVINO 2026.4 compiles 200 MB of weights in 0.6 s of a CPU, and 6,000 nodes in 10 s.
_MOST_NODES_COMPILED: Final = 4000
_MOST_BYTES_COMPILED: Final = 1 << 30
