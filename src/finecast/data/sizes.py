"""Sizes of the free dimensions of inputs with which a model may run, and the longest ones.

A file does not say which sizes fit together. These are guesses, in the order in which they
are worth trying:

1. A size that a weight determines is that: the channels of a convolution, the inner size of a
   product.
2. A decoder appends new keys and values to those of earlier calls. All its caches have one
   length, and inputs such as a mask cover the cached positions and the new ones.
3. Else all free dimensions have one size. Images that are halved many times and sound that is
   cut into windows need large ones. An encoder of sound takes only as many frames as fill its
   table of positions, of which convolutions may have left every second or fourth.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, islice
from typing import Final

from finecast.engines.base import TensorSpec
from finecast.graph import Dim, Graph, Node, Value
from finecast.graph.worklist import Worklist
from finecast.ops import OpKind, by_name

OPEN_SIZES: Final = (16, 64, 224, 256, 1024)
"""Sizes that all free dimensions have at once; 224 is that of most classifiers of images."""

_NEW: Final = 8
_POSITIONS: Final = 32
"""New and all positions of a decoder: cached ones are then of another number than new ones."""
_MOST_TRIED: Final = 16
"""Guesses of what covers all positions, for a decoder whose names say nothing."""
WHOLE: Final = re.compile("mask|total|bias", re.IGNORECASE)
"""Names of inputs and sizes that cover cached and new positions."""
CACHED: Final = re.compile("past|cache", re.IGNORECASE)
"""Names of inputs and sizes of cached positions."""
_CACHE_RANK: Final = 3
"""Keys and values have at least axes for the sample, the position and the channel."""
_STEPS: Final = (1, 2, 4)
_MOST_TABLES: Final = 2
_LONGEST_TEXT: Final = 200


def input_specs(graph: Graph) -> list[TensorSpec]:
    """The inputs of a graph, as sessions state them."""
    return [TensorSpec(name=v.name, dtype=v.dtype, shape=v.shape) for v in graph.inputs]


def guessed_dims(inputs: Sequence[TensorSpec], size: int = OPEN_SIZES[0]) -> dict[str, int]:
    """``size`` by name for each free dimension that is not an input's first axis.

    The name is the symbol, or ``INPUT.AXIS`` where there is none. A size that is computed from
    others, such as ``past + new``, is left out.
    """
    batches = {s.shape[0] for s in inputs if s.shape}
    dims = [
        (d, f"{s.name}.{axis}")
        for s in inputs
        for axis, d in enumerate(s.shape or ())
        if axis and not isinstance(d, int)
    ]
    guesses = {
        symbol or own: size for symbol, own in dims if not symbol or symbol not in batches
    }
    symbols = {d: 1 for s in inputs for d in s.shape or () if isinstance(d, str)}
    return {name: n for name, n in guesses.items() if computed_size(name, symbols) is None}


_OPERATORS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}


def computed_size(symbol: str, sizes: Mapping[str, int]) -> int | None:
    """The value of a symbol that is a sum, product or quotient of symbols in ``sizes``.

    None if it is no such expression: exporters write ``past_length + length``.
    """
    if len(symbol) > _LONGEST_TEXT or not re.search("[-+*/]", symbol):
        return None
    try:
        return max(_value(ast.parse(symbol.strip(), mode="eval").body, sizes), 1)
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(term: ast.expr, sizes: Mapping[str, int]) -> int:
    match term:
        case ast.BinOp(left, op, right):
            return _OPERATORS[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.Name(name):
            return sizes[name]
        case ast.Constant(int(number)):
            return number
        case _:
            raise ValueError


def size_guesses(graph: Graph, given: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Sizes of all free dimensions that no first axis has, in the order to try them in.

    ``given`` are those that the user states, which every guess has.
    """
    inputs = input_specs(graph)
    known = {**_sizes_of_weights(graph), **given}
    for sizes in cached_lengths(graph, given):
        yield {**guessed_dims(inputs), **known, **sizes}
    filling = [rows * step for rows in _added_rows(graph) for step in _STEPS]
    for size in (*OPEN_SIZES, *filling):
        guess = {**guessed_dims(inputs, size), **known}
        yield guess
        if guess == known:  # nothing is free
            return


def _added_rows(graph: Graph) -> list[int]:
    """Rows of the first constant tables that are added to values."""
    values = (
        graph.values[i]
        for n in graph.nodes
        for i in n.inputs
        if n.op == "add" and i is not None
    )
    rows = (v.shape[-2] for v in values if v.constant and v.shape and len(v.shape) > 1)
    return [n for n in dict.fromkeys(rows) if isinstance(n, int) and n > 1][:_MOST_TABLES]


def cached_lengths(
    graph: Graph, given: Mapping[str, int], longest: Mapping[str, int] | None = None
) -> Iterator[dict[str, int]]:
    """Lengths of a decoder's caches, its new positions and both; nothing without caches.

    ``longest`` are the largest sizes by tables of positions, which hold cached and new ones.
    """
    free = guessed_dims(input_specs(graph))
    caches = _cache_lengths(graph) & free.keys()
    if not caches:
        return
    fixed = {**_sizes_of_weights(graph), **given}
    others = [name for name in free if name not in caches and name not in fixed]
    most = min((longest or {}).values(), default=_POSITIONS)
    new = min((given[name] for name in given if name not in caches), default=min(_NEW, most))
    past = min((given[name] for name in caches & given.keys()), default=max(most - new, 1))
    for whole in islice(_covering(others), _MOST_TRIED):
        lengths = {name: past + new if name in whole else new for name in others}
        yield {**dict.fromkeys(caches, past), **lengths, **fixed}


