"""Metrics that compare a model's float output with the fp32 model's, the reference.

Where the reference is infinite (masked logits are often -inf), the difference is 0 if the
model has the same infinity, and infinite otherwise.
"""

from __future__ import annotations

import math
from typing import final

import numpy as np
from numpy.typing import NDArray

from finecast.data.samples import Floats, MeanMetric, Outputs, SumMetric, by_sample
from finecast.engines.base import Array
from finecast.errors import UsageError
from finecast.planning.sensitivity import is_float


@final
class Cosine(MeanMetric):
    """Mean over samples (first axis) of the cosine to the reference."""

    def terms(
        self, outputs: Outputs, labels: Array | None, reference: Outputs | None
    ) -> Floats:
        """The cosine of each sample, and 1."""
        got, expected = pair(outputs, reference, "cosine")
        if not got.size:
            return np.zeros((0, 2))
        rows = len(got) if got.ndim else 1
        masked = np.isinf(expected) & (got == expected)
        a, b = (np.where(masked, 0, x).reshape(rows, -1) for x in (got, expected))
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            cosines = np.einsum("ij,ij->i", a, b) / norms
        equal = (a == b).all(axis=1)
        cosines = np.where(equal, 1.0, np.where(norms == 0, 0.0, cosines))
        return np.stack([cosines, np.ones(rows)], axis=-1)

    def doubts(self) -> tuple[str, ...]:
        """A warning if the mean is over a single sample."""
        return _single(self.sums[1], "cosine")


@final
class SignalToNoise(SumMetric):
    """Signal-to-noise ratio, in dB.

    The signal is the power of the reference, the noise that of the difference from it.
    """

    def terms(
        self, outputs: Outputs, labels: Array | None, reference: Outputs | None
    ) -> Floats:
        """The power of signal and noise, and the number of elements, of each sample."""
        got, expected = pair(outputs, reference, "snr_db")
        signal = np.where(np.isfinite(expected), np.square(expected), 0.0)
        noise = np.square(_difference(got, expected))
        parts = (signal, noise, np.ones_like(signal))
        return np.stack([by_sample(part) for part in parts], axis=-1)

    def metric(self, sums: Floats) -> Floats:
        """The ratio in dB; infinite if nothing differs."""
        signal, noise, count = np.moveaxis(sums, -1, 0)
        found = np.where(noise == 0, np.inf, 10 * np.log10(signal / noise))
        return np.where(count == 0, np.nan, found)

    def doubts(self) -> tuple[str, ...]:
        """A warning if the output is a single number, or all zeros."""
        signal, _, count = self.sums
        if count and not signal:
            return ("the fp32 model's output is all 0: snr_db says little of it",)
        return _single(count, "snr_db")


@final
class MaxAbs:
    """The largest absolute difference."""

    def __init__(self) -> None:
        self._largest: float | None = None

    def update(
        self, outputs: Outputs, labels: Array | None, reference: Outputs | None
    ) -> None:
        """Take one batch."""
        got, expected = pair(outputs, reference, "max_abs")
        if not got.size:
            return
        self._take(float(np.abs(_difference(got, expected)).max()))

    def absorb(self, later: MaxAbs) -> None:
        """Take the batches of another one."""
        if later._largest is not None:
            self._take(later._largest)

    def _take(self, largest: float) -> None:
        before = largest if self._largest is None else self._largest
        self._largest = float(np.maximum(before, largest))  # keeps NaN, unlike max()

    def result(self) -> float:
        """The largest difference; NaN before the first batch."""
        return math.nan if self._largest is None else self._largest

    def samples(self) -> None:
        """None: of the largest difference on other samples, these samples say nothing."""

    def doubts(self) -> tuple[str, ...]:
        """None: the largest difference says the same of any number of samples."""
        return ()


def _single(count: float, metric: str) -> tuple[str, ...]:
    return (f"{metric} rests on one sample",) if count == 1 else ()


def _difference(
    got: NDArray[np.float64], expected: NDArray[np.float64]
) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):
        distance = np.where(got == expected, 0.0, got - expected)
    # An infinity of the other sign, or a finite number, where the reference is infinite.
    return np.where(np.isinf(expected) & (got != expected) & ~np.isnan(got), np.inf, distance)


def counterpart(reference: Outputs, name: str) -> Array:
    """The fp32 model's output of a name.

    Raises:
        UsageError: If it has none of that name.
    """
    if name not in reference:
        raise UsageError(
            f"the fp32 model has no output {name!r}, but {', '.join(reference) or 'none'}",
            fix="compare models whose outputs have the same names, or use --eval",
        )
    return reference[name]


def pair(
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
    expected = counterpart(reference, name)
    if got.shape != expected.shape:
        raise UsageError(
            f"output {name!r} has shape {list(got.shape)}, the fp32 model's "
            f"{list(expected.shape)}",
            fix="use --metric agreement, or --eval with a metric of your own",
        )
    return got.astype(np.float64), expected.astype(np.float64)
