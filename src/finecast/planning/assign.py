"""Formats of all nodes from their permissions alone, without a cost model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.choices import Choice
from finecast.planning.units import Units
from finecast.rules import Permission


def lowest(
    graph: Graph, permissions: Mapping[int, Permission], *lows: Format
) -> dict[int, Format]:
    """For each node the first of ``lows`` that is permitted, else fp32, else the smallest.

    An op that only moves numbers from fp32 ops to fp32 ops stays fp32 where it is permitted:
    in a low format it would round the numbers and save no computation.
    """
    found = {i: pick(p, *lows, Format.FP32) for i, p in permissions.items()}
    free = (
        i for i, fmt in found.items() if _is_low(fmt) and Format.FP32 in permissions[i].formats
    )
    movers = {i for i in free if by_name(graph.nodes[i].op).places}
    apart = _apart_from_low(graph, found, movers)
    return found | dict.fromkeys(apart, Format.FP32)


def highest(permissions: Mapping[int, Permission]) -> dict[int, Format]:
    """For each node fp32 where it is permitted, else the smallest permitted format."""
    return {i: pick(p, Format.FP32) for i, p in permissions.items()}


def chosen(
    permissions: Mapping[int, Permission], units: Units, choice: Choice
) -> dict[int, Format]:
    """The units' ops in the formats of ``choice``, all other ops fp32 where permitted.

    An op of a unit that does not permit the unit's format is fp32, too: a unit may have a
    format for operands that only some of its ops can take.
    """
    of = choice.by_node(units)
    fp32 = Format.FP32
    return {i: pick(p, of.get(i, fp32), fp32) for i, p in permissions.items()}


def _apart_from_low(
    graph: Graph, formats: Mapping[int, Format], movers: Collection[int]
) -> set[int]:
    """The ``movers`` that no chain of movers connects to a low op or to a low value.

    Constants count as low values, because a plan may store them in a low format.
    """
    apart = set(movers)
    low = [n.id for n in graph.float_nodes if _is_low(formats[n.id]) and n.id not in apart]
    for value in graph.values:
        if value.constant is not None or _is_low(value.format):
            low += apart.intersection((*value.uses, value.producer))
    while low:
        node = graph.nodes[low.pop()]
        apart.discard(node.id)
        before = {v.producer for v in graph.following_inputs(node)}
        after = {n for v in graph.following_outputs(node) for n in v.uses}
        low += apart & (before | after)
    return apart


def _is_low(fmt: Format | None) -> bool:
    return fmt not in (None, Format.FP32)


def pick(permission: Permission, *preferred: Format) -> Format:
    """The first of ``preferred`` that is permitted, else the smallest permitted format."""
    for fmt in preferred:
        if fmt in permission.formats:
            return fmt
    return min(permission.formats, key=lambda f: (f.bits, f.label))