def _covering(names: Sequence[str]) -> Iterator[frozenset[str]]:
    """Which of ``names`` may cover all positions: what they say, then fewer before more."""
    stated = frozenset(name for name in names if WHOLE.search(name))
    yield stated
    for count in range(len(names) + 1):
        for chosen in combinations(names, count):
            if frozenset(chosen) != stated:
                yield frozenset(chosen)


def _cache_lengths(graph: Graph) -> set[str]:
    """Names of the lengths of inputs to which a model appends, or that are named as caches."""
    lengths: set[str] = set()
    for value in graph.inputs:
        rank = len(value.shape or ())
        if rank < _CACHE_RANK or value.format is None:
            continue
        axes = {axis for node in _readers(graph, value) for axis in _appended(node, rank)}
        if not axes and CACHED.search(value.name):
            axes = set(range(1, rank))
        lengths |= {name for axis in axes if (name := _free(value, axis))}
    return lengths


def _appended(node: Node, rank: int) -> Iterator[int]:
    """The axis along which ``node`` appends to a value of this rank."""
    axis = node.attributes.get("axis", node.attributes.get("dim"))
    if node.op == "concat" and isinstance(axis, int) and -rank <= axis < rank:
        yield axis % rank


def _readers(graph: Graph, value: Value) -> Iterator[Node]:
    """The nodes that read a value, also where it was cast before."""
    for node in (graph.nodes[n] for n in dict.fromkeys(value.uses)):
        if node.op == "identity" or by_name(node.op).kind is OpKind.CAST:
            output_id = node.outputs[0]
            yield from () if output_id is None else _readers(graph, graph.values[output_id])
        else:
            yield node


def _free(value: Value, axis: int) -> str:
    """The name of a free dimension; empty if its size is known."""
    dim = (value.shape or ())[axis]
    return "" if isinstance(dim, int) else dim or f"{value.name}.{axis}"


def _sizes_of_weights(graph: Graph) -> dict[str, int]:
    """Sizes of the free dimensions of inputs that a constant weight determines, by name."""
    sizes: dict[str, int] = {}
    for value in graph.inputs:
        for node in _readers(graph, value):
            axis, size = _by_weight(graph, node, value)
            if size and (name := _free(value, axis)):
                sizes.setdefault(name, size)
    return sizes


def _by_weight(graph: Graph, node: Node, value: Value) -> tuple[int, int]:
    """The axis of ``value`` that a product sums over, and its size; 0 if it is not known."""
    if len(node.inputs) < 2 or node.inputs[0] != value.id or node.native.startswith("tf::"):
        return 0, 0
    weight = None if node.inputs[1] is None else graph.values[node.inputs[1]]
    shape = None if weight is None or weight.constant is None else weight.shape
    if not shape or len(shape) < 2 or len(value.shape or ()) < 2:
        return 0, 0
    if node.op == "conv":
        groups = node.attributes.get("group", node.attributes.get("groups", 1))
        contraction = (1, shape[1], groups)
    elif node.op == "matmul" and not node.attributes.get("transpose_b"):
        contraction = (-1, shape[-2], 1)
    elif node.op == "gemm" and not node.attributes.get("transA"):
        contraction = (-1, shape[1] if node.attributes.get("transB") else shape[0], 1)
    else:
        return 0, 0
    axis, size, times = contraction
    if not isinstance(size, int) or not isinstance(times, int):
        return 0, 0
    return axis % len(value.shape or ()), size * times


# ---------------- the longest sequences that a model takes, found from its tables of positions
#
# Verification uses such lengths: numbers that depend on the position (learned positions,
# rotary angles) are largest at the last one, which short inputs never reach.

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
    limits: dict[str, int] = {}
    for node in graph.nodes:
        rows = _table_rows(graph, node)
        if rows is None:
            continue
        for name in _sizes_behind(graph, node):
            limits[name] = min(rows, limits.get(name, rows))
    return limits


def affordable(limits: Mapping[str, int], graph: Graph) -> dict[str, int]:
    """``limits``, lowered where a run of that length would take too long."""
    weights = sum(v.constant.size for v in graph.values if v.constant is not None)
    most = min(MOST_LENGTH, max(MOST_PRODUCTS // max(weights, 1), 1))
    return {name: min(limit, most) for name, limit in limits.items()}


def _table_rows(graph: Graph, node: Node) -> int | None:
    """The number of rows of the constant that a Gather or a Slice reads; None if unknown."""
    table = graph.read(node, 0) if node.op in ("gather", "slice") else None
    if table is None or table.constant is None or not table.shape:
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
    values = Worklist[tuple[int, int | None]]([(start, None)])
    for index, reader in values:
        maker = graph.maker(index)
        if len(values.seen) > _TRACED_MOST:
            return
        if maker is not None and maker.op == "shape":
            yield from _named(graph, maker, None if reader is None else graph.nodes[reader])
        elif maker is not None:
            reads = maker.inputs[:1] if maker.op in _SHAPED else maker.inputs
            values.add((more, maker.id) for more in reads if more is not None)


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
    value = graph.read(node, port)
    if value is None or value.constant is None or value.constant.size > _READ_MOST:
        return []
    return [int(n) for n in value.constant.read().reshape(-1).tolist()]
