"""Metrics of distance: from labels (errors, perplexity), from the fp32 model's outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

import numpy as np
from numpy.typing import NDArray

from finecast.data.labels import (
    IGNORED,
    check_numbers,
    check_some,
    class_labels,
    few,
    is_counted,
    misfit,
    numbers,
)
from finecast.data.samples import (
    Floats,
    Labels,
    MeanMetric,
    Outputs,
    Reference,
    SumMetric,
    by_sample,
)
from finecast.engines.base import Array
from finecast.errors import UsageError
from finecast.numbers.rounding import widened
from finecast.planning.sensitivity import is_float


@final
class MeanError(MeanMetric):
    """Mean of ``of(error)`` over all elements; the error is the first output less labels."""

    def __init__(self, name: str, of: Callable[[Floats], Floats]) -> None:
        super().__init__()
        self._name = name
        self._of = of

    def terms(self, outputs: Outputs, labels: Labels, reference: Reference) -> Floats:
        """The error and the number of elements of each sample.

        Raises:
            UsageError: If there are no labels, not one for each output element, or one is not
                a finite number.
        """
        name, got = next(iter(outputs.items()))
        check_numbers(got, name, self._name)
        wanted = numbers(labels, self._name)
        if wanted.size != got.size:
            raise misfit(wanted, got, got.shape, name)
        error = widened(got) - wanted.reshape(got.shape)
        return np.stack([by_sample(self._of(error)), by_sample(np.ones_like(error))], axis=-1)

    def doubts(self) -> tuple[str, ...]:
        """A warning if the mean is over one number."""
        return (f"{self._name} rests on one number",) if self.sums[1] == 1 else ()


@final
class Perplexity(SumMetric):
    """exp of the mean negative log-likelihood of the labels under the first output's logits.

    Logits lie along the last axis, and the label beside a logit is what it predicts: shift
    the labels of a causal language model before saving them. Labels of -100 do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._classes = 0

    def terms(self, outputs: Outputs, labels: Labels, reference: Reference) -> Floats:
        """The negative log-likelihood and the number of the labels of each sample.

        Raises:
            UsageError: If the labels do not fit, or the output is probabilities.
        """
        from scipy.special import log_softmax

        name, scores = next(iter(outputs.items()))
        class_ids = class_labels(labels, scores, output=name, metric="perplexity")
        counted = class_ids != IGNORED
        chosen = np.where(counted, class_ids, 0)[..., None]
        logs = log_softmax(_logits(scores, name, "perplexity"), axis=-1)
        log_likelihoods = np.take_along_axis(logs, chosen, axis=-1)[..., 0]
        self._classes = scores.shape[-1]
        lost = np.where(counted, -log_likelihoods, 0.0)
        return np.stack([by_sample(lost), by_sample(counted)], axis=-1)

    def metric(self, sums: Floats) -> Floats:
        """The perplexity; infinite if no float holds it."""
        return np.exp(sums[..., 0] / sums[..., 1])

    def doubts(self) -> tuple[str, ...]:
        """A warning if the perplexity is no better than that of guessing among the classes.

        Raises:
            UsageError: If no label counts.
        """
        check_some(int(self.sums[1]), "perplexity")
        if self.result() < self._classes:
            return ()
        return (
            (
                f"the fp32 model's perplexity of {self.result():.3g} is that of guessing among"
                f" {self._classes} classes: are the labels shifted, and the model's?"
            ),
        )


