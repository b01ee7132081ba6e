"""Facts of values, observed in runs of the fp32 model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast.engines.base import Array, Feeds, calls_of, feeds_for, lent_outputs
from finecast.engines.loading import exact_session
from finecast.frontends.native_model import runs_of, with_runs
from finecast.frontends.prepared import PreparedModel
from finecast.graph import Graph
from finecast.graph.structure import SAME_NUMBERS
from finecast.processes.memory import packed
from finecast.rules.facts import Moments, ValueFacts, merge
from finecast.rules.scaled_operands import summed

# The assumed size of a value of unknown shape, until one of them was seen.
_GUESSED_BYTES: Final = 4 << 20
# Threads that make facts of arrays: as many as a small machine has cores.
_AT_ONCE: Final = 2


def facts_for_rules(
    prepared: PreparedModel, data: Sequence[Feeds], examples: Feeds | None
) -> dict[int, ValueFacts]:
    """Facts by which rules judge ops: all on the data, else what the examples do not run."""
    if data:
        return observe_for_rules(prepared, lambda: data)
    if examples is None:
        return {}
    return observe_for_rules(prepared, lambda: [examples], ranges=False)


def observe_for_rules(
    prepared: PreparedModel,
    batches: Callable[[], Iterable[Feeds]],
    *,
    ranges: bool = True,
    on_step: Callable[[int, int], None] | None = None,
) -> dict[int, ValueFacts]:
    """The facts of ``observe`` and of ``unseen``.

    Without ``ranges``, where they are not needed, those of ``empty`` and of ``unseen``: models
    without bodies, whose sizes no numbers decide, are not run then.
    """
    if ranges:
        return observe(prepared, batches, on_step=on_step) | unseen(prepared, batches)
    return empty(prepared, batches) | unseen(prepared, batches)


def empty(
    prepared: PreparedModel, batches: Callable[[], Iterable[Feeds]]
) -> dict[int, ValueFacts]:
    """Facts of the values without an element in every batch, as those of unused experts.

    Only values whose sizes cannot be inferred are looked at, until each had an element.
    """
    names, facts = prepared.observable(), dict[int, ValueFacts]()
    waiting: list[str] | None = None
    for feeds in batches():
        if waiting is None:
            sized = prepared.static_shapes({n: a.shape for n, a in feeds.items()})
            waiting = [name for name in names if name not in sized]
        seen = _show_first(prepared, names, waiting, feeds) if waiting else {}
        facts = {i: f for i, f in seen.items() if not f.count}
        waiting = [name for name in waiting if names[name] in facts]
        if not waiting:
            break
    return facts


def unseen(
    prepared: PreparedModel, batches: Callable[[], Iterable[Feeds]]
) -> dict[int, ValueFacts]:
    """Facts, which count no element, of the values of bodies that no batch runs.

    A branch that is never taken is such a body, and that of a loop without a step. The model
    runs until each body has run once; without bodies it does not.
    """
    graph = prepared.graph
    waiting = {node.region for node in graph.float_nodes if node.region}
    if waiting:
        session = exact_session(
            with_runs(prepared.roundable(), sorted(waiting)), optimizing=False
        )
        for feeds in batches():
            for call in lent_outputs(session, feeds_for(session, feeds)):
                waiting -= {region for region in waiting if call[runs_of(region)].any()}
            if not waiting:
                break
    values = (i for n in graph.nodes if n.region in waiting for i in n.outputs)
    return {i: ValueFacts.unseen(graph.values[i].shape) for i in values if i is not None}


def observe(
    prepared: PreparedModel,
    batches: Callable[[], Iterable[Feeds]],
    *,
    on_step: Callable[[int, int], None] | None = None,
) -> dict[int, ValueFacts]:
    """Facts of all float values outside of bodies, over all batches.

    Each batch is reduced to facts at once, and values are output in groups, so that memory
    grows neither with the number of batches nor with that of values. ``batches`` is called
    again for each group. Values of sizes that cannot be inferred on the first batch are first
    seen on it alone, which takes a further load of the model.
    """
    names = prepared.observable()
    first = next(iter(batches()), None)
    if first is None:
        return {}

    def rest() -> Iterator[Feeds]:
        return islice(batches(), 1, None)

    def shown(
        facts: dict[int, ValueFacts],
        sizes: Mapping[str, int],
        some: Callable[[], Iterable[Feeds]],
    ) -> dict[int, ValueFacts]:
        groups = packed(sizes, SHOWN_BYTES)
        for done, group in enumerate(groups):
            facts = merge(facts, _show(prepared, names, group, some()))
            if on_step is not None:
                on_step(done + 1, len(groups))
        return facts

    shapes = prepared.static_shapes({n: a.shape for n, a in first.items()})
    sizes = {n: 4 * math.prod(shapes[n]) for n in names if n in shapes}
    facts = shown(input_facts(prepared.graph, batches()), sizes, batches)
    seen = _show_first(prepared, names, [n for n in names if n not in shapes], first)
    facts = merge(facts, seen)
    if seen and next(rest(), None) is not None:
        unsized = {n: 4 * math.prod(seen[i].shape) for n, i in names.items() if i in seen}
        facts = shown(facts, unsized, rest)
    return _with_moments(prepared, batches, facts)


def _with_moments(
    prepared: PreparedModel,
    batches: Callable[[], Iterable[Feeds]],
    facts: Mapping[int, ValueFacts],
) -> dict[int, ValueFacts]:
    """``facts``, with the moments of values that products by a matrix read."""
    graph, facts_by_value = prepared.graph, dict(facts)
    inputs = {v.name: v.id for v in graph.inputs}
    read = {
        value.id: count
        for node in graph.float_nodes
        if (count := summed(graph, node)) and (value := graph.read(node, 0)) is not None
    }
    ids = {**prepared.observable(), **inputs}
    shown = {n: i for n, i in ids.items() if i in facts}
    shown = {n: i for n, i in shown.items() if facts[i].shape[-1:] == (read.get(i),)}
    sizes = {
        n: max(16 * read[i] ** 2, 4 * math.prod(facts[i].shape)) for n, i in shown.items()
    }
    apart = [{n: s for n, s in sizes.items() if (n in inputs) is own} for own in (True, False)]
    groups = [group for some in apart for group in packed(some, SHOWN_BYTES)]
    source = _MomentSource(prepared=prepared, batches=batches, groups=groups, inputs=inputs)
    for name, index in shown.items():
        moments = Moments(read=partial(source.read, name))
        facts_by_value[index] = replace(facts_by_value[index], moments=moments)
    return facts_by_value


@dataclass(slots=True, kw_only=True)
class _MomentSource:
    """The moments of values, observed in groups of them; those of one group are held.

    Ops are judged in the graph's order, so that each group is mostly observed once.
    """

    prepared: PreparedModel
    batches: Callable[[], Iterable[Feeds]]
    groups: Sequence[list[str]]
    inputs: Collection[str]
    held: dict[str, tuple[NDArray[np.float64], int]] = field(default_factory=dict[str, Any])

    def read(self, name: str) -> tuple[NDArray[np.float64], int]:
        """Sums of x times its transpose over halves of a value's rows x, and their count."""
        if name not in self.held:
            self.held.clear()
            group = next(group for group in self.groups if name in group)
            self.held = dict(self._observed(group))
        return self.held[name]

    def _observed(
        self, group: list[str]
    ) -> Iterator[tuple[str, tuple[NDArray[np.float64], int]]]:
        totals = dict[str, NDArray[np.float64]]()
        counts, odd = dict.fromkeys(group, 0), dict.fromkeys(group, 0)
        are_inputs = set(group) <= set(self.inputs)
        calls = (
            (c for b in self.batches() for c in calls_of(b))
            if are_inputs
            else _shown(self.prepared, group, self.batches())
        )
        shown = ((name, call[name]) for call in calls for name in group if name in call)
        for name, array in shown:
            # Rows of one sample are alike: each sample is in one half.
            cut = (len(array) + odd[name]) // 2
            odd[name] = 1 - odd[name]
            width = array.shape[-1]
            counts[name] += array.size // width
            total = totals.setdefault(name, np.zeros((2, width, width)))
            for half, part in zip(total, (array[:cut], array[cut:]), strict=True):
                rows = part.reshape(-1, width).astype(np.float32, copy=False)
                with np.errstate(over="ignore", invalid="ignore"):
                    half += rows.T @ rows
        return ((name, (total, counts[name])) for name, total in totals.items())


