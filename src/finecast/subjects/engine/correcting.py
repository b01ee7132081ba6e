"""Biases corrected by what runs on calibration data show, and what that gains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from finecast.engines.base import Engine, Feeds
from finecast.engines.loading import exact_session, load_model
from finecast.graph import Graph
from finecast.numbers.encodings import Encodings
from finecast.numbers.formats import Format
from finecast.pipeline.correction import Correction, output_error
from finecast.planning.biases import Bias, biases, corrected, uncorrected
from finecast.planning.plan import Plan
from finecast.subjects.engine.native import NativeSource


@runtime_checkable
class ShowsMeanErrors(Protocol):
    """A prepared model that shows by how much its products on codes err in the mean."""

    @property
    def graph(self) -> Graph:
        """Its graph."""
        ...

    def with_mean_errors(
        self,
        formats: Mapping[int, Format],
        encodings: Mapping[int, Encodings],
        places: Sequence[Bias],
    ) -> Any:
        """A native copy whose outputs are the mean errors of products, by channel."""
        ...


def correct(prepared: object, plan: Plan, batches: Iterable[Feeds]) -> Plan:
    """``plan`` with biases corrected by the mean errors on ``batches``.

    The plan itself where the model shows no mean errors, or no product on codes has a bias of
    its own.
    """
    if not isinstance(prepared, ShowsMeanErrors):
        return plan
    graph = prepared.graph
    ids = {n.name: n.id for n in graph.nodes}
    formats = {ids[n]: f for n, f in plan.formats.items() if f.scaled}
    encodings = {ids[n]: e for n, e in plan.encodings.items()}
    places = biases(graph, formats)
    if not places:
        return plan
    session = exact_session(prepared.with_mean_errors(formats, encodings, places))
    sums = [np.zeros(place.channels) for place in places]
    count = 0
    for feeds in batches:
        shown = session.run(feeds)
        for total, spec in zip(sums, session.outputs, strict=True):
            total += shown[spec.name].reshape(-1).astype(np.float64)
        count += 1
    return corrected(plan, graph, places, [s / max(count, 1) for s in sums])


def measured_correction(
    source: NativeSource,
    prepared: object,
    plan: Plan,
    engine: Engine,
    batches: Sequence[Feeds],
) -> tuple[Plan, Correction | None]:
    """``plan``, corrected if that gains on ``batches`` in ``engine``.

    None where there is nothing to correct.

    Raises:
        EngineError: If the engine does not run the model.
    """
    made = correct(prepared, plan, batches)
    if not made.adjustments:
        return plan, None
    reference = engine.load(source.loadable)
    without, with_ = (
        output_error(load_model(engine, source.build(p).model), reference, batches)
        for p in (uncorrected(plan), made)
    )
    found = Correction(biases=len(made.adjustments), error_without=without, error_with=with_)
    return (made if found.gains else plan), found
