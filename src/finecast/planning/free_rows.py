"""Outputs whose length depends on numbers, compared as sets of rows.

NonZero, a boolean mask or NMS behind a threshold give more or fewer rows where a number that
is rounded crosses the threshold. Such outputs are told from the graph: their length follows
from such an op. Rows are partners if they are near, whatever their place; outputs of one such
op (boxes, scores and classes) have their partners together.

Law: two outputs that hold the same rows in any order are equal; a row without a partner counts
as lost as a whole, and a new one as an error of its own size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from finecast.graph import Graph, Node, Value
from finecast.graph.structure import READS_SHAPE_ONLY
from finecast.numbers.rounding import widened
from finecast.planning.detections import class_columns

_Array = NDArray[np.generic]
_Floats: TypeAlias = NDArray[np.float64]
_Indices: TypeAlias = NDArray[np.intp]

NEAR: Final = 0.25
"""Partners differ by at most this share of the spread of each number of a row."""
_LEAST_SPREAD: Final = 0.25
"""The spread is at least this share of the numbers' size: rows of nearly equal scores would
else have no partner."""
_MOST_COLUMNS: Final = 6
"""Rows of more numbers are sought by so many random sums of them: trees of more dimensions are
no faster than to compare all rows."""
_ROUNDS: Final = 8
"""Nearest pairs are taken so many times, each time of the rows that are left."""


# ----------------------------------------------- which outputs have a length that is not fixed

_MAKES_ROWS: Final = frozenset({"compress", "non_max_suppression", "non_zero", "unique"})
"""Ops whose number of results depends on numbers."""
_OF_COLUMNS: Final = frozenset({"onnx::NonZero", "openvino::NonZero"})
"""Ops that give the places of numbers as columns."""
_SIZES: Final = {
    "constant_of_shape": (0,),
    "expand": (1,),
    "range": (0, 1, 2),
    "reshape": (1,),
    "slice": (1, 2, 3, 4),
    "tile": (1,),
    "top_k": (1,),
}
"""Inputs, by op, that the shape of the result follows from."""
_KEEPS_FIRST: Final = frozenset(
    {"scatter", "scatter_elements", "scatter_nd", "tensor_scatter"}
)
"""Ops whose result has the shape of their first input, whatever is written into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeOutput:
    """An output whose length depends on numbers.

    Attributes:
        axes: The axes that may be the one along which rows lie, the likeliest first; empty if
            its rank is not known.
        group: Outputs of one group have their partners together.
        rank: Its number of axes, if known. Arrays of several calls that were joined flat have
            another one, and no rows.
    """

    name: str
    axes: tuple[int, ...]
    group: int
    rank: int | None = None

    def axis(self, got: _Array, wanted: _Array) -> int | None:
        """The axis along which rows lie; None where the arrays cannot be compared."""
        rank = wanted.ndim if self.rank is None else self.rank
        if not rank or got.ndim != rank or wanted.ndim != rank:
            return None
        shapes = zip(got.shape, wanted.shape, strict=True)
        unlike = [n for n, (one, other) in enumerate(shapes) if one != other]
        if len(unlike) > 1:
            return None
        return (*unlike, *self.axes, 0)[0]


def free_outputs(graph: Graph) -> tuple[FreeOutput, ...]:
    """The outputs of a graph whose length depends on numbers; kept as long as the graph."""
    return graph.once(_free_outputs)


def _free_outputs(graph: Graph) -> tuple[FreeOutput, ...]:
    free = free_values(graph)
    groups: dict[object, int] = {}
    outputs: list[FreeOutput] = []
    for value in graph.outputs:
        origins, rows = free.get(value.id), rows_of(graph, value)
        if origins and (rows.axes or value.shape is None):
            size = value.shape[rows.axes[0]] if value.shape and rows.axes else None
            # Outputs of a size of the same name, or of sizes that follow from the same ops.
            keys = [key for key in (size, origins) if key]
            number = next((groups[key] for key in keys if key in groups), len(outputs))
            groups |= {key: number for key in keys if key not in groups}
            outputs.append(replace(rows, group=number))
    return tuple(outputs)


