"""Synthetic feeds for measuring time and memory; not for measuring accuracy.

Floats are standard normal. Integers and bools are 0 or 1, which are valid indices of every
table. Where a graph says more of an input's numbers (``input_ranges``), they are drawn so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from typing import Final

import numpy as np

from finecast.data.input_ranges import Mask, Normal, Range, Whole
from finecast.data.sizes import computed_size
from finecast.engines.base import DTYPES, Array, TensorSpec, shape_text
from finecast.errors import UsageError
from finecast.naming import unknown_name

# A limit, because a model file of a few bytes can declare inputs of any size.
_MOST_BYTES: Final = 2 << 30
_DRAWN_BYTES: Final = 8
"""Bytes of an element while it is drawn: as fp64 or int64, from which it is converted."""


def synthetic_feeds(
    inputs: Sequence[TensorSpec],
    *,
    batch: int = 1,
    dims: Mapping[str, int] | None = None,
    ranges: Mapping[str, Range] | None = None,
    seed: int = 0,
) -> dict[str, Array]:
    """One batch of random feeds.

    Args:
        inputs: The model's inputs.
        batch: Size of an input's first dimension where that is free, and of the same symbol
            elsewhere.
        dims: Sizes of other free dimensions, by symbol or as ``INPUT.AXIS``. A symbol that is
            an expression of others, as ``past + new``, needs none.
        ranges: What is known of the inputs' numbers, by name (see ``input_ranges``).
        seed: Seed of the random generator.

    Raises:
        UsageError: If a free dimension has no size, ``dims`` has a name that is not a free
            dimension's, or the feeds would take over 2 GiB to draw.
    """
    generator = np.random.default_rng(seed)
    sizes = _sizes(inputs, batch, dims or {})
    shapes = {spec.name: _shape(spec, sizes) for spec in inputs}
    check_sizes(shapes)
    known = ranges or {}
    return {
        spec.name: _draw(generator, spec, shapes[spec.name], known.get(spec.name))
        for spec in inputs
    }


def _sizes(
    inputs: Sequence[TensorSpec], batch: int, dims: Mapping[str, int]
) -> dict[str, int]:
    check_dims({spec.name: spec.shape for spec in inputs}, dims, batch)
    fronts = ((spec.name, spec.shape[0]) for spec in inputs if spec.shape)
    sizes = {d or f"{name}.0": batch for name, d in fronts if not isinstance(d, int)}
    sizes = {**sizes, **dims}
    symbols = {d for spec in inputs for d in spec.shape or () if isinstance(d, str)}
    computed = {d: n for d in symbols - dims.keys() if (n := computed_size(d, sizes))}
    return {**sizes, **computed}


def check_dims(
    shapes: Mapping[str, Sequence[int | str | None] | None],
    dims: Mapping[str, int],
    batch: int = 1,
) -> None:
    """Refuse sizes of dimensions that are not free in inputs of these shapes.

    Of an input without a declared shape any axis is free. A batch of 1 is the default, and no
    size that was asked for.

    Raises:
        UsageError: If ``dims`` has a name that is neither a symbol nor ``INPUT.AXIS``, or no
            input's first axis can have the size ``batch``.
    """
    firsts = {shape[0] if shape else None for shape in shapes.values() if shape != ()}
    if (
        batch != 1
        and firsts
        and not firsts & {batch}
        and all(isinstance(first, int) for first in firsts)
    ):
        raise no_effect(batch, *firsts)
    free = free_dims(shapes)
    free |= {axis: [] for axes in list(free.values()) for axis in axes}
    for name in (n for n, shape in shapes.items() if shape is None):
        free |= {f"{name}.{axis}": [] for axis in range(len(dims) or 1)}
    for name in dims:
        if name not in free:
            raise unknown_name(name, free, what="free dimension", where="--dim")


def no_effect(batch: int, *fixed: int | str | None) -> UsageError:
    """The error for a batch size where the sizes of the model are ``fixed``."""
    return UsageError(
        f"the model's batch is fixed at {' and '.join(map(str, fixed))}, not {batch}",
        where="--batch",
        fix="leave it out, or export the model with a free batch dimension",
    )


def free_dims(
    shapes: Mapping[str, Sequence[int | str | None] | None],
) -> dict[str, list[str]]:
    """The axes of inputs that have each free size, as ``INPUT.AXIS``.

    A size without a name has that of its axis, and no axes.
    """
    axes_by_size: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        for axis, dim in enumerate(shape or ()):
            if not isinstance(dim, int):
                own = f"{name}.{axis}"
                axes_by_size.setdefault(dim or own, []).extend([own] if dim else [])
    return axes_by_size


def _shape(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    if spec.shape is None:
        axes = (sizes.get(f"{spec.name}.{axis}") for axis in count())
        stated_sizes = tuple(takewhile(bool, axes))
        if not stated_sizes:
            raise UsageError(
                f"input {spec.name!r} has no declared shape",
                fix=f"give --data, or the size of each axis by --dim {spec.name}.0=SIZE",
            )
        return tuple(size for size in stated_sizes if size)
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
    generator: np.random.Generator,
    spec: TensorSpec,
    shape: tuple[int, ...],
    known: Range | None,
) -> Array:
    dtype = DTYPES.get(spec.dtype)
    if dtype is None or dtype.kind == "O":
        raise UsageError(f"input {spec.name!r} is of type {spec.dtype}", fix="give --data")
    if isinstance(known, Whole) or dtype.kind in "biu":
        last = known.last if isinstance(known, Whole) else 1
        drawn = generator.integers(0, last, shape, endpoint=True)
        if last > 1 and drawn.size:
            drawn.reshape(-1)[-1] = last  # so that it occurs, however few are drawn
        if isinstance(known, Mask) and drawn.size > max(shape[-1], 1):
            drawn.reshape(-1, drawn.shape[-1])[-1] = 0
        return drawn.astype(dtype)
    normal = generator.standard_normal(shape)
    if isinstance(known, Normal):
        normal = _scaled(normal, known)
    return normal.astype(dtype)


def _scaled(drawn: Array, known: Normal) -> Array:
    """Normal numbers with the mean and deviation known, if these fit the shape drawn."""
    try:
        shape = np.broadcast_shapes(drawn.shape, known.mean.shape, known.deviation.shape)
    except ValueError:
        return drawn
    return (
        np.add(known.mean, np.multiply(known.deviation, drawn))
        if shape == drawn.shape
        else drawn
    )
