"""From a plan to the edits of a graph: the steps that every frontend shares."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from finecast.errors import ModelError, UsageError
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.edits import Edit, edits
from finecast.planning.plan import Plan
from finecast.plugin import title_of


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
            f"the plan is one by the precision hint of {title_of(plan.engine)}, for which this"
            " model has no marks",
            where=where,
            fix="write OpenVINO's IR, whose name ends in .xml, or make a plan for this model"
            " without --by-hint",
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
            f" model that several libraries read (made for {title_of(plan.engine)}), the"
            " output's name decides which one does",
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
    encodings = {by_name[name]: encoding for name, encoding in plan.encodings.items()}
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