def rows_of(graph: Graph, value: Value) -> FreeOutput:
    """How the rows of a value lie if its length depends on numbers."""
    known, dims = graph.once(_sizes_of_inputs), value.shape or ()
    axes = tuple(n for n, d in enumerate(dims) if not isinstance(d, int) and d not in known)
    rank, maker = None if value.shape is None else len(dims), graph.maker(value)
    if rank is None and maker is not None and maker.native in _OF_COLUMNS:
        axes = (1,)
    return FreeOutput(name=value.name, axes=axes, group=0, rank=rank)


def _sizes_of_inputs(graph: Graph) -> frozenset[str]:
    """The names of sizes that a caller chooses."""
    dims = (dim for v in graph.inputs for dim in v.shape or ())
    return frozenset(dim for dim in dims if isinstance(dim, str))


def free_values(graph: Graph) -> Mapping[int, frozenset[int]]:
    """Values whose shape may follow from numbers, by id, with the nodes that it follows from.

    A value that a size was computed of counts, too: a shape is read of it.
    """
    return graph.once(_free_values)


def _free_values(graph: Graph) -> Mapping[int, frozenset[int]]:
    free: dict[int, frozenset[int]] = {}
    # Values that depend on numbers of the inputs, and of these the ones that rounding changes.
    data = {v.id for v in graph.inputs}
    rounded = {v.id for v in graph.inputs if holds_floats(v)}
    for node in graph.nodes:
        read = node.input_ids
        shaping = read[:1] if node.op in _KEEPS_FIRST else read
        origins = frozenset[int]().union(*(free.get(i, ()) for i in shaping))
        numbers = node.op not in READS_SHAPE_ONLY
        # Of a mask that is given all models have as many rows.
        selects = makes_rows(graph, node) and not rounded.isdisjoint(read)
        if selects or _takes_size(node, rounded):
            origins |= {node.id}
        depends = numbers and not data.isdisjoint(read)
        for index in node.output_ids:
            if origins:
                free[index] = origins
            if depends:
                data.add(index)
                if holds_floats(graph.values[index]) or not rounded.isdisjoint(read):
                    rounded.add(index)
    return free


def makes_rows(graph: Graph, node: Node) -> bool:
    """Whether numbers decide how many rows an op gives; PyTorch indexes by masks, too."""
    masks = (graph.read(node, port) for port in range(1, len(node.inputs)))
    masked = any(mask is not None and mask.dtype == "bool" for mask in masks)
    return node.op in _MAKES_ROWS or (node.native == "aten::index" and masked)


def _takes_size(node: Node, rounded: set[int]) -> bool:
    ports = (p for p in _SIZES.get(node.op, ()) if p < len(node.inputs))
    return any(node.inputs[port] in rounded for port in ports)


def holds_floats(value: Value) -> bool:
    """Whether the value has numbers with a fraction."""
    return value.format is not None or value.dtype == "fp64"


