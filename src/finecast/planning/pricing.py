"""Objectives other than time: bytes of the stored model, and bytes in memory while it runs.

An analysis has the seconds of each unit and cast. The functions here put bytes in their
place; the search for plans stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from finecast.graph import Graph, Value
from finecast.numbers.encodings import Stored
from finecast.numbers.formats import Format
from finecast.ops.flops import Shapes, is_view, resolve_shape
from finecast.ops.patterns import stays_inside
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, Priced, WeightLimit, Widened, as_it_is
from finecast.rules import Permission
from finecast.solver.assignment import Ints

# An estimate of the memory that a plan's model takes while it runs.
#
# Law: the bytes of the constants plus the peak of the bytes of live values, where ops run in
# the graph's order and a value is freed after its last reader. What an engine adds, such as
# packed copies of weights and scratch space, is left out: the estimate compares plans of one
# model, and is no measurement.


@dataclass(frozen=True, slots=True, kw_only=True)
class Resting:
    """The lifetime of a value in memory, from moment ``first`` to ``last``, both included.

    Node k runs at moment 2k + 1, casts in front of it at 2k.
    """

    value: int
    elements: int
    fmt: Format
    first: int
    last: int

    @property
    def size_bytes(self) -> int:
        """Bytes of its numbers."""
        return self.fmt.bytes_for(self.elements)


def peak_bytes(
    graph: Graph,
    formats: Mapping[int, Format],
    shapes: Shapes,
    kernels: Mapping[int, int],
    constants_bytes: int,
    stored: Widened = as_it_is,
) -> int:
    """The estimate, in bytes.

    Args:
        graph: The graph.
        formats: By node id; other nodes keep their own.
        shapes: Observed shapes, by value id; a value of unknown shape counts nothing.
        kernels: Kernel by node id: a value that stays inside one takes no memory.
        constants_bytes: Bytes of all constants.
        stored: The format in which numbers of a format rest in memory.
    """
    return constants_bytes + int(
        _alive(rest_in_memory(graph, formats, shapes, kernels, stored)).max(initial=0)
    )


def alive_at_peak(resting: Sequence[Resting]) -> list[Resting]:
    """The values of ``resting`` that are alive at the moment of the peak."""
    alive = _alive(resting)
    if not len(alive):
        return []
    peak = int(alive.argmax())
    return [one for one in resting if one.first <= peak <= one.last]


def rest_in_memory(
    graph: Graph,
    formats: Mapping[int, Format],
    shapes: Shapes,
    kernels: Mapping[int, int],
    stored: Widened = as_it_is,
) -> list[Resting]:
    """The lifetimes of all values, and of their copies cast to the formats of readers.

    The result of a view shares the memory of its source, so it has no entry; nor has a cast
    between formats that rest in memory alike.
    """
    lifetimes: list[Resting] = []
    last = _last_readers(graph)
    for value in graph.values:
        maker = graph.maker(value)
        is_alias = maker is not None and is_view(maker)
        if value.format is None or value.constant is not None or is_alias:
            continue
        shape = resolve_shape(value, shapes)
        if shape is not None and not stays_inside(value, kernels):
            whole = _copies(graph, value, math.prod(shape), formats, last[value.id], stored)
            lifetimes += whole
    return lifetimes


def _copies(
    graph: Graph,
    value: Value,
    elements: int,
    formats: Mapping[int, Format],
    last: int,
    stored: Widened,
) -> Iterator[Resting]:
    producer, own = value.producer, value.format or Format.FP32
    resting = stored(own)
    if producer is not None and _among(value, graph.following_outputs(graph.nodes[producer])):
        resting = stored(formats.get(producer, own).result)
    copied: dict[Format, list[int]] = {}
    ends = [last] if value.is_output else []
    for index in value.uses:
        node = graph.nodes[index]
        wanted = stored(formats.get(index, own)).storage
        if wanted is not resting and _among(value, graph.following_inputs(node)):
            copied.setdefault(wanted, []).append(index)
        else:
            ends.append(last if is_view(node) else 2 * index + 1)
    ends += [2 * min(nodes) for nodes in copied.values()]
    first = 0 if producer is None else 2 * producer + 1
    yield Resting(
        value=value.id, elements=elements, fmt=resting, first=first, last=max([first, *ends])
    )
    for fmt, nodes in copied.items():
        yield Resting(
            value=value.id,
            elements=elements,
            fmt=fmt,
            first=2 * min(nodes),
            last=2 * max(nodes) + 1,
        )


def _among(value: Value, values: Iterable[Value]) -> bool:
    return any(v.id == value.id for v in values)


def _last_readers(graph: Graph) -> list[int]:
    """For each value the moment of its last use; uses of a view count for its source."""
    last = [0 if v.producer is None else 2 * v.producer + 1 for v in graph.values]
    for value in graph.outputs:
        last[value.id] = 2 * len(graph.nodes)
    for node in reversed(graph.nodes):
        seen = [last[v] for v in node.output_ids] if is_view(node) else []
        for index in node.inputs:
            if index is not None:
                last[index] = max(last[index], 2 * node.id + 1, *seen)
    return last


def _alive(resting: Sequence[Resting]) -> Ints:
    """Bytes in memory at each moment."""
    steps = np.zeros(max((r.last for r in resting), default=-1) + 2, dtype=np.int64)
    for lifetime in resting:
        steps[lifetime.first] += lifetime.size_bytes
        steps[lifetime.last + 1] -= lifetime.size_bytes
    return np.cumsum(steps)


# The model's total time counts as this share of its bytes: among plans of equal size the
# faster one is chosen, and time never outweighs a difference in size that matters (2%).
_TIME_SHARE: Final = 0.01
# An ONNX Cast node with its name and those of two values; one in OpenVINO's IR takes more.
_CAST_NODE_BYTES: Final = 150.0


def by_size(planner: Planner, analysis: Analysis) -> Analysis:
    """``analysis`` priced by the bytes of the stored model: of constants and cast nodes."""
    graph = planner.graph
    stored = sum(_constant_bytes(v) for v in graph.values)
    total_s = float(analysis.times[Format.FP32].sum())
    usable = np.isfinite(total_s) and total_s
    per_second = _TIME_SHARE * max(stored, 1.0) / total_s if usable else 0.0

    def cast_bytes(value: Value, source: Format, to: Format) -> float:
        if source.storage is to.storage or source.runs_on_codes or value.constant is not None:
            return 0.0
        return _CAST_NODE_BYTES + per_second * analysis.cast_time(value, source, to)

    return replace(
        analysis,
        priced=Priced.SIZE,
        times={fmt: per_second * times for fmt, times in analysis.times.items()},
        cast_time=cast_bytes,
        constant_cost=_stored_bytes(graph, planner.permissions),
    )


# What the nodes that decode a constant take in a file beside its codes and scales, with names.
_DECODING_BYTES: Final = 600.0


def limited(planner: Planner, analysis: Analysis, most: float, *, nodes: bool) -> Analysis:
    """``analysis`` of plans whose stored float constants take at most so many bytes.

    Counted are their copies in the types and encodings that ops read, with scales, and the
    ``nodes`` that decode them, if so asked.
    """
    graph = planner.graph
    stored = _stored_bytes(graph, planner.permissions)
    fixed = sum(_constant_bytes(v) for v in graph.values if v.format is not Format.FP32)

    def bytes_of(value: Value, fmt: Format) -> float:
        size = stored(value, fmt)
        size_read = 0 if value.constant is None else fmt.result.bytes_for(value.constant.size)
        is_decoded = fmt.has_scales and size != size_read
        return size + (_DECODING_BYTES if nodes and is_decoded else 0.0)

    return replace(analysis, limit=WeightLimit(most=most, stored=bytes_of, fixed=fixed))


def weights_of(graph: Graph) -> tuple[int, float]:
    """How many numbers the float constants of a graph have, and the bytes that they take."""
    floats = [v for v in graph.values if v.constant is not None and v.format is not None]
    count = sum(v.constant.size for v in floats if v.constant is not None)
    return count, sum(map(_constant_bytes, floats))


def by_memory(planner: Planner, analysis: Analysis) -> Analysis:
    """``analysis`` priced by the bytes of the running model, as far as units decide them.

    Counted are the constants, and the values alive at the memory peak of the fp32 model, each
    in the format in which the device keeps it.
    """
    graph, units, stored = planner.graph, analysis.units, analysis.stored
    sized = by_size(planner, analysis)
    results = {fmt: np.zeros(len(units.members)) for fmt in analysis.times}
    resting = rest_in_memory(graph, {}, analysis.shapes, units.of, stored)
    for lifetime in alive_at_peak(resting):
        producer = graph.values[lifetime.value].producer
        if producer is not None and producer in units.of:
            for fmt, amount in results.items():
                amount[units.of[producer]] += stored(fmt.result).bytes_for(lifetime.elements)
    constant_bytes = _stored_bytes(graph, planner.permissions)
    return replace(
        sized,
        priced=Priced.MEMORY,
        times={fmt: times + results[fmt] for fmt, times in sized.times.items()},
        constant_cost=lambda value, fmt: constant_bytes(value, stored(fmt)),
    )


def resident_bytes(planner: Planner, analysis: Analysis, formats: Mapping[str, Format]) -> int:
    """Bytes in memory while a plan's model runs, by the estimate of ``planning.memory``.

    Args:
        planner: The planner that made the plan.
        analysis: Has the shapes and the units.
        formats: The plan's formats, by node name; other nodes keep theirs.
    """
    graph = planner.graph
    stored, constant_bytes = analysis.stored, _stored_bytes(graph, planner.permissions)
    named = {n.id: formats[n.name] for n in graph.nodes if n.name in formats}
    constants = 0.0
    for value in graph.values:
        if value.constant is None or value.format is None:
            continue
        own = value.format
        read = {named.get(n, own) for n in value.uses} if own is Format.FP32 else {own}
        copies = {fmt.storage: constant_bytes(value, stored(fmt)) for fmt in read}
        constants += sum(copies.values())
    return peak_bytes(graph, named, analysis.shapes, analysis.units.of, int(constants), stored)


def _constant_bytes(value: Value) -> float:
    if value.constant is None or value.format is None:
        return 0.0
    return float(value.format.bytes_for(value.constant.size))


def _stored_bytes(
    graph: Graph, permissions: Mapping[int, Permission]
) -> Callable[[Value, Format], float]:
    """Gives the bytes of the copy of a constant that ops in a format read.

    An op in a scaled format reads constants that have no encoding, such as a bias, as they are
    or in the type that its codes are decoded to.
    """

    def encoding_of(value: Value, fmt: Format) -> Stored | None:
        for node in value.uses:
            permission = permissions.get(node)
            encodings = None if permission is None else permission.encodings.get(fmt)
            for port, encoding in (encodings.constants if encodings else {}).items():
                if graph.nodes[node].inputs[port] == value.id:
                    return encoding
        return None

    def stored_bytes(value: Value, fmt: Format) -> float:
        if value.constant is None:
            return 0.0
        size = value.constant.size
        if not fmt.has_scales:
            return float(fmt.bytes_for(size))
        encoding = encoding_of(value, fmt)
        return float((encoding or fmt.result).bytes_for(size))

    return stored_bytes
