"""What the solver decides about: units of ops.

Ops that the engine runs in one kernel are one decision: a cast between them would break the
kernel apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from scipy.cluster.hierarchy import DisjointSet

from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.ops import OpKind, by_name
from finecast.rules import Permission

_JOINS: Final = frozenset({OpKind.ELEMENTWISE, OpKind.TRANSCENDENTAL})


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Nodes that have a choice: ``members[u]`` are those of unit u; ``of`` leads back."""

    members: tuple[tuple[int, ...], ...]
    of: Mapping[int, int]


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
