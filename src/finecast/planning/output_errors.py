"""The errors of a model's outputs, each by itself, and the outputs that they are told of.

Laws: the error of several outputs is that of the worst, as a mean over many would hide one.
An output that mostly copies an input, as a decoder gives back the keys and values that came
in, is small in error whatever the model computes: it is left out where others are left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.generic]

# An output copies an input if at least this share of its power is numbers of the input in
# their places: what the model computes of it then shows less than its own error.
_MOSTLY: Final = 0.5


def squared_errors(
    outputs: Sequence[_Array],
    reference: Sequence[_Array],
    counted: Collection[int] | None = None,
) -> dict[int, float]:
    """||y - r||^2 / ||r||^2 of each float output, by its number; inf where y is NaN or Inf.

    An output whose shape depends on computed numbers and differs from the reference's is left
    out; if all differ they have 1, all lost. ``counted`` are the outputs to look at; None for
    all.
    """
    errors: dict[int, float] = {}
    lost: list[int] = []
    for number, (got, wanted) in enumerate(zip(outputs, reference, strict=True)):
        ignored = counted is not None and number not in counted
        if ignored or wanted.dtype.kind != "f" or not wanted.size:
            continue
        if got.shape != wanted.shape:
            lost.append(number)
            continue
        y, r = got.astype(np.float64), wanted.astype(np.float64)
        ok = np.isfinite(r)
        norm = float(np.sum(r[ok] ** 2))
        finite = np.isfinite(y[ok]).all()
        difference = float(np.sum((y[ok] - r[ok]) ** 2)) if finite else np.inf
        errors[number] = difference / norm if norm else difference
    return errors or dict.fromkeys(lost, 1.0)


def squared_error(
    outputs: Sequence[_Array],
    reference: Sequence[_Array],
    counted: Collection[int] | None = None,
) -> float:
    """The largest of ``squared_errors``; 0 if there are none."""
    return max(squared_errors(outputs, reference, counted).values(), default=0.0)


def counted_outputs(inputs: Iterable[_Array], outputs: Sequence[_Array]) -> frozenset[int]:
    """Numbers of the float outputs that errors are told of: those that copy no input.

    All float outputs, if each of them copies one.
    """
    given = [x for x in inputs if is_float(x)]
    floats = [number for number, y in enumerate(outputs) if is_float(y)]
    own = [n for n in floats if not any(_copies(x, outputs[n]) for x in given)]
    return frozenset(own or floats)


def is_float(array: _Array) -> bool:
    """Whether an array holds numbers with a fraction, of ml_dtypes' types, too."""
    return array.dtype.kind not in "biucOSUmM"


def _copies(x: _Array, y: _Array) -> bool:
    """Whether most of ``y`` is ``x``: with some elements replaced, or longer or moved on.

    A cache gets new rows at its end, or loses old ones at its start, or has rows written over.
    """
    if x.dtype != y.dtype or x.ndim != y.ndim or not x.ndim or not x.size or not y.size:
        return False
    unlike = [axis for axis in range(x.ndim) if x.shape[axis] != y.shape[axis]]
    power = _power(y)
    if len(unlike) > 1 or not 0 < power < np.inf:
        return False
    least = _MOSTLY * power
    if not unlike and _shared_power(x, y) >= least:
        return True
    return any(
        _moved_power(np.moveaxis(x, axis, 0), np.moveaxis(y, axis, 0)) >= least
        for axis in unlike or range(x.ndim)
    )


def _moved_power(x: _Array, y: _Array) -> float:
    """Power of the rows of ``y`` that are rows of ``x`` in their order, at either end of y."""
    rows = tuple(range(1, x.ndim))
    starts = np.flatnonzero((x == y[0]).all(axis=rows))
    start = int(starts[0]) if len(starts) else len(x)
    front = min(len(x) - start, len(y))
    back = min(len(x), len(y))
    return max(
        _shared_power(x[start : start + front], y[:front]),
        _shared_power(x[:back], y[len(y) - back :]),
    )


def _shared_power(x: _Array, y: _Array) -> float:
    """Power of the elements of ``y`` that equal those of ``x``."""
    return _power(y[x == y])


def _power(array: _Array) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.sum(np.square(array.astype(np.float64))))
