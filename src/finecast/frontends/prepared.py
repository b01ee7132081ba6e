"""Models that are planned as they were read: nothing is raised or converted first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from finecast.frontends.replaying import resolve_io
from finecast.frontends.roundable import Roundable, with_switches
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.points import Switch


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
class PreparedAsIs(ABC):
    """A model and its graph, for libraries without opsets and without ``--from-type``."""

    graph: Graph
    of: ModelLibrary

    @property
    @final
    def library(self) -> str:
        """What messages call models of this kind."""
        return self.of.name

    @property
    @final
    def states(self) -> Collection[Format]:
        """Formats that values of such a model can be rounded to."""
        return self.of.states

    @property
    @final
    def from_type(self) -> str:
        """The type whose ops were converted to fp32 first: none."""
        return ""

    @final
    def minimal_opset(self, formats: Mapping[int, Format]) -> int:
        """0: there are no opsets."""
        del formats
        return 0

    @final
    def can_cast(self, fmt: Format) -> bool:
        """Whether values can be rounded to ``fmt``."""
        return fmt in self.of.states

    @final
    def resolve_io(self, io: Mapping[str, Format]) -> dict[int, Format]:
        """The formats that ``io`` declares for ports by name, by value id."""
        return resolve_io(self.graph, io, self.of.types, self.of.name)

    @final
    def with_switches(self, switches: Sequence[Switch]) -> Any:
        """A copy whose extra input switches each of ``switches`` on or off."""
        return with_switches(self.roundable(), switches)

    @abstractmethod
    def roundable(self) -> Roundable:
        """A copy whose values can be rounded."""