@final
class Divergence(MeanMetric):
    """Mean Kullback-Leibler divergence of the model's choices from the fp32 model's, in nats.

    The first output has logits along its last axis. At each position of a text the divergence
    is the sum of p (ln p - ln q) over the classes, with the fp32 model's chances p and the
    model's q. A text is one sample, so that certificates draw whole texts. Positions whose
    label is -100 do not count, where there are labels for positions.

    Source: S. Kullback, R. Leibler, "On information and sufficiency" (1951), section 2.
    """

    def __init__(self) -> None:
        super().__init__()
        self._chances = True  # whether all of fp32's numbers so far may be chances

    def absorb(self, later: SumMetric) -> None:
        """Take the batches of another one."""
        super().absorb(later)
        assert isinstance(later, Divergence)
        self._chances &= later._chances

    def terms(self, outputs: Outputs, labels: Labels, reference: Reference) -> Floats:
        """The divergence and the number of positions of each sample.

        Raises:
            UsageError: If the output is probabilities, or not of the fp32 model's shape.
        """
        from scipy.special import log_softmax

        name = next(iter(outputs))
        got, expected = (_logits(x, name, "kld") for x in pair(outputs, reference, "kld"))
        if got.ndim < 2 or got.shape[-1] < 2:
            raise UsageError(
                f"kld needs logits of several classes, output {name!r} has shape"
                f" {list(got.shape)}",
                where="--metric",
                fix="use --metric cosine or snr_db, or --eval",
            )
        self._chances &= bool(((expected >= 0) & (expected <= 1)).all())
        divergences = np.empty(got.shape[:-1])
        for row in range(len(got)):  # two arrays of chances at a time
            q, p = (log_softmax(x[row], axis=-1) for x in (got, expected))
            chances = np.exp(p)
            with np.errstate(invalid="ignore"):
                lost = np.where((chances == 0) & ~np.isnan(q), 0.0, chances * (p - q))
            divergences[row] = lost.sum(axis=-1)
        counted = is_counted(labels, divergences.shape)
        divergences = np.where(counted | np.isnan(divergences), divergences, 0.0)
        return np.stack([by_sample(divergences), by_sample(counted)], axis=-1)

    def doubts(self) -> tuple[str, ...]:
        """Warnings if there are few positions, or the numbers look like no logits.

        Raises:
            UsageError: If there is one.
        """
        warnings = few(int(self.sums[1]), "kld")
        if self._chances:
            warnings += (
                (
                    "kld reads the output as logits, and all of it is within 0 and 1, as"
                    " chances of a Sigmoid: it says little then; agreement compares classes"
                ),
            )
        return warnings


def _logits(scores: Array, output: str, metric: str) -> Floats:
    """Logits as fp64.

    Raises:
        UsageError: If they are chances already.
    """
    wide = widened(scores)
    if wide.size and (wide >= 0).all() and np.allclose(wide.sum(axis=-1), 1, atol=1e-4):
        raise UsageError(
            f"{metric} needs logits, output {output!r} is probabilities",
            where="--metric",
            fix="leave out the model's last Softmax, or use --eval",
        )
    return wide


# ------------------------------------------ metrics that compare with the fp32 model's outputs
#
# Where the reference is infinite (masked logits are often -inf), the difference is 0 if the
# model has the same infinity, and infinite otherwise.


@final
class Cosine(MeanMetric):
    """Mean over samples (first axis) of the cosine to the reference."""

    score_range = (-1.0, 1.0)

    def terms(self, outputs: Outputs, labels: Labels, reference: Reference) -> Floats:
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

    def terms(self, outputs: Outputs, labels: Labels, reference: Reference) -> Floats:
        """The power of signal and noise, and the number of elements, of each sample."""
        got, expected = pair(outputs, reference, "snr_db")
        signal = np.where(np.isfinite(expected), np.square(expected), 0.0)
        noise = np.square(difference(got, expected))
        parts = (signal, noise, np.ones_like(signal))
        return np.stack([by_sample(part) for part in parts], axis=-1)

    def metric(self, sums: Floats) -> Floats:
        """The ratio in dB; infinite if nothing differs."""
        signal, noise, count = np.moveaxis(sums, -1, 0)
        ratio_db = np.where(noise == 0, np.inf, 10 * np.log10(signal / noise))
        return np.where(count == 0, np.nan, ratio_db)

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

    def update(self, outputs: Outputs, labels: Labels, reference: Reference) -> None:
        """Take one batch."""
        got, expected = pair(outputs, reference, "max_abs")
        if not got.size:
            return
        self._take(float(np.abs(difference(got, expected)).max()))

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


def difference(got: NDArray[np.float64], expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """``got`` less ``expected``; 0 where both are the same infinity."""
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
    outputs: Outputs, reference: Reference, metric: str
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
    return widened(got), widened(expected)
