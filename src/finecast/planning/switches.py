"""What is rounded, and to which encoding, when a rounding point is switched on by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from finecast.graph import Graph
from finecast.numbers.encodings import SCALED, Encoding
from finecast.numbers.formats import Format
from finecast.planning.units import RoundingPoints
from finecast.rules import Permission

SWITCH: Final = "finecast_switch"
"""The input of a model with switches: a bool vector, whose element k turns on switch k."""

# Input ``index`` of node ``node``.
Port = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """What one switch rounds.

    Attributes:
        values: Encodings of values, by id, that are rounded for all that read them.
        ports: Encodings of what single inputs of nodes read.
    """

    values: Mapping[int, Encoding] = field(default_factory=dict[int, Encoding])
    ports: Mapping[Port, Encoding] = field(default_factory=dict[Port, Encoding])


def switches(
    graph: Graph,
    points: RoundingPoints,
    permissions: Mapping[int, Permission],
    fmt: Format,
) -> tuple[Switch, ...]:
    """A switch for each class of values, then for each unit's constants.

    A format whose encodings have parameters rounds at the inputs of the ops that may have it,
    each by its own parameters: other ops read what they read before.
    """
    constants = [
        [(node, index) for node, indices in ports.items() for index in indices]
        for ports in points.weights
    ]
    if fmt not in SCALED:
        return (
            *(Switch(values=dict.fromkeys(values, fmt)) for values in points.classes),
            *(Switch(ports=dict.fromkeys(ports, fmt)) for ports in constants),
        )
    read = [_ports_of(graph, values) for values in points.classes]
    return tuple(_scaled(permissions, ports, fmt) for ports in (*read, *constants))


def _ports_of(graph: Graph, values: Iterable[int]) -> list[Port]:
    return [
        (reader, index)
        for value in values
        for reader in dict.fromkeys(graph.values[value].uses)
        for index, source in enumerate(graph.nodes[reader].inputs)
        if source == value
    ]


def _scaled(
    permissions: Mapping[int, Permission], ports: Iterable[Port], fmt: Format
) -> Switch:
    found: dict[Port, Encoding] = {}
    for node, index in ports:
        of = permissions[node].encodings.get(fmt) if node in permissions else None
        encoding = of.at(index) if of is not None else None
        if encoding is not None:
            found[node, index] = encoding
    return Switch(ports=found)
