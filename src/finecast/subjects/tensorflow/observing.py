"""Runs of the fp32 model that show what its values are and what rounding does to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from finecast.engines.base import Array, Feeds
from finecast.engines.tensorflow import TensorFlowEngine
from finecast.frontends.tensorflow import Imported
from finecast.frontends.tensorflow.instrument import SWITCH, with_outputs, with_switches
from finecast.graph import Value
from finecast.pipeline.observing import SHOWN_BYTES, input_facts, packed
from finecast.planning.sensitivity import Probe
from finecast.planning.switches import Switch
from finecast.rules.facts import ValueFacts, merge


def observe(
    captured: Imported,
    batches: Callable[[], Iterable[Feeds]],
    *,
    on_step: Callable[[int, int], None] | None = None,
) -> dict[int, ValueFacts]:
    """Facts of all float values outside of bodies, over all batches.

    ``batches`` is called once for each group of values that one run shows.
    """
    graph = captured.graph
    first = next(iter(islice(batches(), 1)), None)
    if first is None:
        return {}
    model = with_outputs(captured.model, graph, captured.binding)
    session = TensorFlowEngine().open(model)
    rows = max((a.shape[0] for a in first.values() if a.ndim), default=1)
    sizes = {p.name: _bytes(graph.values[int(p.name)], rows) for p in model.outputs}
    groups = packed(sizes, SHOWN_BYTES)
    facts = input_facts(graph, batches())
    for done, group in enumerate(groups):
        for feeds in batches():
            shown = session.show(feeds, group)
            facts = merge(facts, {int(n): ValueFacts.of(a) for n, a in shown.items()})
        if on_step is not None:
            on_step(done + 1, len(groups))
    return facts


def shapes_on(captured: Imported, feeds: Feeds) -> dict[int, tuple[int, ...]]:
    """Shapes of all float values for one call."""
    return {i: f.shape for i, f in observe(captured, lambda: [feeds]).items()}


def _bytes(value: Value, rows: int) -> int:
    """What a value takes, where a free size is that of the batch."""
    sizes = value.shape or ()
    return 4 * int(np.prod([s if isinstance(s, int) else rows for s in sizes], dtype=np.int64))


def switched_probe(
    captured: Imported, switches: Sequence[Switch], feeds: Sequence[Feeds]
) -> Probe:
    """A function from a switch to the outputs on ``feeds``: one session serves every plan."""
    model = with_switches(captured.graph, captured.binding, switches)
    session = TensorFlowEngine().open(model)

    def probe(switch: NDArray[np.bool_]) -> list[Array]:
        return [a for f in feeds for a in session.run({**f, SWITCH: switch}).values()]

    return probe
