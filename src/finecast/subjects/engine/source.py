"""What the sources of all libraries have in common: a file, and what a policy makes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from finecast.engines.base import Loadable, Session
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.subject import StoredModel
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.rules.policy import Policy, Scope
from finecast.rules.quantized import quantized_notes
from finecast.subjects.engine.native import AppliedModel, EngineBuilt, PreparedModel

FileT = TypeVar("FileT", bound=StoredModel)
PreparedT = TypeVar("PreparedT", bound=PreparedModel)


@dataclass(slots=True, kw_only=True)
class FileSource(ABC, Generic[FileT, PreparedT]):
    """A file, with the model as the last policy had it prepared."""

    file: FileT
    _prepared: tuple[Policy, PreparedT] | None = field(default=None, init=False)

    @property
    def model(self) -> Any:
        """The model."""
        return self.file.model

    @property
    def path(self) -> Path:
        """Its file or folder."""
        return self.file.path

    @property
    def external(self) -> Sequence[Path]:
        """Files other than ``path`` that are read with it."""
        return self.file.external

    @property
    def name(self) -> str:
        """The file as it was named."""
        return self.file.name

    @property
    def digest(self) -> str:
        """Of all its files."""
        return self.file.digest

    @property
    def size_bytes(self) -> int:
        """Of all its files."""
        return self.file.size_bytes

    @property
    def given(self) -> Loadable | None:
        """None: the model is planned as it is."""
        return None

    def prepare(self, policy: Policy) -> PreparedT:
        """The model as ``policy`` plans it; that of the last policy is kept."""
        if self._prepared is None or self._prepared[0] != policy:
            self._prepared = (policy, self._prepare(policy))
        return self._prepared[1]

    def check_policy(self, policy: Policy) -> None:
        """Names that match nothing are refused as the model is prepared."""
        self.prepare(policy)

    def build(self, plan: Plan) -> EngineBuilt:
        """The plan replayed on a copy of the model."""
        return self._built(plan, self._apply(plan, None))

    def consume(self, prepared: PreparedModel, plan: Plan) -> EngineBuilt:
        """As ``build``; the prepared model may become the result."""
        self._prepared = None
        return self._built(plan, self._apply(plan, prepared))

    def _built(self, plan: Plan, applied: AppliedModel) -> EngineBuilt:
        size = self._size_of(applied.model)
        return EngineBuilt(plan=plan, applied=applied, size_bytes=size)

    def reference_name(self, graph: Graph) -> str:
        """The model given, where an earlier conversion or another tool made it low."""
        came_low = self.earlier(Policy(scope=Scope.NONE)) or quantized_notes(graph)
        return "the model given" if came_low else Format.FP32.label

    def notes(self, planner: Planner) -> Sequence[str]:
        """Of an earlier conversion, and of ops that keep what they have."""
        policy, graph = planner.policy, planner.graph
        return [*self.earlier(policy), *self.kept(graph, policy), *quantized_notes(graph)]

    @abstractmethod
    def _prepare(self, policy: Policy) -> PreparedT: ...

    @abstractmethod
    def _apply(self, plan: Plan, prepared: PreparedModel | None) -> AppliedModel:
        """The plan replayed; ``prepared`` may be used up."""

    @abstractmethod
    def _size_of(self, model: Any) -> int:
        """Bytes of a native model and its tensors."""

    @property
    @abstractmethod
    def loadable(self) -> Loadable:
        """What an engine loads for the fp32 model."""

    @abstractmethod
    def reference(self) -> Session:
        """The fp32 model, for its numbers."""

    @abstractmethod
    def kept(self, graph: Graph, policy: Policy) -> Sequence[str]:
        """Which ops keep a type of their own, and how they would not."""

    @abstractmethod
    def earlier(self, policy: Policy) -> Sequence[str]:
        """What becomes of a conversion that the model came with."""
