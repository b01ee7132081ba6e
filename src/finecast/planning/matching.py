"""Which values of a model are which of a low version of it.

Law: no value has two partners. Values are matched by their names, which tools keep even where
they fuse ops; the others are results of ops that ``graph.matching`` pairs. Casts and codes,
which the low version has more of, are read through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from finecast.graph import Graph, Value
from finecast.graph.matching import match
from finecast.graph.structure import structure_of

_PASSED: Final = frozenset({"cast", "quantize", "dequantize"})
"""Ops that give the same value in another encoding."""


def matched_values(graph: Graph, other: Graph) -> dict[int, int]:
    """Ids of values of ``other`` by those of ``graph``: float values outside of bodies.

    Inputs are matched by name, or by their order where the name is another one.
    """
    inputs = _by_name(graph.inputs, other.inputs)
    found = {v.id: partner.id for v, partner in inputs if v.format is not None}
    taken = set(found.values())
    for value, partner in _pairs(graph, other):
        if value.id not in found and partner.id not in taken:
            found[value.id] = partner.id
            taken.add(partner.id)
    return found


def _pairs(graph: Graph, other: Graph) -> Iterator[tuple[Value, Value]]:
    """Pairs of results by the names of outputs and of values, then by the ops they are of."""
    mine, theirs = ({v.id: v for v in _results(g)} for g in (graph, other))
    for value, end in _by_name(graph.outputs, other.outputs):
        partner = theirs.get(_origin(other, end.id))
        if value.id in mine and partner is not None and value.name == end.name:
            yield value, partner
    names = {v.name: v for v in theirs.values()}
    for value in mine.values():
        if value.name in names:
            yield value, names[value.name]
    for node, partner in match(structure_of(graph), structure_of(other)).pairs.items():
        results = zip(graph.nodes[node].outputs, other.nodes[partner].outputs, strict=False)
        for value, result in results:
            if value in mine and result in theirs:
                yield mine[value], theirs[result]


def _origin(graph: Graph, value: int) -> int:
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
