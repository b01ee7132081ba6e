"""A session's ports: element types by label, and checks of feeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from finecast.engines.base import Array, Feeds, Session, TensorSpec, each_call
from finecast.errors import UsageError
from finecast.numbers.formats import FLOATS

_FLOATS = {f.label: f.dtype for f in FLOATS if f is f.storage}
_LOW = _FLOATS.keys() - {"fp32"}
_OTHERS = {
    "fp64": np.dtype(np.float64),
    "bool": np.dtype(np.bool_),
    "string": np.dtype(object),
    **{f"{u}int{n}": np.dtype(f"{u}int{n}") for u in ("", "u") for n in (8, 16, 32, 64)},
}
DTYPES: dict[str, np.dtype[np.generic]] = {**_FLOATS, **_OTHERS}
"""The numpy (or ml_dtypes) type of each element type's label."""

ONNX_LABELS: Final = {
    "float": "fp32",
    "double": "fp64",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8e4m3fn": "fp8_e4m3",
    "float8e5m2": "fp8_e5m2",
}
"""Labels of ONNX's float types; the label of another type is ONNX's own name."""
ONNX_NAMES: Final = {label: name for name, label in ONNX_LABELS.items()}

_LABELS = {dtype: label for label, dtype in DTYPES.items()}


def dtype_label(dtype: np.dtype[np.generic]) -> str:
    """The label of an array's element type; numpy's own name where there is none."""
    return _LABELS.get(dtype, "string" if dtype.kind in "OSU" else dtype.name)


def in_native_order(array: Array) -> Array:
    """The array with bytes in this machine's order; another order is no other type."""
    swapped = array.dtype.kind in "biufc" and not array.dtype.isnative
    return array.astype(array.dtype.newbyteorder("=")) if swapped else array


def ordered_feeds(feeds: Feeds, inputs: Sequence[TensorSpec]) -> list[Array]:
    """The arrays of ``feeds`` in the model's order, after checking names, types and shapes.

    An fp32 array is rounded where a plan has declared the input in a low type: the data of a
    model run its low version, too.

    Raises:
        UsageError: If an input is missing or unknown, or an array's type or shape is not
            the input's; names the input, what it got and what it expected.
    """
    names = [spec.name for spec in inputs]
    known = ", ".join(names) or "none"
    for name in feeds:
        if name not in names:
            raise UsageError(f"unknown input {name!r}", fix=f"the model's inputs are {known}")
    arrays: list[Array] = []
    for spec in inputs:
        if spec.name not in feeds:
            raise UsageError(
                f"input {spec.name!r} is missing", fix=f"the model's inputs are {known}"
            )
        array = in_native_order(feeds[spec.name])
        if spec.dtype in _LOW and array.dtype == np.float32:
            array = array.astype(DTYPES[spec.dtype])
        check_array(array, spec)
        arrays.append(array)
    return arrays


def check_array(array: Array, spec: TensorSpec) -> None:
    """Check an array's element type, rank and sizes against those of an input.

    Raises:
        UsageError: If it does not fit.
    """
    got = dtype_label(array.dtype)
    if got != spec.dtype:
        raise UsageError(
            f"input {spec.name!r} has type {got}, expected {spec.dtype}",
            fix="convert the array before running",
        )
    if spec.shape is None:
        return
    fits = array.ndim == len(spec.shape) and all(
        not isinstance(dim, int) or dim == size
        for dim, size in zip(spec.shape, array.shape, strict=True)
    )
    if not fits:
        raise UsageError(
            f"input {spec.name!r} has shape {shape_text(array.shape)}, "
            f"expected {shape_text(spec.shape)}",
            fix="feed arrays of the declared shape",
        )


def shape_text(shape: Sequence[int | str | None]) -> str:
    """``[N, 3, ?]``: a shape as messages and tables show it."""
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in shape) + "]"


def feeds_for(session: Session, feeds: Feeds) -> Feeds:
    """The feeds that ``session`` takes, in the declared types of its inputs."""
    specs = [s for s in session.inputs if s.name in feeds]
    return each_call(
        feeds,
        lambda call: {s.name: np.asarray(call[s.name], DTYPES.get(s.dtype)) for s in specs},
    )