# ------------------------------------------------------------------------- partners of rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """Outputs of two models with partners in the same places.

    An output of free length has its rows along the first axis: those of the second model in
    their order, then those of the first one that have no partner. A row that is absent is 0 in
    the numbers of floats; other outputs, whose partners are equal, become 1 where a row is
    there and 0 where it is not.

    Attributes:
        got: The outputs of the first model.
        wanted: Those of the second, the fp32 model.
        numbers: By output of free length the number of each row, in both; -1 for none.
    """

    got: Mapping[str, _Array]
    wanted: Mapping[str, _Array]
    numbers: Mapping[str, tuple[_Indices, _Indices]]

    def unmatched(self, name: str) -> tuple[int, int]:
        """Rows of fp32 that have no partner, and new rows."""
        got, wanted = self.numbers[name]
        return int(np.sum(got < 0)), int(np.sum(wanted < 0))

    def changed(self, name: str) -> tuple[int, int]:
        """Rows of the longer output without a partner, and how many it has."""
        (lost, new), every = self.unmatched(name), len(self.numbers[name][0])
        return max(lost, new), every - min(lost, new)


def matched(
    free: Sequence[FreeOutput], got: Mapping[str, _Array], wanted: Mapping[str, _Array]
) -> Matched:
    """Both with rows of outputs of free length beside their partners; others as they are."""
    pairs = Matched(got=got, wanted=wanted, numbers={})
    groups: dict[object, list[tuple[str, _Array, _Array]]] = {}
    for one in free:
        if one.name not in got or one.name not in wanted:
            continue
        first, second = got[one.name], wanted[one.name]
        axis = one.axis(first, second)
        if axis is not None:
            rows = (np.moveaxis(first, axis, 0), np.moveaxis(second, axis, 0))
            key = one.group, *map(len, rows)
            groups.setdefault(key, []).append((one.name, *rows))
    for members in groups.values():
        pairs = _placed(pairs, members)
    return pairs


def _placed(before: Matched, members: Sequence[tuple[str, _Array, _Array]]) -> Matched:
    first = [_flat(one) for _, one, _ in members]
    second = [_flat(other) for _, _, other in members]
    mine, theirs = _partners(first, second)
    count = len(second[0])
    new = np.setdiff1d(np.arange(len(first[0])), mine)
    numbers = np.full(count + len(new), -1), np.full(count + len(new), -1)
    numbers[0][theirs], numbers[1][:count] = theirs, np.arange(count)
    numbers[0][count:] = count + np.arange(len(new))
    got, wanted = dict(before.got), dict(before.wanted)
    for name, one, other in members:
        if is_float(one):
            rows = np.zeros((len(numbers[0]), *one.shape[1:]), dtype=one.dtype)
            rows[theirs], rows[count:] = one[mine], one[new]
            absent = np.zeros((len(new), *other.shape[1:]), dtype=other.dtype)
            got[name], wanted[name] = rows, np.concatenate([other, absent])
        else:
            got[name], wanted[name] = ((n >= 0).astype(np.float32) for n in numbers)
    told = dict(before.numbers) | {name: numbers for name, *_ in members}
    return replace(before, got=got, wanted=wanted, numbers=told)


def _flat(array: _Array) -> _Array:
    return array.reshape(len(array), math.prod(array.shape[1:]))


def is_float(array: _Array) -> bool:
    """Whether an array holds numbers with a fraction, of ml_dtypes' types, too."""
    return array.dtype.kind not in "biucOSUmM"


def _partners(first: Sequence[_Array], second: Sequence[_Array]) -> tuple[_Indices, _Indices]:
    """Numbers of the rows in the first that have a partner, and of their partners."""
    count = len(first[0])
    both = [np.concatenate(pair) for pair in zip(first, second, strict=True)]
    exact = [a for a in both if not is_float(a)]
    floats: list[_Array] = [np.zeros((len(both[0]), 0))]
    for array in (widened(a) for a in both if is_float(a)):
        classes = class_columns(array[count:], array[:count])
        exact.append(array[:, classes])
        floats.append(np.delete(array, classes, axis=1))
    numbers = np.concatenate(floats, axis=1)
    # A NaN or an infinite number is near its like alone.
    finite = np.isfinite(numbers)
    lost = np.where(finite, 0.0, numbers).T
    kinds = _codes([*(column for a in exact for column in a.T), *lost], len(both[0]))
    every = _codes([kinds, *numbers.T], len(both[0]))
    mine, theirs = _equal(every[:count], every[count:])
    if not numbers.shape[1]:
        return mine, theirs
    left = [np.setdiff1d(np.arange(n), used) for n, used in
            ((count, mine), (len(every) - count, theirs))]  # fmt: skip
    places = _places(np.where(finite, numbers, np.nan), kinds, count)
    near = _nearest(places[:count], places[count:], left)
    return (*(np.concatenate(pair) for pair in zip((mine, theirs), near, strict=True)),)  # pyright: ignore[reportReturnType]


