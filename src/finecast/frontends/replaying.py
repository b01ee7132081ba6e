"""From a plan to the edits of a graph, and what is planned: steps that frontends share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from finecast.errors import ModelError, UsageError
from finecast.frontends.native_model import NativeModel, with_switches
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.edits import Edit, edits
from finecast.planning.plan import Plan
from finecast.planning.switches import Switch


@dataclass(frozen=True, slots=True, kw_only=True)
class Restated:
    """Names of nodes or values that were written as other ops, and why."""

    nodes: tuple[str, ...]
    reason: str


def check_made_for(
    plan: Plan, digest: str, where: str, *, by_hint: bool = False, opsets: bool = False
) -> None:
    """Check that a model of one library can be that of ``plan``.

    Args:
        plan: The plan.
        digest: The digest of the model.
        where: What messages call the model.
        by_hint: Whether models of the library can mark ops that keep fp32 under a hint.
        opsets: Whether an operation set decides which types ops of the library take.

    Raises:
        ModelError: If the plan was made for another model, or as another library reads it.
    """
    if plan.by_hint and not by_hint:
        raise ModelError(
            f"the plan is one by the precision hint of {plan.engine}, for which this model has"
            " no marks",
            where=where,
            fix="write OpenVINO's IR, whose name ends in .xml, or leave --by-hint out",
        )
    if plan.opset and not opsets:
        raise ModelError(
            "the plan has an operation set of ONNX: it is for the model as ONNX, not as"
            " another library reads it",
            where=where,
            fix="name the output NAME.onnx, or make a plan with this output",
        )
    if plan.model != digest:
        raise ModelError(
            f"the plan was made for another model: digest {plan.model}, not {digest}",
            where=where,
            fix="make a plan for this file, or give the file that the plan was made for; of a"
            f" model that several libraries read (made for {plan.engine}), the output's name"
            " decides which one does",
        )


def edits_of(
    graph: Graph,
    plan: Plan,
    ports: Mapping[int, Format] | None = None,
    *,
    moves_codes: bool = True,
) -> tuple[Edit, ...]:
    """The edits that ``plan`` asks for.

    Args:
        graph: The model's graph.
        plan: A plan that was made for it.
        ports: The formats declared for inputs and outputs, by value id.
        moves_codes: As in ``planning.edits.edits``.
    """
    by_name = {n.name: n.id for n in graph.nodes}
    formats = {by_name[name]: fmt for name, fmt in plan.formats.items()}
    encodings = {by_name[name]: found for name, found in plan.encodings.items()}
    return edits(graph, formats, ports, encodings, moves_codes=moves_codes)


def resolve_io(
    graph: Graph, io: Mapping[str, Format], types: Collection[Format], library: str
) -> dict[int, Format]:
    """The formats declared for a model's inputs and outputs, by value id.

    Args:
        graph: The model's graph.
        io: Formats by the names of inputs and outputs.
        types: Formats that are tensor types of the library.
        library: What messages call the library.

    Raises:
        UsageError: If a name is not a float input or output of the model, or a format none
            of the library's types.
    """
    ports = {v.name: v for v in (*graph.inputs, *graph.outputs)}
    for name, fmt in io.items():
        if name not in ports or ports[name].format is None:
            floats = (n for n, v in ports.items() if v.format is not None)
            raise UsageError(
                f"{name!r} is not a float input or output",
                where="--io",
                fix=f"use {', '.join(floats)}",
            )
        if fmt not in types:
            raise UsageError(
                f"{library} has no type {fmt.label} that {name!r} could be cast to",
                where="--io",
                fix=f"use {', '.join(f.label for f in types)}",
            )
    return {ports[name].id: fmt for name, fmt in io.items()}


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
    def roundable(self) -> NativeModel:
        """A copy whose values can be rounded."""
