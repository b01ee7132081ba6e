"""Rounding points of a format whose encodings have parameters: what its ops encode."""

from __future__ import annotations

from collections.abc import Mapping

from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.units import RoundingPoints, Units
from finecast.rules import Permission
from finecast.rules.scaled_operands import origin


def scaled_points(
    graph: Graph, units: Units, permissions: Mapping[int, Permission], fmt: Format
) -> RoundingPoints:
    """Classes of the values that ops in ``fmt`` store as codes, and their coded constants.

    Values that are only moved from one another have the same codes: they are one class. A
    kernel's inner values belong to it as well, where an op of the kernel encodes them.
    """
    values: dict[int, set[int]] = {}
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
            values.setdefault(root, set()).add(source)
            readers.setdefault(root, set()).add(unit)
        if encodings.constants:
            weights.setdefault(unit, {})[node] = tuple(sorted(encodings.constants))
    roots = sorted(values)
    return RoundingPoints(
        classes=tuple(tuple(sorted(values[r])) for r in roots),
        class_of={v: k for k, r in enumerate(roots) for v in values[r]},
        weights=tuple(weights.values()),
        weight_units=tuple(weights),
        readers=tuple(tuple(sorted(readers[r])) for r in roots),
    )
