"""An ONNX model that plans are made for and built of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from finecast.engines.base import Session
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import Applied, OnnxFile, Prepared
from finecast.planning.edits import cast_count
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.rules.policy import Policy
from finecast.rules.quantized import quantized_notes
from finecast.subjects.onnx.conversion import earlier_conversion, kept_notes

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(slots=True, kw_only=True)
class OnnxBuilt:
    """An ONNX model that a plan gives; ``loaded`` in an engine once it has been run there."""

    plan: Plan
    applied: Applied
    loaded: Session | None = field(default=None, repr=False)

    @property
    def model(self) -> ir.Model:
        """The model."""
        return self.applied.model

    @property
    def casts(self) -> int:
        """Casts inside."""
        return cast_count(self.applied.graph, self.applied.edits)

    @property
    def size_bytes(self) -> int:
        """Bytes of the model and its tensors."""
        return frontend.size_bytes(self.applied.model)

    def release(self) -> None:
        """Unload it."""
        self.loaded = None


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

    def build(self, plan: Plan) -> OnnxBuilt:
        """The plan replayed on the native model."""
        return OnnxBuilt(plan=plan, applied=frontend.apply(self.file, plan))

    def notes(self, planner: Planner) -> Sequence[str]:
        """Of an earlier conversion, and of ops that keep what they have."""
        policy, graph = planner.policy, planner.graph
        earlier = earlier_conversion(self.file, policy)
        return [*earlier, *kept_notes(graph, policy), *quantized_notes(graph)]
