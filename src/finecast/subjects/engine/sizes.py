"""Shapes of a model's values for one call, from the cheapest source that knows all of them."""

from __future__ import annotations

from collections.abc import Sequence

from finecast.engines.base import Feeds, TensorSpec
from finecast.frontends.prepared import PreparedModel
from finecast.graph import Graph, Value
from finecast.subjects.engine.observing import observe


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
