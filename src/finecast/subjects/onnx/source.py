"""An ONNX model that plans are made for and built of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from finecast.engines.base import Engine
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import Applied, OnnxFile, Prepared
from finecast.graph import Dim, Graph
from finecast.pipeline.artefact import Destination, Verified
from finecast.pipeline.conversion import kept_types
from finecast.pipeline.sources import FeedMaker
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.rules.policy import Policy, Scope
from finecast.rules.quantized import quantized_notes
from finecast.subjects.engine.native import EngineBuilt, PreparedModel
from finecast.subjects.onnx.artefact import check_output, input_shapes, write

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir


@dataclass(slots=True, kw_only=True)
class OnnxSource:
    """A file, with the model as the last policy had it prepared."""

    file: OnnxFile
    _prepared: tuple[Policy, Prepared] | None = field(default=None, init=False)

    @property
    def model(self) -> ir.Model:
        """The model."""
        return self.file.model

    @property
    def name(self) -> str:
        """The file as it was named."""
        return self.file.name

    @property
    def digest(self) -> str:
        """Of the file and its external data."""
        return self.file.digest

    @property
    def size_bytes(self) -> int:
        """Of the file and its external data."""
        return self.file.size_bytes

    def prepare(self, policy: Policy) -> Prepared:
        """The model as ``policy`` plans it; that of the last policy is kept."""
        if self._prepared is None or self._prepared[0] != policy:
            self._prepared = (policy, frontend.prepare(self.file, policy))
        return self._prepared[1]

    def check_policy(self, policy: Policy) -> None:
        """Names that match nothing are refused as the model is prepared."""
        self.prepare(policy)

    @property
    def loadable(self) -> Path:
        """The file."""
        return self.file.path

    def build(self, plan: Plan) -> EngineBuilt:
        """The plan replayed on the native model."""
        return _built(plan, frontend.apply(self.file, plan))

    def notes(self, planner: Planner) -> Sequence[str]:
        """Of an earlier conversion, and of ops that keep what they have."""
        policy, graph = planner.policy, planner.graph
        return [*self.earlier(policy), *self.kept(graph, policy), *quantized_notes(graph)]

    def earlier(self, policy: Policy) -> list[str]:
        """What becomes of a conversion that the file came with."""
        was = self.file.model.metadata_props.get(frontend.POLICY_KEY)
        if was is None:
            return []
        if policy.scope is Scope.NONE or was == policy.label:
            return [
                f"an earlier conversion to {was} stays: for fp32 give the model of before it"
            ]
        return [f"an earlier conversion to {was} was taken back"]

    def kept(self, graph: Graph, policy: Policy) -> list[str]:
        """Which ops keep a type of their own, and the option that takes them out of it."""
        return [
            f"{text}: --from-type {label} (from_type={label!r}) takes them to fp32 first"
            for label, text in kept_types(graph, policy).items()
        ]

    @property
    def told(self) -> Sequence[str]:
        """How it was taken to fp32, if it was."""
        return self.file.notes

    @property
    def input_shapes(self) -> Mapping[str, tuple[Dim, ...] | None]:
        """Declared shapes of the inputs that a caller gives."""
        return input_shapes(self.file)

    def check(self, output: Destination) -> None:
        """Raise UsageError unless the model, converted, may be written there."""
        check_output(self.file, output)

    def consume(self, prepared: PreparedModel, plan: Plan) -> EngineBuilt:
        """As ``build``; the prepared model may become the result."""
        assert isinstance(prepared, Prepared)
        self._prepared = None
        return _built(plan, frontend.apply(self.file, plan, prepared))

    def store(
        self,
        built: EngineBuilt,
        output: Destination,
        engines: Sequence[Engine],
        feeds: FeedMaker,
    ) -> tuple[int, Verified]:
        """Checked, loaded and run before it takes its name."""
        assert isinstance(built.applied, Applied)
        return write(self.file, built.plan, built.applied, output, engines, feeds)

    def handed(self, built: EngineBuilt) -> onnx.ModelProto:
        """A message."""
        return frontend.to_proto(built.model)


def _built(plan: Plan, applied: Applied) -> EngineBuilt:
    size = frontend.size_bytes(applied.model)
    return EngineBuilt(plan=plan, applied=applied, size_bytes=size)
