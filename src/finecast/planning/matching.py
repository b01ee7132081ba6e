"""Which values of a model are which of another version of it: fp32 and low, say.

Law: no value has two partners. Values are matched by their names, which tools keep even where
they fuse ops, then by the names of ops of the same kind; what is left by structure, if one op
alone of that kind reads the same values. Casts and codes, which the other version may have
more of, are read through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from finecast.graph import Graph, Node, Value

_PASSED: Final = frozenset({"cast", "quantize", "dequantize"})
"""Ops that give the same value in another encoding."""


def matched_values(graph: Graph, other: Graph) -> dict[int, int]:
    """Ids of values of ``other`` by those of ``graph``: float values outside of bodies.

    Inputs are matched by name, and by their order where no name is known.
    """
    found = _matched_inputs(graph, other)
    by_name = {v.name: v for v in _results(other)}
    taken = set(found.values())

    def add(value: Value, partner: Value | None) -> None:
        if partner is not None and value.id not in found and partner.id not in taken:
            found[value.id] = partner.id
            taken.add(partner.id)

    for value in _results(graph):
        add(value, by_name.get(value.name))
    places = {_place(other, v): v for v in _results(other)}
    for value in _results(graph):
        partner = places.get(_place(graph, value))
        if partner is not None and _same_op(graph, value, other, partner):
            add(value, partner)
    readers = _by_what_they_read(other)
    for value in _results(graph):
        if value.id not in found:
            node = graph.maker(value)
            assert node is not None
            read = tuple(found.get(i) for i in _read(graph, node))
            partners = readers.get((node.op, node.outputs.index(value.id), read), [])
            free = [p for p in partners if p.id not in taken]
            if any(i is not None for i in read) and len(free) == 1:
                add(value, free[0])
    return found


def origin(graph: Graph, value: int) -> int:
    """The value that ``value`` is, before casts and codes."""
    maker = graph.maker(value)
    while maker is not None and maker.op in _PASSED and maker.inputs[0] is not None:
        value = maker.inputs[0]
        maker = graph.maker(value)
    return value


def _matched_inputs(graph: Graph, other: Graph) -> dict[int, int]:
    theirs = {v.name: v.id for v in other.inputs}
    pairs = zip(graph.inputs, other.inputs, strict=False)
    return {v.id: theirs.get(v.name, beside.id) for v, beside in pairs if v.format is not None}


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
