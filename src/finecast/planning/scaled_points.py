"""Rounding points of formats whose encodings have parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from finecast.graph import Graph
from finecast.numbers.encodings import Encoding
from finecast.numbers.formats import Format
from finecast.numbers.scaled import Scaled
from finecast.planning.points import Place, RoundingPoint, RoundingPoints
from finecast.planning.units import Units
from finecast.rules import Permission
from finecast.rules.scaled_operands import coded_result, origin, reading

# A value, and the unit that encodes it as it reads it; None if its producer encodes it.
_Class = tuple[int, int | None]


def scaled_points(
    graph: Graph, units: Units, permissions: Mapping[int, Permission], fmt: Format
) -> RoundingPoints:
    """The values that ops in ``fmt`` encode, separately for each unit, and their constants.

    Values that are only moved from one another have the same codes. An operand is rounded for
    the unit that encodes it only: readers in other formats read it unrounded. A result that
    its op encodes is rounded for all of its readers.
    """
    shared: dict[int, Encoding] = {}
    places: dict[_Class, list[Place]] = {}
    makers: dict[int, set[int]] = {}
    weights: dict[int, dict[int, tuple[int, ...]]] = {}
    for node, unit in units.of.items():
        encodings = permissions[node].encodings.get(fmt)
        if encodings is None:
            continue
        for index, encoding in encodings.operands.items():
            source = graph.nodes[node].inputs[index]
            assert source is not None
            root = origin(graph, graph.values[source]).id
            places.setdefault((root, unit), []).append((node, index))
            shared[root] = encoding
        if isinstance(encodings.result, Scaled):
            value = coded_result(graph, graph.nodes[node])
            assert value is not None
            places.setdefault((value.id, None), []).extend(reading(graph, value))
            makers.setdefault(value.id, set()).add(unit)
            shared[value.id] = encodings.result
        if encodings.constants:
            weights.setdefault(unit, {})[node] = tuple(sorted(encodings.constants))
    return RoundingPoints(
        points=tuple(
            RoundingPoint(
                places=tuple(dict.fromkeys(at)),
                readers=tuple(sorted({*makers.get(root, ()), *own})),
                encoding=shared[root],
            )
            for root, own, at in _by_reader(places)
        ),
        weights=tuple(weights.values()),
        weight_units=tuple(weights),
    )


def _by_reader(
    places: Mapping[_Class, Sequence[Place]],
) -> Iterator[tuple[int, tuple[int, ...], Sequence[Place]]]:
    """The value of each class, the unit that encodes its places, if any, and the places.

    Places that a unit encodes are left out of the class that the producer encodes.
    """
    encoded = {at for (_, unit), found in places.items() if unit is not None for at in found}
    for (root, unit), found in places.items():
        if unit is not None:
            yield root, (unit,), found
        elif rest := [at for at in found if at not in encoded]:
            yield root, (), rest
