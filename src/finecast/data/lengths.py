"""The longest sequences that a model takes: as long as its tables of positions are.

Numbers that depend on the position (learned positions, rotary angles) are largest at the last
one, which inputs of a small size never reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from finecast.graph import Dim, Graph, Node, Value

MOST_LENGTH: Final = 4096
"""Beyond it what grows with the square of the length takes gigabytes."""

MOST_PRODUCTS: Final = 1 << 37
"""Of a run: weights times positions. BERT-large has a third of a billion weights and 512
positions; a run of so many takes seconds."""

_READ_MOST: Final = 64
"""Elements of constants that are looked into: axes and indices, never weights."""

_TRACED_MOST: Final = 256
"""Values that are followed back from one index: positions are made in a few ops."""

# Their other inputs say how large the result is, not what is in it.
_SHAPED: Final = frozenset({"expand", "reshape", "tile", "unsqueeze", "squeeze"})


def length_limits(graph: Graph) -> dict[str, int]:
    """The most that free dimensions of inputs can be, by name.

    Law: a dimension is listed if rows of a constant table are taken by it: a Gather whose
    indices, or a Slice whose end, are computed from that size. Its number is that of the rows
    of the smallest such table. Tables may have rows to spare: positions may start at 2.
    """
    found: dict[str, int] = {}
    for node in graph.nodes:
        rows = _table_rows(graph, node)
        if rows is None:
            continue
        for name in _sizes_behind(graph, node):
            found[name] = min(rows, found.get(name, rows))
    return found


def affordable(limits: Mapping[str, int], graph: Graph) -> dict[str, int]:
    """``limits``, less where a run of so much would take too long."""
    weights = sum(v.constant.size for v in graph.values if v.constant is not None)
    most = min(MOST_LENGTH, max(MOST_PRODUCTS // max(weights, 1), 1))
    return {name: min(limit, most) for name, limit in limits.items()}


def _table_rows(graph: Graph, node: Node) -> int | None:
    """Rows of the constant that a Gather or a Slice takes some of."""
    if node.op not in ("gather", "slice") or node.inputs[0] is None:
        return None
    table = graph.values[node.inputs[0]]
    if table.constant is None or not table.shape:
        return None
    axis = node.attributes.get("axis", 0)
    if node.op == "slice":
        axes = _numbers(graph, node, 3)
        axis = axes[0] if len(axes) == 1 else None
    if not isinstance(axis, int) or not -len(table.shape) <= axis < len(table.shape):
        return None
    rows = table.shape[axis]
    return rows if isinstance(rows, int) and rows > 1 else None


def _sizes_behind(graph: Graph, node: Node) -> set[str]:
    """Names of the dimensions from which a Gather's indices or a Slice's end come."""
    port = 1 if node.op == "gather" else 2
    start = node.inputs[port] if port < len(node.inputs) else None
    return set() if start is None else set(_traced(graph, start))


def _traced(graph: Graph, start: int) -> Iterator[str]:
    waiting: list[tuple[int, Node | None]] = [(start, None)]
    seen: set[tuple[int, int]] = set()
    while waiting and len(seen) < _TRACED_MOST:
        index, reader = waiting.pop()
        value = graph.values[index]
        maker = graph.nodes[value.producer] if value.producer is not None else None
        if maker is None:
            continue
        if maker.op == "shape":
            yield from _named(graph, maker, reader)
            continue
        for more in maker.inputs[:1] if maker.op in _SHAPED else maker.inputs:
            if more is not None and (more, maker.id) not in seen:
                seen.add((more, maker.id))
                waiting.append((more, maker))


def _named(graph: Graph, shape: Node, reader: Node | None) -> Iterator[str]:
    """The dimension of which the size is taken; none where it cannot be told."""
    assert shape.inputs[0] is not None
    dims: tuple[Dim, ...] = graph.values[shape.inputs[0]].shape or ()
    first, last = shape.attributes.get("start", 0), shape.attributes.get("end", len(dims))
    assert isinstance(first, int)
    assert isinstance(last, int)
    dims = dims[first:last]
    if len(dims) > 1 and reader is not None and reader.op == "gather":
        picked = _numbers(graph, reader, 1)
        dims = tuple(dims[i] for i in picked if -len(dims) <= i < len(dims))
    elif len(dims) > 1 and reader is not None and reader.op == "slice":
        starts, ends = _numbers(graph, reader, 1), _numbers(graph, reader, 2)
        dims = dims[starts[0] : ends[0]] if starts and ends else ()
    if len(dims) == 1 and isinstance(dims[0], str):
        yield dims[0]


def _numbers(graph: Graph, node: Node, port: int) -> list[int]:
    """A small constant of integers."""
    index = node.inputs[port] if port < len(node.inputs) else None
    value: Value | None = None if index is None else graph.values[index]
    if value is None or value.constant is None or value.constant.size > _READ_MOST:
        return []
    return [int(n) for n in value.constant.read().reshape(-1).tolist()]
