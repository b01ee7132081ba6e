"""Which values of a model are which of another version of it: fp32 and low, say.

Law: no value has two partners. Values are matched by their names, which tools keep even where
they fuse ops, then by the names of ops of the same kind; what is left by structure, if one op
alone of that kind reads the same values. Casts and codes, which the other version may have
more of, are read through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from finecast.graph import Graph, Node, Value

_PASSED: Final = frozenset({"cast", "quantize", "dequantize"})
"""Ops that give the same value in another encoding."""


def matched_values(graph: Graph, other: Graph) -> dict[int, int]:
    """Ids of values of ``other`` by those of ``graph``: float values outside of bodies.

    Inputs and outputs are matched by name, and by their order where no name is known.
    """
    inputs = _by_name(graph.inputs, other.inputs)
    found = {v.id: partner.id for v, partner in inputs if v.format is not None}
    taken = set(found.values())
    for value, partner in _named(graph, other):
        if value.id not in found and partner.id not in taken:
            found[value.id] = partner.id
            taken.add(partner.id)
    readers = _by_what_they_read(other)
    for value in _results(graph):  # in order: what a node reads has been matched before
        node = graph.maker(value)
        if value.id in found or node is None:
            continue
        read = tuple(found.get(i) for i in _read(graph, node))
        alike = readers.get((node.op, node.outputs.index(value.id), read), [])
        free = [partner for partner in alike if partner.id not in taken]
        if any(i is not None for i in read) and len(free) == 1:
            found[value.id] = free[0].id
            taken.add(free[0].id)
    return found


def _named(graph: Graph, other: Graph) -> Iterator[tuple[Value, Value]]:
    """Pairs of results by the names of outputs, of values, and of ops, in this order."""
    theirs = {v.id: v for v in _results(other)}
    for value, end in _by_name(graph.outputs, other.outputs):
        partner = theirs.get(origin(other, end.id))
        if value.format is not None and partner is not None:
            yield value, partner
    names = {v.name: v for v in theirs.values()}
    places = {_place(other, v): v for v in theirs.values()}
    for value in _results(graph):
        if value.name in names:
            yield value, names[value.name]
    for value in _results(graph):
        partner = places.get(_place(graph, value))
        if partner is not None and _same_op(graph, value, other, partner):
            yield value, partner


def origin(graph: Graph, value: int) -> int:
    """The value that ``value`` is, before casts and codes."""
    maker = graph.maker(value)
    while maker is not None and maker.op in _PASSED and maker.inputs[0] is not None:
        value = maker.inputs[0]
        maker = graph.maker(value)
    return value


def _by_name(ports: Sequence[Value], others: Sequence[Value]) -> Iterator[tuple[Value, Value]]:
    """Each port with the other model's of its name, or else in its place."""
    names = {v.name: v for v in others}
    for value, beside in zip(ports, others, strict=False):
        yield value, names.get(value.name, beside)


def _results(graph: Graph) -> Iterator[Value]:
    """Float values that an op computes outside of bodies."""
    for node in graph.nodes:
        if node.region or node.op in _PASSED:
            continue
        for index in node.outputs:
            if index is not None and graph.values[index].format is not None:
                yield graph.values[index]


def _same_op(graph: Graph, value: Value, other: Graph, partner: Value) -> bool:
    made, theirs = graph.maker(value), other.maker(partner)
    return made is not None and theirs is not None and made.op == theirs.op


def _place(graph: Graph, value: Value) -> tuple[str, int]:
    """The name of the op that computes a value, and which of its results the value is."""
    node = graph.maker(value)
    assert node is not None
    return node.name, node.outputs.index(value.id)


def _read(graph: Graph, node: Node) -> tuple[int, ...]:
    """The values that a node reads, before casts and codes; no constants."""
    read = (origin(graph, i) for i in node.inputs if i is not None)
    return tuple(i for i in read if graph.values[i].constant is None)


def _by_what_they_read(
    graph: Graph,
) -> Mapping[tuple[str, int, tuple[int | None, ...]], list[Value]]:
    found: dict[tuple[str, int, tuple[int | None, ...]], list[Value]] = {}
    for value in _results(graph):
        node = graph.maker(value)
        assert node is not None
        key = node.op, node.outputs.index(value.id), _read(graph, node)
        found.setdefault(key, []).append(value)
    return found
