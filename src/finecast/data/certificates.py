"""How much accuracy a model may have lost on the population that its samples were drawn from.

A metric on a data set is an estimate: on other samples of the same kind the loss would be
another. A certificate bounds it from above, at a confidence.

Law: over data sets drawn anew, the bound lies below the true loss in at most 1 - confidence of
them, for one model that was chosen without these samples. Both methods reach it with many
samples; ``benchmarks/bench_certificates.py`` counts how often they miss it with few.

Sources: T. Tango, "Equivalence test and confidence interval for the difference in proportions
for the paired-sample design", Statistics in Medicine 17 (1998); B. Efron, "Better bootstrap
confidence intervals", JASA 82 (1987); for the order of tests A. Angelopoulos et al., "Learn
then test" (arXiv 2110.01052), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast.data.samples import Floats, Indices, Samples
from finecast.errors import UsageError

_DRAWS: Final = 2000
"""Draws of the bootstrap: the standard error of a 95% quantile's level is then 0.5%."""
_DRAWN_AT_ONCE: Final = 4 << 20
_POWER: Final = 0.8
_STEP: Final = 1e-9
_TYPICAL_DIFFERENCE: Final = 0.02
"""The share of samples on which two nearly equal models differ, before it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A bound on the loss of accuracy.

    Attributes:
        loss: The loss on the samples, in the metric's unit; negative for a gain.
        bound: The loss on the population is at most this; infinite where nothing bounds it.
        confidence: The share of data sets of which that is true.
        samples: The number of samples, or of clusters, that it rests on.
        method: How it was computed.
    """

    loss: float
    bound: float
    confidence: float
    samples: int
    method: str

    def to_dict(self) -> dict[str, Any]:
        """The certificate in JSON's types; None for a bound that is infinite."""
        return {**asdict(self), "bound": self.bound if math.isfinite(self.bound) else None}

    def __str__(self) -> str:
        """For example ``at most 0.0042 lost at 95% (2000 samples, paired score bound)``."""
        return (
            f"at most {self.bound:.3g} lost at {self.confidence:.4g} confidence"
            f" ({self.samples} samples, {self.method})"
        )


def certify(
    exact: Samples | None,
    low: Samples,
    *,
    higher_is_better: bool,
    confidence: float,
) -> Certificate:
    """The bound on the loss of ``low`` against ``exact``, on the same samples in one order.

    Decisions are bounded by Tango's score interval, other metrics by a paired bootstrap.

    Args:
        exact: The samples of the fp32 model; None for a metric that compares with it and has
            no finite best value, as snr_db: the loss is then the negated metric.
        low: The samples of the other model.
        higher_is_better: Which way the metric improves.
        confidence: Above 0.5 and below 1.

    Raises:
        UsageError: If the confidence is no such number, or the models have not the same
            number of samples.
    """
    check_confidence(confidence)
    if exact is not None and exact.count != low.count:
        raise UsageError(
            f"{exact.count} samples of the fp32 model beside {low.count} of the other: the"
            " outputs differ in number, so that no pairs can be made",
            fix="use --eval with a metric of your own",
        )
    sign = 1.0 if higher_is_better else -1.0

    def loss(of: Callable[[Samples], Floats]) -> Floats:
        return sign * ((0.0 if exact is None else of(exact)) - of(low))

    found = float(loss(lambda samples: np.array([samples.value()]))[0])
    right = (None if exact is None else exact.decisions()), low.decisions()
    if right[0] is not None and right[1] is not None and sign > 0:
        bound, method = score_bound(right[0], right[1], confidence), "paired score bound"
    else:
        bound, method = _bootstrap(loss, low.count, found, confidence), "paired bootstrap"
    return Certificate(
        loss=found, bound=bound, confidence=confidence, samples=low.count, method=method
    )


def check_confidence(confidence: float) -> None:
    """Refuse what is no confidence.

    Raises:
        UsageError: If it does not lie between 0.5 and 1.
    """
    if not 0.5 < confidence < 1:
        raise UsageError(
            f"{confidence:g} is no confidence", where="--confidence", fix="give 0.95"
        )


