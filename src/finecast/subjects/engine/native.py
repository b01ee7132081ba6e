"""What is asked of a frontend whose models an engine runs as files or as native objects."""

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
from finecast.planning.switches import Switch
from finecast.rules.policy import Policy


class PreparedModel(Protocol):
    """A model as a policy plans it, and the copies of it that show and round its values."""

    @property
    def graph(self) -> Graph:
        """Its graph."""
        ...

    @property
    def library(self) -> str:
        """What messages call the kind of its models."""
        ...

    @property
    def states(self) -> Collection[Format]:
        """Formats that a model of this kind can state."""
        ...

    @property
    def from_type(self) -> str:
        """The type whose ops were taken to fp32 before; empty if none."""
        ...

    def minimal_opset(self, formats: Mapping[int, Format]) -> int:
        """The operation set that ops need for formats, by node id; 0 where there is none."""
        ...

    def can_cast(self, fmt: Format) -> bool:
        """Whether the model can round to ``fmt`` around an op."""
        ...

    def resolve_io(self, io: Mapping[str, Format]) -> dict[int, Format]:
        """Declared formats by value id.

        Raises:
            UsageError: If a name or a format is none of the model's.
        """
        ...

    def observable(self) -> Mapping[str, int]:
        """Ids of the float values that can be shown, by names for ``with_outputs``."""
        ...

    def with_outputs(self, names: Sequence[str]) -> Any:
        """A native copy whose outputs are just the values called ``names``."""
        ...

    def with_switches(self, switches: Sequence[Switch]) -> Any:
        """A native copy, computing in fp32, that rounds what its input SWITCH turns on."""
        ...

    def static_shapes(self, inputs: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """Shapes by observable name, as far as they follow from those of inputs."""
        ...


class RestatedOps(Protocol):
    """Ops that were stated otherwise."""

    @property
    def nodes(self) -> Sequence[str]:
        """Their names."""
        ...

    @property
    def reason(self) -> str:
        """Why."""
        ...


class AppliedModel(Protocol):
    """The native model that a plan gives, and the edits that made it."""

    @property
    def model(self) -> Any:
        """The model."""
        ...

    @property
    def graph(self) -> Graph:
        """The graph of the model before the edits."""
        ...

    @property
    def edits(self) -> tuple[Edit, ...]:
        """What was changed."""
        ...

    @property
    def restated(self) -> Sequence[RestatedOps]:
        """Low ops that are stated as the plan's engine knows them."""
        ...

    def observable(self) -> Mapping[str, int]:
        """Ids of the float values that can be shown, by names for ``with_outputs``."""
        ...

    def with_outputs(self, names: Sequence[str]) -> Any:
        """A native copy whose outputs are just the values called ``names``."""
        ...


@dataclass(slots=True, kw_only=True)
class EngineBuilt:
    """A model that a plan gives; ``loaded`` in an engine once it has been run there.

    ``size_bytes`` is that of the model and its tensors.
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
        """Casts inside."""
        return cast_count(self.applied.graph, self.applied.edits)

    def release(self) -> None:
        """Unload it."""
        self.loaded = None


class NativeSource(SourceModel, Protocol):
    """A model that plans are made for, and that an engine loads."""

    @property
    def loadable(self) -> Loadable:
        """What an engine loads for the fp32 model."""
        ...

    @property
    def given(self) -> Loadable | None:
        """The model that it was made of, where that is the faster one; else None."""
        ...

    @property
    def opset(self) -> int:
        """Its operation set; 0 where there is none."""
        ...

    def runners(self, spec: str | None) -> Sequence[Engine]:
        """The engine asked for, else all here that run such models, the preferred one first.

        Raises:
            UsageError: If the one asked for does not.
            EngineError: If there is none.
        """
        ...

    def reference(self) -> Session:
        """The fp32 model's own numbers; no time of it counts."""
        ...

    def truth(self) -> tuple[Session | None, tuple[str, ...]]:
        """A more exact model that it was taken from, and what is to be told of how it was."""
        ...

    def prepare(self, policy: Policy) -> PreparedModel:
        """The model as ``policy`` plans it; that of the last policy is kept."""
        ...

    def prepare_once(self, *, own: bool) -> PreparedModel:
        """The model as it is; it may be used up where the caller has it for its ``own``."""
        ...

    @property
    def told(self) -> Sequence[str]:
        """What is to be told of how the model was taken."""
        ...

    @property
    def input_shapes(self) -> Mapping[str, tuple[Dim, ...] | None]:
        """Declared shapes of the inputs that a caller gives."""
        ...

    def kept(self, graph: Graph, policy: Policy) -> Sequence[str]:
        """Which ops keep a type of their own, and how they would not."""
        ...

    def earlier(self, policy: Policy) -> Sequence[str]:
        """What becomes of a conversion that the model came with."""
        ...

    def check(self, output: Destination) -> None:
        """Raise UsageError unless the model, converted, may be written there."""
        ...

    def consume(self, prepared: PreparedModel, plan: Plan) -> EngineBuilt:
        """As ``build``; what nobody needs any more of ``prepared`` may become the result."""
        ...

    def store(
        self,
        built: EngineBuilt,
        output: Destination,
        engines: Sequence[Engine],
        feeds: FeedMaker,
    ) -> tuple[int, Verified]:
        """Put the model at its destination; bytes on disk, and how it was verified.

        The first of ``engines`` that runs both models verifies it.

        Raises:
            UsageError: If the output cannot be written.
            ModelError: If the model is not valid.
            WrongNumbersError: If its formats do not explain what it gives.
            EngineError: If no engine can load it.
        """
        ...

    def handed(self, built: EngineBuilt) -> Any:
        """The model as a caller gets it where it is not written."""
        ...

    def build(self, plan: Plan) -> EngineBuilt:
        """The model of ``plan``.

        Raises:
            ModelError: If the plan was made for another model.
        """
        ...


class RoundableSource(NativeSource, Protocol):
    """A model of which copies are made that round its values in fp32."""

    def roundable(self, policy: str, adjustments: Sequence[Adjustment] = ()) -> Roundable:
        """A new copy, as it is planned by the policy of that label, operands adjusted."""
        ...
