"""Units of ops: the solver chooses one format for each.

Ops that the engine runs in one kernel form a unit, because a cast between them would break the
kernel apart. A kernel on integers gives its sum in a float format, so that an op which adds a
further value to that sum, as a residual connection does, may be on integers or not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.ops import POINTWISE, by_name
from finecast.rules import Permission


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Units of node ids: ``members[u]`` are the nodes of unit u, ``of`` is the inverse."""

    members: tuple[tuple[int, ...], ...]
    of: Mapping[int, int]

    @classmethod
    def of_sets(cls, sets: Iterable[Iterable[int]]) -> Units:
        """A unit of each set of node ids."""
        members = tuple(sorted(tuple(sorted(s)) for s in sets))
        of = {node: u for u, nodes in enumerate(members) for node in nodes}
        return cls(members=members, of=of)


def make_units(
    graph: Graph,
    permissions: Mapping[int, Permission],
    lows: Collection[Format],
    kernels: Iterable[Iterable[int]] = (),
) -> Units:
    """Units of the nodes that may be low; nodes of one kernel are in one unit.

    In a kernel with an op on codes so are ops that stay fp32: they read its result. An op
    that adds a further value to a product begins a unit of its own.

    ``kernels`` are those of the engine, as node ids.
    """
    known = {
        i: p.formats for i, p in permissions.items() if graph.nodes[i].format is Format.FP32
    }
    kernels = [[i for i in kernel if i in known] for kernel in kernels]
    free = {i: f for i, f in known.items() if not f.isdisjoint(lows)}
    for kernel in kernels:
        free |= {i: known[i] for i in _beside_codes(kernel, known)}
    from scipy.cluster.hierarchy import DisjointSet  # a second to import

    sets = DisjointSet(free)
    for kernel in kernels:
        for together in _segments(graph, [i for i in kernel if i in free], free):
            for other in together[1:]:
                if _stored(free[other]) == _stored(free[together[0]]):
                    sets.merge(together[0], other)
    return Units.of_sets(sets.subsets())


def _segments(
    graph: Graph, kernel: Iterable[int], formats: Mapping[int, frozenset[Format]]
) -> list[list[int]]:
    """The ops of a kernel in order, divided where it reads a further value.

    Law: a division is behind a product, and in front of an op that may be on codes and reads
    a value which no op of the kernel makes. Whether that op reads codes of it does not change
    what the product reads and gives.
    """
    inside, segments, is_behind = frozenset(kernel), list[list[int]]([[]]), False
    for number in sorted(inside):
        node = graph.nodes[number]
        if by_name(node.op).matmul_engine:
            is_behind = True
        elif is_behind and any(f.runs_on_codes for f in formats[number]):
            read = [v for v in graph.following_inputs(node) if v.constant is None]
            if any(v.producer not in inside for v in read):
                segments.append([])
        segments[-1].append(number)
    return segments


def _beside_codes(
    kernel: Sequence[int], formats: Mapping[int, frozenset[Format]]
) -> list[int]:
    """Ops of a kernel with an op on codes that permit the same stored formats as that op.

    Some have no choice of format themselves, but nothing is cast between them and that op.
    """
    coded = [i for i in kernel if any(f.has_scales for f in formats[i])]
    return [
        i for i in kernel if any(_stored(formats[i]) == _stored(formats[c]) for c in coded)
    ]


def _stored(formats: frozenset[Format]) -> frozenset[Format]:
    """The formats that results can be stored in, which are the same for all ops of a unit.

    Formats for operands only do not change how results are stored: an op that may not have
    one can stay fp32 beside an op that has it.
    """
    return frozenset(f.storage for f in formats if f.encodes_results)


def deciding(formats: Collection[Format]) -> frozenset[Format]:
    """The formats that a unit's label may be, whose ops have ``formats``.

    An op whose weights are codes that are decoded to bf16 is in a unit with ops in bf16. The
    unit's label is then that op's format.
    """
    beside = {f.storage for f in formats if f.storage is not f}
    return frozenset(formats) - beside


def pattern_kernels(graph: Graph) -> list[frozenset[int]]:
    """Sets of ops that engines commonly fuse into one kernel, judged by the graph alone.

    A pointwise op is fused with the op in front of it if nothing else reads that op's result.
    """
    from scipy.cluster.hierarchy import DisjointSet

    sets = DisjointSet(n.id for n in graph.float_nodes)
    for node in graph.float_nodes:
        if by_name(node.op).kind not in POINTWISE:
            continue
        for value in graph.following_inputs(node):
            before = value.producer
            if before is not None and before in sets and value.uses == (node.id,):
                sets.merge(before, node.id)
    return [frozenset(s) for s in sets.subsets() if len(s) > 1]
