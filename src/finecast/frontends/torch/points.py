"""Where a plan rounds, told apart by reader.

A value may be stored in fp32 for one reader and cast for another: a residual stream that
stays exact beside the matrix product that reads a rounded copy. So there is one point for
each place where an op that computes reads a value. It is rounded as soon as any op on the
way from the value's origin to that reader is low: the op that made it, the ops that only
moved it, or the reader itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from finecast.graph import Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.ops import by_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Input ``port`` of node ``reader`` (None: output ``port`` of the model) reads ``value``.

    ``path`` are the nodes any of which rounds it by being low.
    """

    reader: int | None
    port: int
    value: int
    path: tuple[int, ...]


def find_points(graph: Graph, free: frozenset[int]) -> tuple[Point, ...]:
    """All points that a plan can round, ``free`` being the nodes that may be low."""
    found = [p for node in graph.nodes for p in _of_node(graph, node)]
    found += [_point(graph, None, k, v) for k, v in enumerate(graph.outputs)]
    kept = ((p, tuple(n for n in p.path if n in free)) for p in found)
    return tuple(
        Point(reader=p.reader, port=p.port, value=p.value, path=path)
        for p, path in kept
        if path and graph.values[p.value].format is Format.FP32
    )


def _of_node(graph: Graph, node: Node) -> Iterator[Point]:
    for port, index in enumerate(node.inputs):
        if index is None or (moves(node) and _carries_on(graph, node, index)):
            continue
        yield _point(
            graph, node if node.follows_in[port] else None, port, graph.values[index], node
        )


def _point(
    graph: Graph, reader: Node | None, port: int, value: Value, at: Node | None = None
) -> Point:
    path = [reader.id] if reader is not None else []
    current = value
    while current.producer is not None:
        maker = graph.nodes[current.producer]
        if not any(v.id == current.id for v in graph.following_outputs(maker)):
            break
        path.append(maker.id)
        sources = [v for v in graph.following_inputs(maker) if v.format is Format.FP32]
        if not moves(maker) or len(sources) != 1:
            break
        current = sources[0]
    where = at.id if at is not None else None
    return Point(reader=where, port=port, value=value.id, path=tuple(path))


def moves(node: Node) -> bool:
    """Whether the node only moves numbers, so that rounding before and after it is one."""
    floats = sum(node.follows_in)
    return by_name(node.op).exact and floats == 1 and any(node.follows_out)


def _carries_on(graph: Graph, node: Node, index: int) -> bool:
    """Whether the value's readers behind ``node`` stand for it."""
    return any(v.id == index for v in graph.following_inputs(node))
