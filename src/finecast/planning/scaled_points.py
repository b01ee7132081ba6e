"""Rounding points of a format whose encodings have parameters: what its ops encode."""

from __future__ import annotations

from collections.abc import Mapping

from finecast.graph import Graph
from finecast.numbers.encodings import Encoding
from finecast.numbers.formats import Format
from finecast.numbers.scaled import Scaled
from finecast.planning.points import Place, RoundingPoint, RoundingPoints
from finecast.planning.units import Units
from finecast.rules import Permission
from finecast.rules.scaled_operands import coded_result, origin, reading


def scaled_points(
    graph: Graph, units: Units, permissions: Mapping[int, Permission], fmt: Format
) -> RoundingPoints:
    """Classes of the values that ops in ``fmt`` store as codes, and their coded constants.

    Values that are only moved from one another have the same codes: they are one class. A
    kernel's inner values belong to it as well, where an op of the kernel encodes them. What an
    op stores its result in rounds it for all that read it.
    """
    shared: dict[int, Encoding] = {}
    places: dict[int, list[Place]] = {}
    readers: dict[int, set[int]] = {}
    weights: dict[int, dict[int, tuple[int, ...]]] = {}
    for node, unit in units.of.items():
        encodings = permissions[node].encodings.get(fmt)
        if encodings is None:
            continue
        for index in encodings.operands:
            source = graph.nodes[node].inputs[index]
            assert source is not None
            root = origin(graph, graph.values[source]).id
            places.setdefault(root, []).append((node, index))
            readers.setdefault(root, set()).add(unit)
            shared[root] = encodings.operands[index]
        if isinstance(encodings.result, Scaled):
            value = coded_result(graph, graph.nodes[node])
            assert value is not None
            places.setdefault(value.id, []).extend(reading(graph, value))
            readers.setdefault(value.id, set()).add(unit)
            shared[value.id] = encodings.result
        if encodings.constants:
            weights.setdefault(unit, {})[node] = tuple(sorted(encodings.constants))
    return RoundingPoints(
        points=tuple(
            RoundingPoint(
                places=tuple(dict.fromkeys(places[r])),
                readers=tuple(sorted(readers[r])),
                encoding=shared[r],
            )
            for r in sorted(places)
        ),
        weights=tuple(weights.values()),
        weight_units=tuple(weights),
    )
