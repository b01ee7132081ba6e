"""An ONNX model, opened: what differs from other libraries'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from finecast.devices.emulation import Emulation
from finecast.engines import candidates
from finecast.engines.base import Engine, Session
from finecast.engines.emulator import exact_session
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import Applied, OnnxFile, Prepared, from_model
from finecast.frontends.onnx.opset import stated_for_engines
from finecast.frontends.prepared import PreparedModel
from finecast.graph import ROUNDS, Dim, Graph, Node
from finecast.pipeline.artefact import Destination, Verified
from finecast.pipeline.conversion import kept_types
from finecast.pipeline.program import Program
from finecast.pipeline.sources import FeedMaker
from finecast.planning.plan import Plan
from finecast.rules.policy import Policy
from finecast.subjects.engine.model import EngineModel
from finecast.subjects.engine.native import AS_IT_IS, EngineBuilt, check_trust
from finecast.subjects.onnx.artefact import check_output, input_shapes, truth_session, write
from finecast.subjects.onnx.program import OnnxProgram

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir


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


def _can_be_taken_out(graph: Graph, node: Node) -> bool:
    """Whether ``--from-type int8`` removes the node: it reads a constant, or a QuantizeLinear.

    What it reads of ops on codes (QLinearConv, as in QuantFormat.QOperator) has no fp32 form.
    """
    if node.op != "dequantize" or ROUNDS in node.attributes or node.inputs[0] is None:
        return False
    codes = graph.values[node.inputs[0]]
    maker = None if codes.producer is None else graph.nodes[codes.producer]
    return codes.constant is not None or (maker is not None and maker.op == "quantize")


@dataclass(slots=True, kw_only=True)
class OnnxModel(EngineModel[OnnxFile, Prepared]):
    """An ONNX model, opened."""

    library: ClassVar[str] = "ONNX"

    @property
    def loadable(self) -> Path:
        """The model's file."""
        return self.file.path

    @property
    def opset(self) -> int:
        """The version of ONNX's own operation set."""
        return frontend.opset_of(self.file.model)

    @property
    def original(self) -> Path | None:
        """The quantized file that this model was converted from, if it was."""
        original = self.file.original
        return original.path if original and self.file.from_type == frontend.CODES else None

    @property
    def input_shapes(self) -> Mapping[str, tuple[Dim, ...] | None]:
        """Declared shapes of the inputs that a caller gives."""
        return input_shapes(self.file)

    def runners(self, spec: str | None) -> Sequence[Engine]:
        """The engine given, else all installed ones."""
        return candidates(spec)

    def reference(self) -> Session:
        """The model by the definitions of its ops, in an engine used for numbers alone."""
        return exact_session(self.file.path)

    def truth(self) -> tuple[Session | None, tuple[str, ...]]:
        """The fp64 model that this one was converted from, if it runs; and notes."""
        found, note = truth_session(self.file)
        return found, (*self.told, *filter(None, [note]))

    def to_fp32(self, from_type: str) -> OnnxModel:
        """The model with its ops of that type in fp32; inputs and outputs keep their types."""
        return OnnxModel(file=frontend.take_to_fp32(self.file, from_type))

    def source_for(self, plan: Plan) -> OnnxModel:
        """Converted to fp32 from the type that the plan names, if it names one."""
        return OnnxModel(file=frontend.planned(self.file, plan))

    def program(self, emulation: Emulation) -> Program:
        """The model with its accumulations written out as the device computes them."""
        return OnnxProgram(source=self, emulation=emulation)

    def prepare_once(self, *, own: bool) -> Prepared:
        """The model prepared without a change; not copied if it is the caller's ``own``."""
        return frontend.prepare(self.file, AS_IT_IS, own=own)

    def _prepare(self, policy: Policy) -> Prepared:
        return frontend.prepare(self.file, policy)

    def _apply(self, plan: Plan, prepared: PreparedModel | None) -> Applied:
        assert prepared is None or isinstance(prepared, Prepared)
        return frontend.apply(self.file, plan, prepared)

    def _size_of(self, model: ir.Model) -> int:
        return frontend.size_bytes(model)

    def kept_notes(self, graph: Graph, policy: Policy) -> list[str]:
        """Notes on ops that keep a type other than fp32, and the option to convert them."""
        found = kept_types(graph, policy)
        if any(_can_be_taken_out(graph, node) for node in graph.nodes):
            found[frontend.CODES] = "ops between QuantizeLinear and DequantizeLinear keep int8"
        return [
            f"{text}: --from-type {label} (from_type={label!r}) takes them to fp32 first"
            for label, text in found.items()
        ]

    def check(self, output: Destination) -> None:
        """Raise UsageError unless the model, converted, may be written there."""
        check_output(self.file, output)

    def store(
        self,
        built: EngineBuilt,
        output: Destination,
        engines: Sequence[Engine],
        feeds: FeedMaker,
    ) -> tuple[int, Verified]:
        """Write the model, which is checked, loaded and run before it takes its name."""
        assert isinstance(built.applied, Applied)
        return write(self.file, built.plan, built.applied, output, engines, feeds)

    def returned(self, built: EngineBuilt) -> onnx.ModelProto:
        """The model of a plan as an onnx.ModelProto."""
        return frontend.to_proto(built.model)
