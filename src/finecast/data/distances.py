"""Metrics of distance: from labels (errors, perplexity), from the fp32 model's chances."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import numpy as np
from numpy.typing import NDArray

from finecast.data.comparison import pair
from finecast.data.labels import IGNORED, check_numbers, class_labels, few, is_counted, numbers
from finecast.data.samples import Floats, MeanMetric, Outputs, SumMetric, by_sample
from finecast.engines.base import Array
from finecast.errors import UsageError


@final
class MeanError(MeanMetric):
    """Mean of ``of(error)`` over all elements; the error is the first output less labels."""

    def __init__(
        self, name: str, of: Callable[[NDArray[np.float64]], NDArray[np.float64]]
    ) -> None:
        super().__init__()
        self._name = name
        self._of = of

    def terms(
        self, outputs: Outputs, labels: Array | None, reference: Outputs | None
    ) -> Floats:
        """The error and the number of elements of each sample.

        Raises:
            UsageError: If there are no labels, not one for each output element, or one is not
                a finite number.
        """
        name, got = next(iter(outputs.items()))
        check_numbers(got, name, self._name)
        wanted = numbers(labels, self._name)
        if wanted.size != got.size:
            raise UsageError(
                f"labels of shape {list(wanted.shape)} do not fit output {name!r} "
                f"of shape {list(got.shape)}",
                fix=f"give labels of shape {list(got.shape)}",
            )
        error = got.astype(np.float64) - wanted.reshape(got.shape)
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

    def terms(
        self, outputs: Outputs, labels: Array | None, reference: Outputs | None
    ) -> Floats:
        """The negative log-likelihood and the number of the labels of each sample.

        Raises:
            UsageError: If the labels do not fit, or the output is probabilities.
        """
        from scipy.special import log_softmax

        name, scores = next(iter(outputs.items()))
        given = class_labels(labels, scores, output=name, metric="perplexity")
        counted = given != IGNORED
        chosen = np.where(counted, given, 0)[..., None]
        logs = log_softmax(_logits(scores, name, "perplexity"), axis=-1)
        found = np.take_along_axis(logs, chosen, axis=-1)[..., 0]
        self._classes = scores.shape[-1]
        lost = np.where(counted, -found, 0.0)
        return np.stack([by_sample(lost), by_sample(counted)], axis=-1)

    def metric(self, sums: Floats) -> Floats:
        """The perplexity; infinite if no float holds it."""
        return np.exp(sums[..., 0] / sums[..., 1])

    def doubts(self) -> tuple[str, ...]:
        """A warning if the perplexity is no better than that of guessing among the classes."""
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

    def terms(
        self, outputs: Outputs, labels: Array | None, reference: Outputs | None
    ) -> Floats:
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
        found = np.empty(got.shape[:-1])
        for row in range(len(got)):  # two arrays of chances at a time
            q, p = (log_softmax(x[row], axis=-1) for x in (got, expected))
            chances = np.exp(p)
            with np.errstate(invalid="ignore"):
                lost = np.where((chances == 0) & ~np.isnan(q), 0.0, chances * (p - q))
            found[row] = lost.sum(axis=-1)
        counted = is_counted(labels, found.shape)
        found = np.where(counted | np.isnan(found), found, 0.0)
        return np.stack([by_sample(found), by_sample(counted)], axis=-1)

    def doubts(self) -> tuple[str, ...]:
        """Warnings if there are few positions.

        Raises:
            UsageError: If there is one.
        """
        return few(int(self.sums[1]), "kld")


def _logits(scores: Array, output: str, metric: str) -> Floats:
    """Logits as fp64.

    Raises:
        UsageError: If they are chances already.
    """
    wide = scores.astype(np.float64)
    if wide.size and (wide >= 0).all() and np.allclose(wide.sum(axis=-1), 1, atol=1e-4):
        raise UsageError(
            f"{metric} needs logits, output {output!r} is probabilities",
            where="--metric",
            fix="leave out the model's last Softmax, or use --eval",
        )
    return wide
