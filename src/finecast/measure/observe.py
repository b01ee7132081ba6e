"""Runs of the fp32 model that show what its values are and what rounding does to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.engines import get_engine
from finecast.engines.base import Array, Feeds
from finecast.facts import ValueFacts, merge
from finecast.formats import Format
from finecast.frontends.onnx import Prepared
from finecast.frontends.onnx.instrument import SWITCH, observable, with_outputs, with_switches
from finecast.graph import Graph
from finecast.measure.loading import load_model
from finecast.units import RoundingPoints

# Values shown per run: bounds what is held at once, whatever the number of batches.
_PER_RUN: Final = 64


def observe(
    prepared: Prepared,
    batches: Iterable[Feeds],
    *,
    on_step: Callable[[int, int], None] | None = None,
) -> dict[int, ValueFacts]:
    """Facts of all float values outside of bodies, over all batches.

    Memory does not grow with the number of batches: each is reduced to facts at once.
    """
    names = observable(prepared.model, prepared.graph)
    chunks = [list(names)[i : i + _PER_RUN] for i in range(0, len(names), _PER_RUN)]
    kept = list(batches)
    facts: dict[int, ValueFacts] = {}
    engine = get_engine("onnxruntime")
    for done, chunk in enumerate(chunks):
        session = load_model(engine, with_outputs(prepared.model, chunk))
        for feeds in kept:
            shown = session.run(feeds)
            facts = merge(facts, {names[n]: ValueFacts.of(a) for n, a in shown.items()})
        if on_step is not None:
            on_step(done + 1, len(chunks))
    for value in prepared.graph.inputs:
        for feeds in kept:
            if value.format is not None and value.name in feeds:
                facts = merge(facts, {value.id: ValueFacts.of(feeds[value.name])})
    return facts


def switched_probe(
    prepared: Prepared, points: RoundingPoints, low: Format, feeds: Sequence[Feeds]
) -> Callable[[NDArray[np.bool_]], list[Array]]:
    """A function from a switch to the outputs on ``feeds``: one session serves every plan."""
    model = with_switches(prepared.model, points.classes, points.weights, low)
    session = load_model(get_engine("onnxruntime"), model)

    def probe(switch: NDArray[np.bool_]) -> list[Array]:
        return [a for f in feeds for a in session.run({**f, SWITCH: switch}).values()]

    return probe


def first_nonfinite(graph: Graph, facts: dict[int, ValueFacts]) -> str | None:
    """The first op, in the graph's order, that gives NaN or Inf; None if none does."""
    for node in graph.nodes:
        for index in node.outputs:
            seen = facts.get(index) if index is not None else None
            if seen is not None and seen.nans + seen.infs:
                return node.name
    return None
