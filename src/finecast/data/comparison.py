"""Metrics that compare a model's float output with the fp32 model's, the reference.

Where the reference is infinite (masked logits are often -inf), the difference is 0 if the
model has the same infinity, and infinite otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import final

import numpy as np
from numpy.typing import NDArray

from finecast.engines.base import Array
from finecast.errors import UsageError
from finecast.planning.sensitivity import is_float

Outputs = Mapping[str, Array]


@final
class Cosine:
    """Mean over samples (first axis) of the cosine to the reference."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0

    def update(
        self, outputs: Outputs, labels: Array | None, reference: Outputs | None
    ) -> None:
        """Take one batch."""
        got, expected = _pair(outputs, reference, "cosine")
        if not got.size:
            return
        rows = len(got) if got.ndim else 1
        masked = np.isinf(expected) & (got == expected)
        a, b = (np.where(masked, 0, x).reshape(rows, -1) for x in (got, expected))
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            cosines = np.einsum("ij,ij->i", a, b) / norms
        equal = (a == b).all(axis=1)
        cosines = np.where(equal, 1.0, np.where(norms == 0, 0.0, cosines))
        self._sum += float(cosines.sum())
        self._count += rows

    def result(self) -> float:
        """The mean cosine; NaN before the first batch."""
        return self._sum / self._count if self._count else math.nan

    def doubts(self) -> tuple[str, ...]:
        """A warning if the mean is over a single sample."""
        return _single(self._count, "cosine")


@final
class SignalToNoise:
    """Signal-to-noise ratio, in dB.

    The signal is the power of the reference, the noise that of the difference from it.
    """

    def __init__(self) -> None:
        self._signal = 0.0
        self._noise = 0.0
        self._count = 0

    def update(
        self, outputs: Outputs, labels: Array | None, reference: Outputs | None
    ) -> None:
        """Take one batch."""
        got, expected = _pair(outputs, reference, "snr_db")
        self._signal += float(np.square(expected[np.isfinite(expected)]).sum())
        self._noise += float(np.square(_difference(got, expected)).sum())
        self._count += got.size

    def result(self) -> float:
        """The ratio in dB; infinite if nothing differs, NaN before the first batch."""
        if not self._count or math.isnan(self._noise):
            return math.nan
        if self._noise == 0:
            return math.inf
        if self._signal == 0 or math.isinf(self._noise):
            return -math.inf
        return 10 * math.log10(self._signal / self._noise)

    def doubts(self) -> tuple[str, ...]:
        """A warning if the output is a single number, or all zeros."""
        if self._count and not self._signal:
            return ("the fp32 model's output is all 0: snr_db says little of it",)
        return _single(self._count, "snr_db")


@final
class MaxAbs:
    """The largest absolute difference."""

    def __init__(self) -> None:
        self._largest: float | None = None

    def update(
        self, outputs: Outputs, labels: Array | None, reference: Outputs | None
    ) -> None:
        """Take one batch."""
        got, expected = _pair(outputs, reference, "max_abs")
        if not got.size:
            return
        largest = float(np.abs(_difference(got, expected)).max())
        before = largest if self._largest is None else self._largest
        self._largest = float(np.maximum(before, largest))  # keeps NaN, unlike max()

    def result(self) -> float:
        """The largest difference; NaN before the first batch."""
        return math.nan if self._largest is None else self._largest

    def doubts(self) -> tuple[str, ...]:
        """None: the largest difference says the same of any number of samples."""
        return ()


def _single(count: int, metric: str) -> tuple[str, ...]:
    return (f"{metric} rests on one sample",) if count == 1 else ()


def _difference(
    got: NDArray[np.float64], expected: NDArray[np.float64]
) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):
        distance = np.where(got == expected, 0.0, got - expected)
    # An infinity of the other sign, or a finite number, where the reference is infinite.
    return np.where(np.isinf(expected) & (got != expected) & ~np.isnan(got), np.inf, distance)


def counterpart(reference: Outputs, name: str, got: Array) -> Array:
    """The fp32 model's output of a name, to be compared with ``got``.

    Raises:
        UsageError: If it has none of that name, or one of another shape.
    """
    if name not in reference:
        raise UsageError(
            f"the fp32 model has no output {name!r}, but {', '.join(reference) or 'none'}",
            fix="compare models whose outputs have the same names, or use --eval",
        )
    expected = reference[name]
    if got.shape != expected.shape:
        raise UsageError(
            f"output {name!r} has shape {list(got.shape)}, the fp32 model's "
            f"{list(expected.shape)}",
            fix="use --eval with a metric of your own",
        )
    return expected


def _pair(
    outputs: Outputs, reference: Outputs | None, metric: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The first output and the reference's of that name, as fp64."""
    if reference is None:
        raise UsageError(f"{metric} needs the fp32 model's outputs")
    name, got = next(iter(outputs.items()))
    if not is_float(got):
        raise UsageError(
            f"{metric} needs a float output, and {name!r} holds {got.dtype.name}",
            fix="use --metric agreement, or --eval",
        )
    expected = counterpart(reference, name, got)
    return got.astype(np.float64), expected.astype(np.float64)
