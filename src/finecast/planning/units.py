"""What the solver decides about: units of ops, and points where values are rounded.

Ops that the engine runs in one kernel are one decision: a cast between them would break the
kernel apart. Values that only move through exact ops are rounded once: they form one
rounding class, and rounding any of them rounds the class.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from scipy.cluster.hierarchy import DisjointSet

from finecast.graph import Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.ops import OpKind, by_name
from finecast.rules import Permission

_JOINS: Final = frozenset({OpKind.ELEMENTWISE, OpKind.TRANSCENDENTAL})
_SHOWS_NO_FLOAT: Final = frozenset({"shape", "size"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Nodes that have a choice: ``members[u]`` are those of unit u; ``of`` leads back."""

    members: tuple[tuple[int, ...], ...]
    of: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingPoints:
    """Where a plan can round.

    ``classes[k]`` are values rounded together, ``class_of`` leads back; ``weights[j]`` maps
    node ids of unit ``weight_units[j]`` to the inputs at which they read constants.
    ``readers[k]``, if given, are the only units that round class k: those that read it.
    """

    classes: tuple[tuple[int, ...], ...]
    class_of: Mapping[int, int]
    weights: tuple[Mapping[int, tuple[int, ...]], ...]
    weight_units: tuple[int, ...]
    readers: tuple[tuple[int, ...], ...] | None = None


def make_units(
    graph: Graph,
    permissions: Mapping[int, Permission],
    lows: Collection[Format],
    kernels: Iterable[Iterable[int]] = (),
) -> Units:
    """Units of the nodes that may be low; those of one kernel belong to one unit.

    Beside an op on codes so do those of its kernel that stay fp32: they read what it gives.

    Args:
        graph: The graph.
        permissions: What the rules left to each node.
        lows: The low formats.
        kernels: Node ids that the engine runs together.
    """
    known = {
        i: p.formats for i, p in permissions.items() if graph.nodes[i].format is Format.FP32
    }
    kernels = [[i for i in kernel if i in known] for kernel in kernels]
    free = {i: f for i, f in known.items() if not f.isdisjoint(lows)}
    for kernel in kernels:
        free |= {i: known[i] for i in _beside_codes(kernel, known)}
    sets = DisjointSet(free)
    for kernel in kernels:
        inside = [i for i in kernel if i in free]
        for other in inside[1:]:
            if _stored(free[other]) == _stored(free[inside[0]]):
                sets.merge(inside[0], other)
    members = sorted(tuple(sorted(s)) for s in sets.subsets())
    of = {node: u for u, nodes in enumerate(members) for node in nodes}
    return Units(members=tuple(members), of=of)


def _beside_codes(
    kernel: Sequence[int], formats: Mapping[int, frozenset[Format]]
) -> list[int]:
    """Ops of a kernel that run on what an op on codes gives, and that store like it.

    They have no choice of their own, but between them and that op nothing is cast.
    """
    coded = [i for i in kernel if any(f.scaled for f in formats[i])]
    return [
        i for i in kernel if any(_stored(formats[i]) == _stored(formats[c]) for c in coded)
    ]


def _stored(formats: frozenset[Format]) -> frozenset[Format]:
    """Formats that results are stored in, which ops of one kernel have alike.

    One for operands alone leaves the results as they are: an op of the kernel that may not
    have it stays fp32 beside one that has.
    """
    return frozenset(f for f in formats if not f.operands_only)


def pattern_kernels(graph: Graph) -> list[frozenset[int]]:
    """Sets of ops that engines commonly run in one kernel, by the graph alone.

    Pointwise ops join the op before them if nothing else reads its result.
    """
    sets = DisjointSet(n.id for n in graph.float_nodes)
    for node in graph.float_nodes:
        if by_name(node.op).kind not in _JOINS:
            continue
        for value in graph.following_inputs(node):
            before = value.producer
            if before is not None and before in sets and value.uses == (node.id,):
                sets.merge(before, node.id)
    return [frozenset(s) for s in sets.subsets() if len(s) > 1]


def rounding_points(
    graph: Graph, units: Units, fused: Sequence[frozenset[int]] = ()
) -> RoundingPoints:
    """Rounding classes of values and the constants that each unit reads.

    Args:
        graph: The graph.
        units: The units.
        fused: Node ids of each kernel of the low plan: what stays inside one is not rounded.
    """
    kernel_of = {node: k for k, nodes in enumerate(fused) for node in nodes}
    touched = [v.id for v in graph.values if _is_rounded(graph, v, units, kernel_of)]
    sets = DisjointSet(touched)
    present = set(touched)
    for node in graph.float_nodes:
        for source, result in _moves(graph, node):
            if source in present and result in present:
                sets.merge(source, result)
    classes = sorted(tuple(sorted(s)) for s in sets.subsets())
    weights = {u: _constant_ports(graph, nodes) for u, nodes in enumerate(units.members)}
    used = {u: ports for u, ports in weights.items() if ports}
    return RoundingPoints(
        classes=tuple(classes),
        class_of={v: k for k, values in enumerate(classes) for v in values},
        weights=tuple(used.values()),
        weight_units=tuple(used),
    )


def _is_rounded(
    graph: Graph, value: Value, units: Units, kernel_of: Mapping[int, int]
) -> bool:
    """Whether some plan stores this value in the low format."""
    if value.format is not Format.FP32 or value.constant is not None:
        return False
    readers = [
        n
        for n in value.uses
        if n in units.of
        and graph.nodes[n].op not in _SHOWS_NO_FLOAT
        and _reads(graph, n, value)
    ]
    writer = value.producer
    written_low = writer is not None and writer in units.of and _writes(graph, writer, value)
    if not readers and not written_low:
        return False
    kernel = kernel_of.get(writer) if writer is not None else None
    inside = kernel is not None and all(kernel_of.get(n) == kernel for n in value.uses)
    return value.is_output or not inside or not value.uses


def _reads(graph: Graph, node_id: int, value: Value) -> bool:
    return any(v.id == value.id for v in graph.following_inputs(graph.nodes[node_id]))


def _writes(graph: Graph, node_id: int, value: Value) -> bool:
    return any(v.id == value.id for v in graph.following_outputs(graph.nodes[node_id]))


def _moves(graph: Graph, node: Node) -> Iterable[tuple[int, int]]:
    """Pairs of a value that ``node`` reads and one that holds the same numbers, moved."""
    if not by_name(node.op).exact:
        return
    sources = [v for v in graph.following_inputs(node) if v.constant is None]
    if len(sources) == 1:
        for result in graph.following_outputs(node):
            yield sources[0].id, result.id


def _constant_ports(graph: Graph, nodes: Iterable[int]) -> dict[int, tuple[int, ...]]:
    ports: dict[int, tuple[int, ...]] = {}
    for node_id in nodes:
        node = graph.nodes[node_id]
        found = tuple(
            i
            for i, (value, follows) in enumerate(
                zip(node.inputs, node.follows_in, strict=True)
            )
            if value is not None and follows and graph.values[value].constant is not None
        )
        if found:
            ports[node_id] = found
    return ports