def _show_first(
    prepared: PreparedModel, ids: Mapping[str, int], unsized: list[str], feeds: Feeds
) -> dict[int, ValueFacts]:
    """Facts on the first batch of values whose size is not inferred, in a few runs.

    Each run loads the model anew. A value is assumed to be as large as the largest in the
    group before.
    """
    facts: dict[int, ValueFacts] = {}
    guess = _GUESSED_BYTES
    while unsized:
        count = max(SHOWN_BYTES // guess, 1)
        group, unsized = unsized[:count], unsized[count:]
        seen = _show(prepared, ids, group, [feeds])
        guess = max(4 * math.prod(f.shape) for f in seen.values()) or 1
        facts = merge(facts, seen)
    return facts


def _show(
    prepared: PreparedModel, ids: Mapping[str, int], group: list[str], batches: Iterable[Feeds]
) -> dict[int, ValueFacts]:
    """Facts of the values called ``group`` over ``batches``."""
    facts: dict[int, ValueFacts] = {}
    sources = _sources(prepared.graph, {ids[name]: name for name in group})
    own = [name for name in group if name not in sources]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for call in _shown(prepared, group, batches):
            arrays = (call[name] for name in own)
            seen = dict(zip(own, threads.map(ValueFacts.of, arrays), strict=True))
            for name, source in sources.items():
                seen[name] = replace(seen[source], shape=call[name].shape)
            facts = merge(facts, {ids[name]: seen[name] for name in group})
    return facts


def _sources(graph: Graph, names: Mapping[int, str]) -> dict[str, str]:
    """Of the values in ``names`` those with the very numbers of another one, and its name."""

    def moved(value: int) -> int | None:
        producer = graph.values[value].producer
        node = graph.nodes[producer] if producer is not None else None
        read = node.inputs[0] if node is not None and node.op in SAME_NUMBERS else None
        if read is None or read not in names:
            return None
        # ``aten::view`` may read the bits as another format, in which they are other numbers.
        return read if graph.values[read].format == graph.values[value].format else None

    sources: dict[str, str] = {}
    for value, name in names.items():
        source = value
        while (read := moved(source)) is not None:
            source = read
        if source != value:
            sources[name] = names[source]
    return sources


def _shown(
    prepared: PreparedModel, group: list[str], batches: Iterable[Feeds]
) -> Iterator[dict[str, Array]]:
    """The values called ``group`` by name, one mapping for each call of ``batches``.

    The values of a call are there until the next one.
    """
    session = exact_session(prepared.with_outputs(group), optimizing=False)
    for feeds in batches:
        yield from lent_outputs(session, feeds_for(session, feeds))


SHOWN_BYTES: Final = 1 << 30
"""Bytes of values that one run may output: bounds the memory that observing takes.

Each group of values takes a run of the whole model, for each batch.
"""


def input_facts(graph: Graph, batches: Iterable[Feeds]) -> dict[int, ValueFacts]:
    """Facts of the float inputs."""
    facts: dict[int, ValueFacts] = {}
    floats = {v.name: v.id for v in graph.inputs if v.format is not None}
    for feeds in (call for batch in batches for call in calls_of(batch)):
        seen = {floats[n]: ValueFacts.of(a) for n, a in feeds.items() if n in floats}
        facts = merge(facts, seen)
    return facts
