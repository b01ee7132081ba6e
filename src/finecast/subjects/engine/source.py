"""The base class of models of a file: its facts, and the model prepared for a policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from finecast.engines.base import Loadable
from finecast.errors import UsageError
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


def check_trust(path: Path, *, trust: bool) -> None:
    """Raise UsageError for ``trust`` where no code in a model's file is ever executed."""
    if trust:
        raise UsageError(
            "--trust does not apply: no code in this file is executed",
            where=str(path),
            fix="leave it out",
        )


@dataclass(slots=True, kw_only=True)
class FileSource(ABC, Generic[FileT, PreparedT]):
    """A model of a file; the model prepared for the last policy is cached."""

    file: FileT
    _prepared: tuple[Policy, PreparedT] | None = field(default=None, init=False)

    @property
    def model(self) -> Any:
        """The native model."""
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
        """The name by which the file was given."""
        return self.file.name

    @property
    def digest(self) -> str:
        """Digest of all its files."""
        return self.file.digest

    @property
    def size_bytes(self) -> int:
        """Bytes of all its files."""
        return self.file.size_bytes

    @property
    def original(self) -> Loadable | None:
        """None: the model was not converted from a quantized one."""
        return None

    def prepare(self, policy: Policy) -> PreparedT:
        """The model prepared for ``policy``; the last one is cached."""
        if self._prepared is None or self._prepared[0] != policy:
            self._prepared = (policy, self._prepare(policy))
        return self._prepared[1]

    def check_policy(self, policy: Policy) -> None:
        """Prepare the model, which refuses names that match nothing."""
        self.prepare(policy)

    def build(self, plan: Plan) -> EngineBuilt:
        """Replay the plan on a copy of the model."""
        return self._built(plan, self._apply(plan, None))

    def consume(self, prepared: PreparedModel, plan: Plan) -> EngineBuilt:
        """As ``build``, but parts of ``prepared`` may be used in the result."""
        self._prepared = None
        return self._built(plan, self._apply(plan, prepared))

    def _built(self, plan: Plan, applied: AppliedModel) -> EngineBuilt:
        size = self._size_of(applied.model)
        return EngineBuilt(plan=plan, applied=applied, size_bytes=size)

    def reference_name(self, graph: Graph) -> str:
        """The name of the baseline: fp32, or the model given if that was low or quantized."""
        came_low = self.earlier_notes(Policy(scope=Scope.NONE)) or quantized_notes(graph)
        return "the model given" if came_low else Format.FP32.label

    def notes(self, planner: Planner) -> Sequence[str]:
        """Notes on an earlier conversion, and on ops that keep their types."""
        policy, graph = planner.policy, planner.graph
        return [
            *self.earlier_notes(policy),
            *self.kept_notes(graph, policy),
            *quantized_notes(graph),
        ]

    @abstractmethod
    def _prepare(self, policy: Policy) -> PreparedT: ...

    @abstractmethod
    def _apply(self, plan: Plan, prepared: PreparedModel | None) -> AppliedModel:
        """Replay the plan; parts of ``prepared``, if given, may be used in the result."""

    @abstractmethod
    def _size_of(self, model: Any) -> int:
        """Bytes of a native model and its tensors."""

    @abstractmethod
    def kept_notes(self, graph: Graph, policy: Policy) -> Sequence[str]:
        """Notes on ops that keep a type other than fp32, and what to do about it."""

    @abstractmethod
    def earlier_notes(self, policy: Policy) -> Sequence[str]:
        """Notes on what becomes of an earlier conversion of the model."""
