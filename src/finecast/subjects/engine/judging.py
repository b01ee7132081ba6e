"""What ``inspect`` and ``explain`` tell of a model that an engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from finecast.data.feeds import free_dims, synthetic_feeds
from finecast.engines import first_that_loads
from finecast.engines.base import Engine, Feeds, TensorSpec
from finecast.engines.probe import speed_of
from finecast.errors import EngineError, UsageError
from finecast.frontends.prepared import PreparedModel
from finecast.graph import Graph, Value
from finecast.numbers.formats import Format
from finecast.pipeline.census import Census, risks
from finecast.pipeline.measuring import drop_slow_formats
from finecast.pipeline.model import RunOptions
from finecast.pipeline.sources import (
    OPEN_SIZES,
    calibration_batches,
    guessed_dims,
    input_specs,
)
from finecast.planning.plan import Plan
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy
from finecast.subjects.engine.native import Source
from finecast.subjects.engine.observing import observe
from finecast.subjects.engine.planning import Judging, make_planner


def batches_of(source: Source, options: RunOptions) -> list[Feeds]:
    """The first feeds of the user's data; empty if none were given.

    The model's inputs are told by the engine asked for, or by another one where it does not
    load the model: some models are loaded only when their shapes are known.
    """
    if options.data is None:
        return []
    asked = source.runners(options.engine)
    names = {one.name for one in asked}
    others = [one for one in source.runners(None) if one.name not in names]
    _, session = first_that_loads([*asked, *others], source.loadable)
    return calibration_batches(session, options.data)


def judged(
    source: Source,
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
    planner = make_planner(prepared, policy, engine, Judging(facts=facts, user_rules=rules))
    return prepared.graph, planner.lowest()


def counted(
    source: Source,
    prepared: PreparedModel,
    options: RunOptions,
    batches: Sequence[Feeds],
    low: Format,
) -> Census:
    """Count ops by class; shapes are those observed on data, else on one random batch."""
    facts, told = dict[int, ValueFacts](), ""
    if options.data is not None:
        facts = observe(prepared, lambda: batches)
        shapes = {i: f.shape for i, f in facts.items()}
    else:
        shapes, told = _drawn_shapes(prepared, options)
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
    if free := free_dims({spec.name: spec.shape for spec in input_specs(prepared.graph)}):
        named = [f"{n} ({', '.join(axes)})" if axes else n for n, axes in free.items()]
        found = replace(found, notes=found.notes | {"free sizes": ", ".join(named)})
    if told:
        found = replace(found, notes=found.notes | {"sizes": told})
    if options.data is None:
        return found
    return replace(found, warnings=risks(prepared.graph, facts, low))


def _drawn_shapes(
    prepared: PreparedModel, options: RunOptions
) -> tuple[dict[int, tuple[int, ...]], str]:
    """Shapes of float values on one random batch, and what was taken for open sizes.

    No shapes if there can be no such batch.

    Raises:
        EngineError: If the model does not take the sizes that the user gave.
        UsageError: If nothing can be drawn of those sizes.
    """
    inputs = input_specs(prepared.graph)
    failed: EngineError | UsageError | None = None
    found: tuple[dict[int, tuple[int, ...]], str] | None = None
    for size in OPEN_SIZES:  # and until no value is empty
        guessed = {
            d: n for d, n in guessed_dims(inputs, size).items() if d not in options.dims
        }
        told = ", ".join(f"{d}={n}" for d, n in guessed.items())
        try:
            dims = {**guessed, **options.dims}
            feeds = synthetic_feeds(inputs, batch=options.batch, dims=dims)
            here = shapes_for(prepared, inputs, feeds), told and f"{told}, which --dim changes"
            found = found or here
            if all(all(sizes) for sizes in here[0].values()):
                return here
        except (EngineError, UsageError) as error:
            failed = failed or error
        if not guessed:
            break
    if found is not None:  # some values are empty whatever the sizes
        return found
    if options.dims and failed is not None:
        raise failed
    # The table then has what can be counted without shapes.
    return {}, " ".join(f"give --dim {d}=SIZE" for d in guessed_dims(inputs))


def shapes_for(
    prepared: PreparedModel, inputs: Sequence[TensorSpec], feeds: Feeds
) -> dict[int, tuple[int, ...]]:
    """Shapes of float values by id: those declared, else inferred, else those of a run.

    Args:
        prepared: The model.
        inputs: Its inputs, as its file declares them.
        feeds: The inputs of the call.

    Raises:
        EngineError: If only a run can tell, and the model does not run.
    """
    floats = [v for v in prepared.graph.values if v.format and v.constant is None]
    shapes = _declared(prepared.graph, _symbols(inputs, feeds))
    if len(shapes) < len(floats):
        given = {name: array.shape for name, array in feeds.items()}
        ids = {v.name: v.id for v in prepared.graph.inputs} | dict(prepared.observable())
        known = given | prepared.static_shapes(given)
        shapes |= {ids[name]: sizes for name, sizes in known.items() if name in ids}
    if len(shapes) < len(floats):
        shapes |= {i: f.shape for i, f in observe(prepared, lambda: [feeds]).items()}
    return shapes


def _symbols(inputs: Sequence[TensorSpec], feeds: Feeds) -> dict[str, int]:
    """Sizes of the inputs' free dimensions by name."""
    pairs = (
        (name, size)
        for spec in inputs
        for name, size in zip(spec.shape or (), feeds[spec.name].shape, strict=False)
    )
    return {name: size for name, size in pairs if isinstance(name, str)}


def _declared(graph: Graph, symbols: dict[str, int]) -> dict[int, tuple[int, ...]]:
    floats = (v for v in graph.values if v.format and v.constant is None)
    found = {v.id: _sizes(v, symbols) for v in floats}
    return {i: sizes for i, sizes in found.items() if sizes is not None}


def _sizes(value: Value, symbols: dict[str, int]) -> tuple[int, ...] | None:
    if value.shape is None:
        return None
    dims = [symbols.get(d) if isinstance(d, str) else d for d in value.shape]
    sizes = tuple(d for d in dims if d is not None)
    return sizes if len(sizes) == len(dims) else None
