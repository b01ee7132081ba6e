"""Synthetic feeds for measuring time and memory; not for measuring accuracy.

Floats are standard normal. Integers and bools are 0 or 1, which are valid indices of every
table; where the table that an integer input indices is known, they go up to its last row.
Bytes that are only converted to floats, as those of images are, are 0 to 255.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from typing import Final

import numpy as np

from finecast.engines.base import Array, TensorSpec
from finecast.engines.ports import DTYPES, shape_text
from finecast.errors import UsageError
from finecast.graph import Graph, Node, Value
from finecast.naming import unknown_name
from finecast.ops import OpKind, by_name

# A limit, because a model file of a few bytes can declare inputs of any size.
_MOST_BYTES: Final = 2 << 30
_INDEX_TYPES: Final = frozenset({"int64", "int32"})
_MOVES: Final = frozenset({OpKind.MOVEMENT, OpKind.RELAYOUT, OpKind.CAST})
_TOP_BYTE: Final = 255
_DRAWN_BYTES: Final = 8
"""Bytes of an element while it is drawn: as fp64 or int64, from which it is converted."""


def synthetic_feeds(
    inputs: Sequence[TensorSpec],
    *,
    batch: int = 1,
    dims: Mapping[str, int] | None = None,
    last: Mapping[str, int] | None = None,
    seed: int = 0,
) -> dict[str, Array]:
    """One batch of random feeds.

    Args:
        inputs: The model's inputs.
        batch: Size of an input's first dimension where that is free, and of the same symbol
            elsewhere.
        dims: Sizes of other free dimensions, by symbol or as ``INPUT.AXIS``.
        last: The largest number to draw for integer inputs, by name (see ``last_indices``).
        seed: Seed of the random generator.

    Raises:
        UsageError: If a free dimension has no size, ``dims`` has a name that is not a free
            dimension's, or the feeds would take over 2 GiB to draw.
    """
    generator = np.random.default_rng(seed)
    sizes = _sizes(inputs, batch, dims or {})
    shapes = {spec.name: _shape(spec, sizes) for spec in inputs}
    check_sizes(shapes)
    most = last or {}
    return {
        spec.name: _draw(generator, spec, shapes[spec.name], most.get(spec.name, 1))
        for spec in inputs
    }


def last_indices(graph: Graph) -> dict[str, int]:
    """The largest number that integer inputs may have, by the inputs' names.

    Law: an input is listed if it is only moved, converted, compared and used to look up rows
    of tables of known size; its number is the last row of the smallest table. Positions and
    tokens at a model's limits show errors that small ones hide. An input of bytes is listed,
    too, if it is only moved until it is converted to floats; its number is 255.
    """
    found = {v.name: _last_row(graph, v) for v in graph.inputs if v.dtype in _INDEX_TYPES}
    bytes_in = (v for v in graph.inputs if v.dtype == "uint8")
    found |= {v.name: _TOP_BYTE for v in bytes_in if _becomes_float(graph, v)}
    return {name: last for name, last in found.items() if last is not None}


def _becomes_float(graph: Graph, value: Value) -> bool:
    """Whether ``value`` is only moved, measured and converted to floats."""
    waiting, seen, converted = [value.id], {value.id}, False
    while waiting:
        for node in (graph.nodes[n] for n in graph.values[waiting.pop()].uses):
            kind = by_name(node.op).kind
            made = [i for i in node.outputs if i is not None]
            if kind is OpKind.CAST and all(graph.values[i].format for i in made):
                converted = True
            elif kind in (OpKind.MOVEMENT, OpKind.RELAYOUT):
                waiting.extend(i for i in made if i not in seen)
                seen.update(made)
            elif node.op != "shape":
                return False
    return converted


def _last_row(graph: Graph, value: Value) -> int | None:
    """The last row that ``value`` can index; None if it has another use, or none is known."""
    found: list[int] = []
    waiting, seen = [value.id], {value.id}
    while waiting:
        index = waiting.pop()
        for node in (graph.nodes[n] for n in graph.values[index].uses):
            kind = by_name(node.op).kind
            if node.op == "gather" and node.inputs[0] != index:
                rows = _rows(graph, node)
                if rows is None:
                    return None
                found.append(rows - 1)
            elif node.op == "shape" or kind is OpKind.COMPARISON:
                continue
            elif kind in _MOVES:
                more = [i for i in node.outputs if i is not None and i not in seen]
                seen.update(more)
                waiting.extend(more)
            else:
                return None
    return min(found, default=None)


def _rows(graph: Graph, node: Node) -> int | None:
    """The number of rows of the table that a Gather reads; None if unknown."""
    table = graph.values[node.inputs[0]] if node.inputs[0] is not None else None
    axis = node.attributes.get("axis", 0)
    if table is None or not table.shape or not isinstance(axis, int):
        return None
    size = table.shape[axis] if -len(table.shape) <= axis < len(table.shape) else None
    return size if isinstance(size, int) and size > 0 else None


def _sizes(
    inputs: Sequence[TensorSpec], batch: int, dims: Mapping[str, int]
) -> dict[str, int]:
    check_dims({spec.name: spec.shape for spec in inputs}, dims)
    fronts = ((spec.name, spec.shape[0]) for spec in inputs if spec.shape)
    sizes = {d or f"{name}.0": batch for name, d in fronts if not isinstance(d, int)}
    return {**sizes, **dims}


def check_dims(
    shapes: Mapping[str, Sequence[int | str | None] | None], dims: Mapping[str, int]
) -> None:
    """Refuse sizes of dimensions that are not free in inputs of these shapes.

    Of an input without a declared shape any axis is free.

    Raises:
        UsageError: If ``dims`` has a name that is neither a symbol nor ``INPUT.AXIS``.
    """
    free = free_dims(shapes)
    free |= {axis: [] for axes in list(free.values()) for axis in axes}
    for name in (n for n, shape in shapes.items() if shape is None):
        free |= {f"{name}.{axis}": [] for axis in range(len(dims) or 1)}
    for name in dims:
        if name not in free:
            raise unknown_name(name, free, what="free dimension", where="--dim")


def free_dims(
    shapes: Mapping[str, Sequence[int | str | None] | None],
) -> dict[str, list[str]]:
    """The axes of inputs that have each free size, as ``INPUT.AXIS``.

    A size without a name has that of its axis, and no axes.
    """
    found: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        for axis, dim in enumerate(shape or ()):
            if not isinstance(dim, int):
                own = f"{name}.{axis}"
                found.setdefault(dim or own, []).extend([own] if dim else [])
    return found


def _shape(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    if spec.shape is None:
        axes = (sizes.get(f"{spec.name}.{axis}") for axis in count())
        given = tuple(takewhile(bool, axes))
        if not given:
            raise UsageError(
                f"input {spec.name!r} has no declared shape",
                fix=f"give --data, or the size of each axis by --dim {spec.name}.0=SIZE",
            )
        return tuple(size for size in given if size)
    shape: list[int] = []
    for axis, dim in enumerate(spec.shape):
        own = f"{spec.name}.{axis}"
        size = dim if isinstance(dim, int) else sizes.get(own, sizes.get(dim or own))
        if size is None:
            raise UsageError(
                f"dimension {dim or axis!r} of input {spec.name!r} "
                f"{shape_text(spec.shape)} has no size",
                fix=f"give --dim {dim or own}=SIZE, or --data",
            )
        shape.append(size)
    return tuple(shape)


def check_sizes(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse random inputs that are too large.

    Raises:
        UsageError: If inputs of ``shapes``, by name, would take over 2 GiB to draw.
    """
    takes = {name: math.prod(shape) * _DRAWN_BYTES for name, shape in shapes.items()}
    total = sum(takes.values())
    if total > _MOST_BYTES:
        largest = max(takes, key=lambda name: takes[name])
        raise UsageError(
            f"random inputs of the declared sizes take {total / 1e9:.1f} GB to draw,"
            f" at most {_MOST_BYTES / 1e9:.1f} are",
            where=f"input {largest!r} of {'x'.join(map(str, shapes[largest]))}",
            fix="give free dimensions less by --dim, inputs by --data, or --no-verify",
        )


def _draw(
    generator: np.random.Generator, spec: TensorSpec, shape: tuple[int, ...], last: int
) -> Array:
    dtype = DTYPES.get(spec.dtype)
    if dtype is None or dtype.kind == "O":
        raise UsageError(f"input {spec.name!r} is of type {spec.dtype}", fix="give --data")
    if dtype.kind in "biu":
        drawn = generator.integers(0, last, shape, endpoint=True)
        if last > 1 and drawn.size:
            drawn.reshape(-1)[-1] = last  # so that it occurs, however few are drawn
        return drawn.astype(dtype)
    return generator.standard_normal(shape).astype(dtype)