def score_bound(exact: NDArray[np.bool_], low: NDArray[np.bool_], confidence: float) -> float:
    """The upper bound of the share of right decisions lost, by Tango's score statistic.

    It is the largest loss that a one-sided test of the pairs does not reject. Without any pair
    that differs it is about z^2 / (n + z^2), with z the quantile of the confidence.
    """
    from scipy.optimize import brentq
    from scipy.special import ndtri

    count = len(exact)
    lost = int(np.count_nonzero(exact & ~low))
    won = int(np.count_nonzero(low & ~exact))
    limit = float(ndtri(confidence))

    def surplus(loss: float) -> float:
        """Positive while the test does not reject ``loss``."""
        b = (2 * count + won - lost) * loss - lost - won
        c = -won * loss * (1 - loss)
        share = (math.sqrt(max(b * b - 8 * count * c, 0.0)) - b) / (4 * count)
        variance = count * (2 * share + loss * (1 - loss))
        return limit * math.sqrt(max(variance, 0.0)) - (count * loss - (lost - won))

    if surplus(1.0) >= 0:
        return 1.0
    least = max((lost - won) / count, -1.0) + _STEP  # here the test does not reject
    found: Any = brentq(surplus, least, 1.0, xtol=_STEP)
    return float(found)


def _bootstrap(
    loss: Callable[[Callable[[Samples], Floats]], Floats],
    count: int,
    found: float,
    confidence: float,
) -> float:
    """The upper bound of a loss by the bias-corrected and accelerated bootstrap.

    Infinite for fewer than two samples, and where the loss is the same on all of them: how
    much is lost on samples that differ is then not known at all.

    Args:
        loss: The loss, from how the values of either model's samples are taken.
        count: The number of samples.
        found: The loss on the samples as they are.
        confidence: That of the bound.
    """
    from scipy.special import ndtr, ndtri

    if count < 2 or not math.isfinite(found):
        return math.inf
    values = np.sort(_in_parts(loss, count, _DRAWS, _drawn(count)))
    apart = _in_parts(
        loss, count, count, lambda rows: 1.0 - np.equal.outer(rows, np.arange(count))
    )
    apart = apart.mean() - apart
    spread = float((apart**2).sum())
    if not (np.isfinite(values).all() and math.isfinite(spread)) or spread == 0:
        return math.inf
    below = np.count_nonzero(values < found) + np.count_nonzero(values <= found)
    bias = float(ndtri(np.clip(below / 2, 0.5, len(values) - 0.5) / len(values)))
    skew = float((apart**3).sum()) / (6 * spread**1.5)
    reach = bias + float(ndtri(confidence))
    if skew * reach >= 1:
        return float(values[-1])
    return float(np.quantile(values, ndtr(bias + reach / (1 - skew * reach))))


def _drawn(count: int) -> Callable[[Indices], Floats]:
    """How many times each sample is drawn, of as many with replacement, in so many rows."""
    rng = np.random.default_rng(0)

    def times(rows: Indices) -> Floats:
        drawn = (
            rng.integers(count, size=(len(rows), count))
            + count * np.arange(len(rows))[:, None]
        )
        found = np.bincount(drawn.ravel(), minlength=len(rows) * count)
        return found.reshape(len(rows), count).astype(np.float64)

    return times


def _in_parts(
    loss: Callable[[Callable[[Samples], Floats]], Floats],
    count: int,
    rows: int,
    times: Callable[[Indices], Floats],
) -> Floats:
    """The losses of ``rows`` rows of ``times``, some at once, so that memory is bounded."""
    step = max(1, _DRAWN_AT_ONCE // count)
    parts = (times(np.arange(i, min(i + step, rows))) for i in range(0, rows, step))
    return np.concatenate(
        [loss(lambda samples, part=part: samples.values(part)) for part in parts]
    )


def samples_needed(
    loss: float, confidence: float, differing: float = _TYPICAL_DIFFERENCE
) -> int:
    """How many samples prove that no more than ``loss`` of the decisions is lost.

    It is the number with which a model that loses nothing is certified in 80% of data sets.

    Args:
        loss: The share of decisions that may be lost; above 0.
        confidence: That of the certificate.
        differing: The share of samples on which the two models differ.
    """
    return math.ceil(_spread(confidence) ** 2 * differing / loss**2)


def provable_loss(
    samples: int, confidence: float, differing: float = _TYPICAL_DIFFERENCE
) -> float:
    """The least loss of decisions that so many samples can prove, as ``samples_needed``."""
    return min(1.0, _spread(confidence) * math.sqrt(differing / samples))


def _spread(confidence: float) -> float:
    from scipy.special import ndtri

    return float(ndtri(confidence) + ndtri(_POWER))
