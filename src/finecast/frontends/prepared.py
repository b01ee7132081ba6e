"""A model ready to be planned, of a library whose models are planned as they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from finecast.frontends.replaying import resolve_io
from finecast.frontends.roundable import Roundable, with_switches
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.switches import Switch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLibrary:
    """What a library's models can state.

    Attributes:
        name: What messages call the kind of its models.
        types: Formats that are types of the library's.
        states: Formats that its models can state.
    """

    name: str
    types: Collection[Format]
    states: Collection[Format]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedAsIs(ABC):
    """A model and its graph; there are no operation sets, and no type is taken out first."""

    graph: Graph
    of: ModelLibrary

    @property
    @final
    def library(self) -> str:
        """What messages call the kind of its models."""
        return self.of.name

    @property
    @final
    def states(self) -> Collection[Format]:
        """Formats that a model of this kind can state."""
        return self.of.states

    @property
    @final
    def from_type(self) -> str:
        """The type whose ops were taken to fp32 first: none."""
        return ""

    @final
    def minimal_opset(self, formats: Mapping[int, Format]) -> int:
        """There are no operation sets."""
        del formats
        return 0

    @final
    def can_cast(self, fmt: Format) -> bool:
        """Whether an op could be stated between casts to ``fmt``."""
        return fmt in self.of.states

    @final
    def resolve_io(self, io: Mapping[str, Format]) -> dict[int, Format]:
        """Declared formats by value id."""
        return resolve_io(self.graph, io, self.of.types, self.of.name)

    @final
    def with_switches(self, switches: Sequence[Switch]) -> Any:
        """A copy that rounds what its extra input switches on."""
        return with_switches(self.roundable(), switches)

    @abstractmethod
    def roundable(self) -> Roundable:
        """A copy whose values can be rounded."""
