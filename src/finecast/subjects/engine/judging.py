"""The parts of ``inspect`` and ``explain`` for models that an engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from finecast.data.feeds import synthetic_feeds
from finecast.engines import first_that_loads
from finecast.engines.base import Engine, Feeds, TensorSpec
from finecast.engines.probe import speed_of
from finecast.errors import EngineError, UsageError
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.census import Census, risks
from finecast.pipeline.model import RunOptions
from finecast.pipeline.narrowing import drop_slow_formats
from finecast.pipeline.sources import calibration_batches, guessed_dims
from finecast.planning.plan import Plan
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy
from finecast.subjects.engine.native import NativeSource, PreparedModel
from finecast.subjects.engine.observing import observe
from finecast.subjects.engine.planning import make_planner
from finecast.subjects.engine.sizes import shapes_for


def batches_of(source: NativeSource, options: RunOptions) -> list[Feeds]:
    """The first feeds of the user's data; empty if none were given."""
    if options.data is None:
        return []
    _, session = first_that_loads(source.runners(None), source.loadable)
    return calibration_batches(session, options.data)


def judged(
    source: NativeSource,
    engine: Engine,
    policy: Policy,
    options: RunOptions,
    batches: Sequence[Feeds],
) -> tuple[Graph, Plan]:
    """The graph, and the lowest plan that the rules permit by the ranges on ``batches``."""
    rules = tuple(options.user_rules.items())
    if options.device is None:
        policy, _ = drop_slow_formats(policy, lambda fmt: speed_of(engine, fmt), rules)
    prepared = source.prepare(policy)
    facts = observe(prepared, lambda: batches) if batches else {}
    planner = make_planner(prepared, policy, engine, facts=facts, user_rules=rules)
    return prepared.graph, planner.lowest()


def counted(
    source: NativeSource,
    prepared: PreparedModel,
    options: RunOptions,
    batches: Sequence[Feeds],
    low: Format,
) -> Census:
    """Count ops by class; shapes are those observed on data, else on one random batch."""
    facts: dict[int, ValueFacts] = {}
    if options.data is not None:
        facts = observe(prepared, lambda: batches)
        shapes = {i: f.shape for i, f in facts.items()}
    else:
        shapes = _drawn_shapes(prepared, options)
    found = Census.of(
        prepared.graph,
        shapes,
        facts,
        name=source.name,
        size_bytes=source.size_bytes,
        opset=source.opset,
    )
    if source.told:
        found = replace(found, notes=found.notes | {"as it was read": "; ".join(source.told)})
    if options.data is None:
        return found
    return replace(found, warnings=risks(prepared.graph, facts, low))


def _drawn_shapes(prepared: PreparedModel, options: RunOptions) -> dict[int, tuple[int, ...]]:
    """Shapes of float values on one random batch; empty if there can be no such batch."""
    try:
        inputs = [
            TensorSpec(name=v.name, dtype=v.dtype, shape=v.shape)
            for v in prepared.graph.inputs
        ]
        sizes = {**guessed_dims(inputs), **options.dims}
        feeds = synthetic_feeds(inputs, batch=options.batch, dims=sizes)
        return shapes_for(prepared, inputs, feeds)
    except (EngineError, UsageError):
        if options.dims:
            raise
        return {}  # the table then has what can be counted without shapes
