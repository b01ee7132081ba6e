"""What planning, observing and verifying ask of a model that was prepared for a policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from finecast.frontends.joining import ModelPair
from finecast.frontends.native_model import NativeModel
from finecast.frontends.replaying import Restated, resolve_io
from finecast.graph import Graph, Node
from finecast.numbers.formats import Format
from finecast.planning.adjustments import Adjustment
from finecast.planning.edits import Edit
from finecast.rules.policy import Adjust


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLibrary:
    """The formats of a library's models.

    Attributes:
        name: What messages call models of this kind.
        types: Formats that are tensor types of the library.
        states: Formats that values can be rounded to, by a type or by arithmetic.
    """

    name: str
    types: Collection[Format]
    states: Collection[Format]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel(ABC):
    """A model prepared for a policy; makes copies that output or round its values.

    The defaults are those of a model that is planned as it was read: nothing is raised or
    converted first.

    Attributes:
        graph: The model's graph.
        of: The formats of its library's models.
        adjusts: The kinds of adjustments that its operands can have; ``with_mean_errors`` is
            for those of models on whose operands there are codes.
        names_stay: Whether tools that change a model keep the names of its values. In PyTorch
            they are numbers of ops of a kind, anew in each export.
    """

    adjusts: ClassVar[Collection[Adjust]] = ()
    names_stay: ClassVar[bool] = True

    graph: Graph
    of: ModelLibrary

    @property
    @final
    def library(self) -> str:
        """The name of the model's library in messages."""
        return self.of.name

    @property
    @final
    def states(self) -> Collection[Format]:
        """Formats that values of such a model can be rounded to."""
        return self.of.states

    @property
    def hints(self) -> Collection[Format] | None:
        """Formats of an engine's precision hint that the model can be made for, by marks.

        Empty if this model has ops that are low; None if no model of its library can.
        """
        return None

    @property
    def from_type(self) -> str:
        """The type whose ops were converted to fp32 beforehand; empty if none."""
        return ""

    @property
    def frozen(self) -> bool | None:
        """Whether the user had weights that are inputs, too, made constants, or kept."""
        return None

    def minimal_opset(self, formats: Mapping[int, Format]) -> int:
        """The operation set that these formats, by node id, need; 0 if there are no sets."""
        del formats
        return 0

    def states_op(self, node: Node, fmt: Format, *, signed: bool) -> bool:
        """Whether the model can state ``node`` in ``fmt``, which is one of ``states``.

        ``signed`` says that the device's products on integers take signed codes alone.
        """
        del node, fmt, signed
        return True

    def can_cast(self, fmt: Format) -> bool:
        """Whether the model can round to ``fmt`` by casts around an op."""
        return fmt in self.of.states

    @final
    def resolve_io(self, io: Mapping[str, Format]) -> dict[int, Format]:
        """Formats that the user asks for of inputs and outputs, by value id.

        Raises:
            UsageError: If a name is unknown, or a port cannot have the format.
        """
        return resolve_io(self.graph, io, self.of.types, self.of.name)

    @abstractmethod
    def observable(self) -> Mapping[str, int]:
        """Ids of the float values that a copy can output, by name for ``with_outputs``."""

    def countable(self) -> Mapping[str, int]:
        """As ``observable``, with integers and bools where the library shows them."""
        return self.observable()

    @abstractmethod
    def with_outputs(self, names: Sequence[str]) -> Any:
        """A native copy whose outputs are just the values called ``names``."""

    @abstractmethod
    def roundable(self) -> NativeModel:
        """A copy in fp32 whose values can be rounded."""

    def pair(self, low: PreparedModel, *, by_types: bool) -> ModelPair:
        """Copies of this model and of ``low``, of the same library, to be joined.

        Args:
            low: The other model.
            by_types: Whether values of ``low`` may be rounded in fp32 in place of low ops.
                An engine may have no kernels of a low type, or compute fp16 in fp32. By
                default they are not: the library's own engine computes in all its types.

        Raises:
            ModelError: If they cannot be stated in one model.
        """
        del by_types
        return ModelPair.of(self.roundable(), low.roundable())

    @abstractmethod
    def static_shapes(self, inputs: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """Shapes by observable name, as far as they can be inferred from those of inputs."""

    def adjusted(self, adjustments: Sequence[Adjustment]) -> PreparedModel:
        """A copy with these adjustments, as a plan that has them makes it before its edits."""
        raise NotImplementedError(self.library)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedModel(ABC):
    """The native model of a plan, and the edits that made it.

    Attributes:
        model: The native model.
        graph: The graph of the model before the edits.
        edits: The changes that were made.
        restated: Low ops that were rewritten as the plan's engine knows them.
    """

    model: Any
    graph: Graph
    edits: tuple[Edit, ...]
    restated: tuple[Restated, ...] = ()

    @abstractmethod
    def observable(self, *, decisions: bool = False) -> Mapping[str, int]:
        """Ids of the float values that a copy can output, by name for ``with_outputs``.

        With ``decisions`` of the integers and bools.
        """

    @abstractmethod
    def with_outputs(self, names: Sequence[str]) -> Any:
        """A native copy whose outputs are just the values called ``names``."""
