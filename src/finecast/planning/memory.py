"""An estimate of the memory that a plan's model takes while it runs.

Law: the bytes of the constants plus the peak of the bytes of live values, where ops run in the
graph's order and a value is freed after its last reader. What an engine adds, such as packed
copies of weights and scratch space, is left out: the estimate compares plans of one model, and
is no measurement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from finecast.graph import Graph, Value
from finecast.numbers.formats import Format
from finecast.ops.flops import Shapes, is_view, resolve_shape
from finecast.solver.assignment import Ints


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
) -> int:
    """The estimate, in bytes.

    Args:
        graph: The graph.
        formats: By node id; other nodes keep their own.
        shapes: Observed shapes, by value id; a value of unknown shape counts nothing.
        kernels: Kernel by node id: a value that stays inside one takes no memory.
        constants_bytes: Bytes of all constants.
    """
    return constants_bytes + int(
        _alive(rest_in_memory(graph, formats, shapes, kernels)).max(initial=0)
    )


def alive_at_peak(resting: Sequence[Resting]) -> list[Resting]:
    """The values of ``resting`` that are alive at the moment of the peak."""
    alive = _alive(resting)
    if not len(alive):
        return []
    peak = int(alive.argmax())
    return [one for one in resting if one.first <= peak <= one.last]


def rest_in_memory(
    graph: Graph, formats: Mapping[int, Format], shapes: Shapes, kernels: Mapping[int, int]
) -> list[Resting]:
    """The lifetimes of all values, and of their copies cast to the formats of readers.

    The result of a view shares the memory of its source, so it has no entry.
    """
    found: list[Resting] = []
    last = _last_readers(graph)
    for value in graph.values:
        if value.format is None or value.constant is not None or _is_alias(graph, value):
            continue
        shape = resolve_shape(value, shapes)
        if shape is not None and not _inside(value, kernels):
            found += _copies(graph, value, math.prod(shape), formats, last[value.id])
    return found


def _copies(
    graph: Graph, value: Value, elements: int, formats: Mapping[int, Format], last: int
) -> Iterator[Resting]:
    made, own = value.producer, value.format or Format.FP32
    stored = own
    if made is not None and _among(value, graph.following_outputs(graph.nodes[made])):
        stored = formats.get(made, own).result
    copied: dict[Format, list[int]] = {}
    ends = [last] if value.is_output else []
    for index in value.uses:
        node = graph.nodes[index]
        wanted = formats.get(index, own).storage
        if wanted is not stored and _among(value, graph.following_inputs(node)):
            copied.setdefault(wanted, []).append(index)
        else:
            ends.append(last if is_view(node) else 2 * index + 1)
    ends += [2 * min(nodes) for nodes in copied.values()]
    first = 0 if made is None else 2 * made + 1
    yield Resting(
        value=value.id, elements=elements, fmt=stored, first=first, last=max([first, *ends])
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


def _inside(value: Value, kernels: Mapping[int, int]) -> bool:
    """Whether the value is produced and read inside one kernel only."""
    if value.producer is None or value.is_output or not value.uses:
        return False
    kernel = kernels.get(value.producer)
    return kernel is not None and all(kernels.get(n) == kernel for n in value.uses)


def _is_alias(graph: Graph, value: Value) -> bool:
    return value.producer is not None and is_view(graph.nodes[value.producer])


def _last_readers(graph: Graph) -> list[int]:
    """For each value the moment of its last use; uses of a view count for its source."""
    last = [0 if v.producer is None else 2 * v.producer + 1 for v in graph.values]
    for value in graph.outputs:
        last[value.id] = 2 * len(graph.nodes)
    for node in reversed(graph.nodes):
        seen = [last[v] for v in node.outputs if v is not None] if is_view(node) else []
        for index in node.inputs:
            if index is not None:
                last[index] = max(last[index], 2 * node.id + 1, *seen)
    return last


def _alive(resting: Sequence[Resting]) -> Ints:
    """Bytes in memory at each moment."""
    steps = np.zeros(max((r.last for r in resting), default=-1) + 2, dtype=np.int64)
    for one in resting:
        steps[one.first] += one.size_bytes
        steps[one.last + 1] -= one.size_bytes
    return np.cumsum(steps)
