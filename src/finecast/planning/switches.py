"""Switches of rounding points: the inputs and outputs that each rounds, and the encodings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from finecast.numbers.encodings import Encoding
from finecast.numbers.formats import Format
from finecast.planning.points import Place, RoundingPoints
from finecast.rules import Permission

SWITCH: Final = "finecast_switch"
"""Name of the input of a model with switches: bool[n], element k turns on switch k."""

# (node, index): input ``index`` of the node.
Port = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """What one switch rounds.

    Attributes:
        ports: Encodings of node inputs that it rounds.
        outputs: Encodings of model outputs that it rounds, by their number.
    """

    ports: Mapping[Port, Encoding] = field(default_factory=dict[Port, Encoding])
    outputs: Mapping[int, Encoding] = field(default_factory=dict[int, Encoding])


def switches(
    points: RoundingPoints, permissions: Mapping[int, Permission], fmt: Format
) -> tuple[Switch, ...]:
    """A switch for each point, then one for each unit's constants.

    For a format whose encodings have parameters they are those of the op that reads.
    """
    constants = [
        [(node, index) for node, indices in ports.items() for index in indices]
        for ports in points.weights
    ]
    values = (_switch(permissions, p.places, fmt, p.encoding) for p in points.points)
    return (*values, *(_switch(permissions, of, fmt) for of in constants))


def _switch(
    permissions: Mapping[int, Permission],
    places: Iterable[Place],
    fmt: Format,
    shared: Encoding | None = None,
) -> Switch:
    ports: dict[Port, Encoding] = {}
    outputs: dict[int, Encoding] = {}
    for node, index in places:
        if not fmt.has_scales:
            if node is None:
                outputs[index] = fmt
            else:
                ports[node, index] = fmt
        elif (
            node is not None
            and (encoding := shared or _encoding(permissions, node, index, fmt)) is not None
        ):
            ports[node, index] = encoding
    return Switch(ports=ports, outputs=outputs)


def _encoding(
    permissions: Mapping[int, Permission], node: int, index: int, fmt: Format
) -> Encoding | None:
    of = permissions[node].encodings.get(fmt) if node in permissions else None
    return of.at(index) if of is not None else None
