"""The protocols of a frontend whose models an engine loads as files or as native objects."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from finecast.engines.base import Engine, Loadable, Session
from finecast.frontends.roundable import Roundable
from finecast.graph import Dim, Graph
from finecast.numbers.formats import Format
from finecast.pipeline.artefact import Destination, Verified
from finecast.pipeline.sources import FeedMaker
from finecast.pipeline.subject import SourceModel
from finecast.planning.adjustments import Adjustment
from finecast.planning.edits import Edit, cast_count
from finecast.planning.plan import Plan
from finecast.planning.points import Switch
from finecast.rules.policy import Policy


class PreparedModel(Protocol):
    """A model prepared for a policy; makes copies that output or round its values."""

    @property
    def graph(self) -> Graph:
        """Its graph."""
        ...

    @property
    def library(self) -> str:
        """The name of the model's library in messages."""
        ...

    @property
    def states(self) -> Collection[Format]:
        """Formats that models of this kind can state."""
        ...

    @property
    def from_type(self) -> str:
        """The type whose ops were converted to fp32 beforehand; empty if none."""
        ...

    def minimal_opset(self, formats: Mapping[int, Format]) -> int:
        """The operation set that these formats, by node id, need; 0 if there are no sets."""
        ...

    def can_cast(self, fmt: Format) -> bool:
        """Whether the model can round to ``fmt`` by casts around an op."""
        ...

    def resolve_io(self, io: Mapping[str, Format]) -> dict[int, Format]:
        """Formats that the user asks for of inputs and outputs, by value id.

        Raises:
            UsageError: If a name is unknown, or a port cannot have the format.
        """
        ...

    def observable(self) -> Mapping[str, int]:
        """Ids of the float values that a copy can output, by name for ``with_outputs``."""
        ...

    def with_outputs(self, names: Sequence[str]) -> Any:
        """A native copy whose outputs are just the values called ``names``."""
        ...

    def with_switches(self, switches: Sequence[Switch]) -> Any:
        """A native copy in fp32 with these roundings, which its input ``SWITCH`` turns on."""
        ...

    def static_shapes(self, inputs: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """Shapes by observable name, as far as they can be inferred from those of inputs."""
        ...


class RestatedOps(Protocol):
    """Low ops that were rewritten for the engine's matchers."""

    @property
    def nodes(self) -> Sequence[str]:
        """The names of these ops."""
        ...

    @property
    def reason(self) -> str:
        """Why they were rewritten."""
        ...


class AppliedModel(Protocol):
    """The native model of a plan, and the edits that made it."""

    @property
    def model(self) -> Any:
        """The native model."""
        ...

    @property
    def graph(self) -> Graph:
        """The graph of the model before the edits."""
        ...

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The changes that were made."""
        ...

    @property
    def restated(self) -> Sequence[RestatedOps]:
        """Low ops that were rewritten as the plan's engine knows them."""
        ...

    def observable(self) -> Mapping[str, int]:
        """Ids of the float values that a copy can output, by name for ``with_outputs``."""
        ...

    def with_outputs(self, names: Sequence[str]) -> Any:
        """A native copy whose outputs are just the values called ``names``."""
        ...


@dataclass(slots=True, kw_only=True)
class EngineBuilt:
    """The model of a plan.

    ``size_bytes`` counts the model with its tensors; ``loaded`` is its session, once run.
    """

    plan: Plan
    applied: AppliedModel
    size_bytes: int
    loaded: Session | None = field(default=None, repr=False)

    @property
    def model(self) -> Any:
        """The native model."""
        return self.applied.model

    @property
    def casts(self) -> int:
        """Number of casts, without those of inputs and outputs; the engine's are not known."""
        if self.plan.by_hint:
            return 0
        return cast_count(self.applied.graph, self.applied.edits)

    def release(self) -> None:
        """Unload its session."""
        self.loaded = None


class NativeSource(SourceModel, Protocol):
    """A model that plans are made for, and that an engine loads."""

    @property
    def loadable(self) -> Loadable:
        """What an engine loads for the fp32 model."""
        ...

    @property
    def original(self) -> Loadable | None:
        """The quantized model that this one was converted from, to compare with; else None."""
        ...

    @property
    def opset(self) -> int:
        """Its operation set; 0 if its library has no such sets."""
        ...

    def runners(self, spec: str | None) -> Sequence[Engine]:
        """The engine given, else all installed ones for such models, the preferred one first.

        Raises:
            UsageError: If the engine given does not run such models.
            EngineError: If no engine does.
        """
        ...

    def reference(self) -> Session:
        """A session of the fp32 model, used for its numbers and never timed."""
        ...

    def truth(self) -> tuple[Session | None, tuple[str, ...]]:
        """The fp64 model that this one was converted from, if any, and notes for the user."""
        ...

    def prepare(self, policy: Policy) -> PreparedModel:
        """The model prepared for ``policy``; the last one is cached."""
        ...

    def prepare_once(self, *, own: bool) -> PreparedModel:
        """The model prepared without a change; not copied if it is the caller's ``own``."""
        ...

    @property
    def told(self) -> Sequence[str]:
        """Notes for the user on how the model was read."""
        ...

    @property
    def input_shapes(self) -> Mapping[str, tuple[Dim, ...] | None]:
        """Declared shapes of the inputs that a caller gives."""
        ...

    def kept_notes(self, graph: Graph, policy: Policy) -> Sequence[str]:
        """Notes on ops that keep a type other than fp32, and what to do about it."""
        ...

    def earlier_notes(self, policy: Policy) -> Sequence[str]:
        """Notes on what becomes of an earlier conversion of the model."""
        ...

    def check(self, output: Destination) -> None:
        """Raise UsageError unless the model, converted, may be written there."""
        ...

    def consume(self, prepared: PreparedModel, plan: Plan) -> EngineBuilt:
        """As ``build``, but parts of ``prepared`` may be used in the result."""
        ...

    def store(
        self,
        built: EngineBuilt,
        output: Destination,
        engines: Sequence[Engine],
        feeds: FeedMaker,
    ) -> tuple[int, Verified]:
        """Write the model; returns its bytes on disk, and how it was verified.

        The first of ``engines`` that runs this model and the fp32 one verifies it.

        Raises:
            UsageError: If the output cannot be written.
            ModelError: If the model is not valid.
            WrongNumbersError: If its formats do not explain its outputs.
            EngineError: If no engine can load it.
        """
        ...

    def returned(self, built: EngineBuilt) -> Any:
        """The model of a plan as the caller gets it if it is not written to a file."""
        ...

    def build(self, plan: Plan) -> EngineBuilt:
        """The model of ``plan``.

        Raises:
            ModelError: If the plan was made for another model.
        """
        ...


class RoundableSource(NativeSource, Protocol):
    """A model that can be copied with roundings of its values done in fp32."""

    def roundable(self, policy: str, adjustments: Sequence[Adjustment] = ()) -> Roundable:
        """A new copy, prepared for the policy of that label, with adjusted operands."""
        ...