def _codes(columns: Sequence[_Array], count: int) -> NDArray[np.int64]:
    """A number for each row: the same for rows that are equal in all columns."""
    codes = np.zeros(count, dtype=np.int64)
    for column in columns:
        plain = column.astype(str) if column.dtype.hasobject else column
        _, own = np.unique(plain, return_inverse=True)
        _, codes = np.unique(codes * (count + 1) + own.reshape(-1), return_inverse=True)
        codes = codes.reshape(-1).astype(np.int64)
    return codes


def _equal(first: NDArray[np.int64], second: NDArray[np.int64]) -> tuple[_Indices, _Indices]:
    """Pairs of equal codes; of equal ones on a side the k-th is the partner of the k-th."""
    width = max(len(first), len(second)) + 1
    keys = [codes * width + _occurrences(codes) for codes in (first, second)]
    _, mine, theirs = np.intersect1d(*keys, assume_unique=True, return_indices=True)
    return mine, theirs


def _occurrences(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many equal codes stand before each."""
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    starts = np.searchsorted(ordered, ordered, side="left")
    occurrences = np.empty(len(codes), dtype=np.int64)
    occurrences[order] = np.arange(len(codes)) - starts
    return occurrences


def _places(numbers: _Floats, kinds: NDArray[np.int64], count: int) -> _Floats:
    """Points whose distances are shares of the spread; rows of other kinds lie far apart.

    Numbers are NaN where they have no distance.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        own = numbers[count:]
        own = own if len(own) else np.ones((1, numbers.shape[1]))
        known = np.isfinite(own)
        sums = np.maximum(known.sum(axis=0), 1)
        mean = np.where(known, own, 0).sum(axis=0) / sums
        square = np.where(known, np.square(own), 0).sum(axis=0) / sums
        spread = np.sqrt(np.maximum(square - np.square(mean), _LEAST_SPREAD**2 * square))
        spread = np.where((spread > 0) & np.isfinite(spread), spread, 1.0)
        places = np.where(np.isfinite(numbers), (numbers - mean) / spread, 0.0)
        columns = places.shape[1]
        if columns > _MOST_COLUMNS:
            mixing = np.random.default_rng(0).standard_normal((columns, _MOST_COLUMNS))
            places = places @ (mixing / np.sqrt(columns))
    return np.concatenate([places, 2.0 * kinds[:, None]], axis=1).astype(np.float64)


def _nearest(
    first: _Floats, second: _Floats, left: Sequence[_Indices]
) -> tuple[_Indices, _Indices]:
    """Pairs of rows that are each other's nearest, taken again of what is left."""
    from scipy.spatial import KDTree

    rest = [
        rows[np.isfinite(points[rows]).all(axis=1)]
        for points, rows in zip((first, second), left, strict=True)
    ]
    pairs: list[Any] = [(rest[0][:0], rest[1][:0])]
    for _ in range(_ROUNDS):
        if not len(rest[0]) or not len(rest[1]):
            break
        # Equal points as one: a tree of them would be a list.
        (points, kinds), (others, other_kinds) = (
            np.unique(one[rows], axis=0, return_inverse=True)
            for one, rows in zip((first, second), rest, strict=True)
        )
        there, back = (
            np.asarray(KDTree(to).query(of, p=np.inf, distance_upper_bound=NEAR)[1])
            for of, to in ((points, others), (others, points))
        )
        near = np.flatnonzero(there < len(others))
        mutual = near[back[there[near]] == near]
        if not len(mutual):
            break
        labels = np.full(len(points), -1), np.full(len(others), -2)
        labels[0][mutual] = labels[1][there[mutual]] = mutual
        mine, theirs = _equal(labels[0][kinds.reshape(-1)], labels[1][other_kinds.reshape(-1)])
        pairs.append((rest[0][mine], rest[1][theirs]))
        rest = [np.delete(rest[0], mine), np.delete(rest[1], theirs)]
    mine, theirs = zip(*pairs, strict=True)
    return np.concatenate(mine), np.concatenate(theirs)
