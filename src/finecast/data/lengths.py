"""The longest sequences that a model takes, found from its tables of positions.

Verification uses such lengths: numbers that depend on the position (learned positions, rotary
angles) are largest at the last one, which short inputs never reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from finecast.graph import Dim, Graph, Node, Value

MOST_LENGTH: Final = 4096
"""The longest sequence to run: beyond it attention, which grows with the square of the length,
takes gigabytes."""

MOST_PRODUCTS: Final = 1 << 37
"""The most products of a run, counted as weights times positions. BERT-large has a third of a
billion weights and 512 positions; such a run takes seconds."""

_READ_MOST: Final = 64
"""Only constants of at most so many elements are read: axes and indices, never weights."""

_TRACED_MOST: Final = 256
"""The most values followed back from one index: positions are computed in a few ops."""

# Ops whose inputs after the first say how large the result is, not what numbers it has.
_SHAPED: Final = frozenset({"expand", "reshape", "tile", "unsqueeze", "squeeze"})


def length_limits(graph: Graph) -> dict[str, int]:
    """The largest size of free dimensions of inputs, by the dimension's name.

    Law: a dimension is listed if its size says which rows of a constant table are taken: the
    indices of a Gather, or the end of a Slice, are computed from it. Its limit is the number
    of rows of the smallest such table. The model's own limit may be lower: in some models
    positions start at 2.
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
    """``limits``, lowered where a run of that length would take too long."""
    weights = sum(v.constant.size for v in graph.values if v.constant is not None)
    most = min(MOST_LENGTH, max(MOST_PRODUCTS // max(weights, 1), 1))
    return {name: min(limit, most) for name, limit in limits.items()}


def _table_rows(graph: Graph, node: Node) -> int | None:
    """The number of rows of the constant that a Gather or a Slice reads; None if unknown."""
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
    """Names of the dimensions from which a Gather's indices or a Slice's end are computed."""
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
    """The name of the dimension whose size ``reader`` takes of a Shape; none if unclear."""
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
    """The numbers of a small integer constant; empty if the port has none."""
    index = node.inputs[port] if port < len(node.inputs) else None
    value: Value | None = None if index is None else graph.values[index]
    if value is None or value.constant is None or value.constant.size > _READ_MOST:
        return []
    return [int(n) for n in value.constant.read().reshape(-1).tolist()]
