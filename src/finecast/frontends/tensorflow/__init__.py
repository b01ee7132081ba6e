"""The TensorFlow frontend: a graph of TensorFlow's and a plan in, one in low formats out."""

from __future__ import annotations

from dataclasses import dataclass

from finecast.errors import ModelError
from finecast.frontends.tensorflow.model import FrozenModel, SignaturePort
from finecast.frontends.tensorflow.reader import GraphBinding, read
from finecast.frontends.tensorflow.writer import apply_edits
from finecast.graph import Graph
from finecast.planning.edits import Edit, edits
from finecast.planning.plan import Plan

__all__ = ["FrozenModel", "Imported", "Rewritten", "SignaturePort", "apply", "capture"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A model with its neutral graph."""

    model: FrozenModel
    graph: Graph
    binding: GraphBinding


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """The model that a plan gives, and by which edits."""

    model: FrozenModel
    edits: tuple[Edit, ...]


def capture(model: FrozenModel, digest: str) -> Imported:
    """The model's graph; ``digest`` identifies it in plans."""
    graph, binding = read(model, digest)
    return Imported(model=model, graph=graph, binding=binding)


def apply(captured: Imported, plan: Plan, where: str = "") -> Rewritten:
    """Replay ``plan``; ``captured`` is left as it was.

    Raises:
        ModelError: If the plan was made for another model.
    """
    graph = captured.graph
    if plan.model != graph.digest:
        raise ModelError(
            f"the plan was made for another model: digest {plan.model}, not {graph.digest}",
            where=where,
            fix="make a plan for this model, or give the one that the plan was made for",
        )
    plan.check(graph, where=where)
    ids = {n.name: n.id for n in graph.nodes}
    formats = {ids[name]: fmt for name, fmt in plan.formats.items()}
    done = edits(graph, formats)
    return Rewritten(model=apply_edits(graph, captured.binding, done, formats), edits=done)
