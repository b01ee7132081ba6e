"""How much accuracy a model may have lost on the population that its samples were drawn from.

A metric on a data set is an estimate: on other samples of the same kind the loss would be
another. A certificate bounds it from above, at a confidence.

Law: over data sets drawn anew, the bound lies below the true loss in at most 1 - confidence of
them, for one model that was chosen without the samples that certify. That holds for every
number of samples and every distribution where the metric is a share of decisions, or the mean
of scores whose range is known. Any other metric has a bound under an assumption, which
``method`` states, and from ``LEAST_UNBOUNDED`` samples on alone.
``benchmarks/bench_certificates.py`` counts how often bounds are false.

Sources: for decisions R. Buehler, "Confidence intervals for the product of two binomial
parameters", JASA 52 (1957), and R. Berger, D. Boos, "P values maximized over a confidence set
for the nuisance parameter", JASA 89 (1994); for scores I. Waudby-Smith, A. Ramdas, "Estimating
means of bounded random variables by betting" (arXiv 2010.09686), section 4; for the order of
tests A. Angelopoulos et al., "Learn then test" (arXiv 2110.01052), section 3.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from finecast.data.samples import Floats, Indices, Samples, Scores
from finecast.errors import UsageError
from finecast.naming import percent

LEAST_UNBOUNDED: Final = 1200
"""Samples from which on a metric without a known range is certified: what harms .3% of the
samples is then among them in 97% of data sets."""
_WORSE: Final = 5.0
"""Without a known range no sample of the population is assumed to differ more than so many
times as much as the one of the data that differs most. With 2, bounds of lognormal losses of
sigma 3 are false in 4% of data sets of this size, with 5 in .1%."""
_BETS: Final = np.concatenate([np.geomspace(1e-3, 0.5, 20), np.linspace(0.6, 0.95, 8)])
"""The bets to choose from; with 1 a single loss of the whole range would leave no bound."""
_UNSEEN: Final = 0.5
"""Samples that lose the whole range, added to those seen: that none did says little."""
CAUTIOUS_BET: Final = 0.8
"""A bet by which needed samples are told: a little below the one where no sample seen differs,
as some do."""
_NUISANCE: Final = 0.01
"""The share of 1 - confidence that bounds how many decisions are won: larger shares cost
power, smaller ones time."""
_RATE_STEP: Final = 0.1
"""Distance of rates of decisions won that are tried, in standard deviations of half that."""
_TAIL: Final = 8
"""Standard deviations beyond which a binomial count is not summed: below 1e-13 is left out."""
_AT_ONCE: Final = 4 << 20
_POWER: Final = 0.8
_LATTICE: Final = 0.5
"""What counts in whole decisions adds to a bound, in decisions."""
_STEP: Final = 1e-9
TYPICAL_DIFFERENCE: Final = 0.02
"""The share of samples on which two nearly equal models differ, before it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A bound on the loss of accuracy.

    Attributes:
        loss: The loss on the samples, in the metric's unit; negative for a gain.
        bound: The loss on the population is at most this; infinite where nothing bounds it.
        confidence: The share of data sets of which that is true.
        samples: The number of samples, or of clusters, that it rests on.
        method: How it was computed, and what is assumed.
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
        """For example ``at most 0.02 lost at 95% confidence (400 samples, exact bound)``."""
        return (
            f"at most {self.bound:.3g} lost at {percent(self.confidence)} confidence"
            f" ({self.samples} samples, {self.method})"
        )


def certify(
    exact: Samples | None,
    low: Samples,
    held: Indices,
    *,
    higher_is_better: bool,
    confidence: float,
) -> Certificate:
    """The bound on the loss of ``low`` against ``exact``, on the same samples in one order.

    Args:
        exact: The samples of the fp32 model; None for a metric that compares with it and has
            no finite best value, as snr_db: the loss is then the negated metric.
        low: The samples of the other model.
        held: The samples that certify, by number: no plan was chosen by them. The others tune
            the bound.
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
    others = np.setdiff1d(np.arange(low.count), held)
    sign = 1.0 if higher_is_better else -1.0
    tuning, certifying = (
        _Losses(
            exact=None if exact is None else exact.part(rows), low=low.part(rows), sign=sign
        )
        for rows in (others, held)
    )
    if certifying.decisions is not None:
        bound = decision_bound(*certifying.decisions, len(held), confidence)
        method = "exact bound of decisions"
    else:
        bound, method = _betting(certifying, tuning, confidence)
    return Certificate(
        loss=certifying.value,
        bound=bound,
        confidence=confidence,
        samples=len(held),
        method=method,
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


def decision_bound(lost: int, won: int, count: int, confidence: float) -> float:
    """The upper bound of the share of right decisions lost, exact for every number of samples.

    It is Buehler's bound: the largest loss at which an outcome no worse than the one observed
    has a chance of at least 1 - confidence. Outcomes are ordered by their approximate bound
    ``lost - won + z sqrt(lost + won + z^2 / 4)``, with z the quantile of the confidence. The
    rate at which decisions are won is not known: the chance is the largest over a confidence
    interval of that rate (Berger and Boos). Without any pair that differs the bound is about
    -ln(1 - confidence) / count.

    Args:
        lost: Decisions that fp32 alone has right.
        won: Decisions that the other model alone has right.
        count: All decisions.
        confidence: Above 0.5 and below 1.
    """
    from scipy.optimize import brentq
    from scipy.special import bdtr, betaincinv, gammaln, ndtri, xlog1py, xlogy

    missed = 1 - confidence
    unsure = _NUISANCE * missed
    z = float(ndtri(confidence))
    least = float(betaincinv(won, count - won + 1, unsure / 2)) if won else 0.0
    most = float(betaincinv(won + 1, count - won, 1 - unsure / 2)) if won < count else 1.0
    ends = math.sqrt(count * least), math.sqrt(count * most)
    rates = np.linspace(*ends, 2 + int((ends[1] - ends[0]) / _RATE_STEP)) ** 2 / count
    rate = rates[:, None]
    below, above = (_TAIL * (math.sqrt(count * share) + 2) for share in (least, most))
    wins = np.arange(
        max(0, math.floor(count * least - below)),
        min(count, math.ceil(count * most + above)) + 1,
    )
    # The most losses beside so many wins that are no worse than what was observed: those with
    # lost + z sqrt(lost + wins + z^2 / 4) <= rest, a quadratic in the root.
    rest = lost - won + z * math.sqrt(lost + won + z * z / 4) + wins
    squared = z * z + 4 * (rest + wins + z * z / 4)
    root = (np.sqrt(np.maximum(squared, 0.0)) - z) / 2
    losses = np.floor(root * root - wins - z * z / 4 + _STEP)
    losses = np.where(root < 0, -1, np.minimum(losses, count - wins)).astype(np.int64)
    chances = np.exp(
        gammaln(count + 1)
        - gammaln(wins + 1)
        - gammaln(count - wins + 1)
        + xlogy(wins, rate)
        + xlog1py(count - wins, -rate)
    )

    def surplus(loss: float) -> float:
        """Positive while what was observed, or better, is likely enough at this ``loss``."""
        losing = np.minimum((loss + rate) / np.maximum(1 - rate, _STEP), 1.0)
        no_worse = np.where(losses < 0, 0.0, bdtr(np.maximum(losses, 0), count - wins, losing))
        return float((chances * no_worse).sum(axis=1).max()) + unsure - missed

    low = max((lost - won) / count, 0.0)
    if surplus(1.0) >= 0:
        return 1.0
    bound: Any = brentq(surplus, low, 1.0, xtol=_STEP) if surplus(low) > 0 else low
    return float(bound)


@dataclass(frozen=True, kw_only=True)
class _Losses:
    """What one model loses against another on the same samples.

    Attributes:
        exact: The samples of the fp32 model; None where the loss is the negated metric.
        low: The samples of the other model.
        sign: 1 where more of the metric is better, else -1.
    """

    exact: Samples | None
    low: Samples
    sign: float

    @cached_property
    def value(self) -> float:
        return float(self._values(np.ones((1, self.low.count)))[0])

    def _values(self, times: Floats) -> Floats:
        """The loss where each sample is taken so many times, by rows of ``times``."""
        exact = 0.0 if self.exact is None else self.exact.values(times)
        return self.sign * (exact - self.low.values(times))

    @property
    def decisions(self) -> tuple[int, int] | None:
        """How many decisions were lost and won; None if samples are not single decisions."""
        exact = None if self.exact is None else self.exact.decisions()
        low = self.low.decisions()
        if exact is None or low is None:
            return None
        lost, won = (int(np.count_nonzero(one)) for one in (exact & ~low, low & ~exact))
        return (lost, won) if self.sign > 0 else (won, lost)

    @property
    def _scores(self) -> tuple[Scores, Scores] | None:
        """The scores of both models; None where samples have none, or other weights."""
        exact, low = None if self.exact is None else self.exact.scores(), self.low.scores()
        if exact is None or low is None or exact.range != low.range:
            return None
        return (exact, low) if np.array_equal(exact.weights, low.weights) else None

    @property
    def range(self) -> float:
        """How much the score of a sample may differ between models; infinite if unknown."""
        scores = self._scores
        return math.inf if scores is None else scores[0].range[1] - scores[0].range[0]

    def terms(self, centre: float) -> tuple[Floats, Floats]:
        """Terms and weights of samples: the loss is ``centre`` and the ratio of their sums.

        Terms of a mean are differences of scores. Those of any other metric are jackknife
        pseudo-values, whose mean is the loss up to the square of one sample's influence.
        """
        if self._scores is not None:
            exact, low = self._scores
            return self.sign * (exact.totals - low.totals) - centre * low.weights, low.weights
        count = self.low.count
        each, step = np.arange(count), max(1, _AT_ONCE // count)
        apart = [
            self._values(1.0 - np.equal.outer(each[i : i + step], each))
            for i in range(0, count, step)
        ]
        pseudo = count * self.value - (count - 1) * np.concatenate(apart)
        return pseudo - centre, np.ones(count)


def _betting(certifying: _Losses, tuning: _Losses, confidence: float) -> tuple[float, str]:
    """The upper bound of a loss by betting against it, and how it was computed.

    A gambler bets at each sample that the population loses less than L. If it loses L or
    more, the capital grows to 1 / (1 - confidence) with a chance of at most 1 - confidence
    (Markov's inequality), whatever the distribution; the bound is the least L at which it does
    grow that far. The bet is the one that would have bounded the samples that tune best.

    Infinite where the range of scores is not known and samples are few, or none differs.
    """
    from scipy.optimize import brentq

    known = certifying.range
    centre = 0.0 if math.isfinite(known) else tuning.value
    if not (math.isfinite(certifying.value) and math.isfinite(centre)):
        return math.inf, "no finite loss"
    losses, weights = certifying.terms(centre)
    others, other_weights = tuning.terms(centre)
    count = len(losses) + len(others)
    if math.isfinite(known):
        reach = known * float(max(weights.max(), other_weights.max()))
        method = f"betting bound of scores in a range of {known:.3g}"
    else:
        reach = _WORSE * float(np.abs(np.concatenate([losses, others])).max())
        method = (
            f"betting bound, if no sample differs over {_WORSE:g} times as much as the worst"
            " of yours"
        )
        if count < LEAST_UNBOUNDED:
            return math.inf, "the range of scores is not known"
    if not 0 < reach < math.inf:
        return math.inf, "no sample differs"
    needed = -math.log1p(-confidence)
    bet = _bet(others / reach, len(losses), needed) / reach

    def surplus(loss: float) -> float:
        """Positive where the capital of the bet against ``loss`` is large enough."""
        gains = 1 + bet * (loss * weights - losses)
        return float(np.log(np.maximum(gains, np.finfo(float).tiny)).sum()) - needed

    low = float(losses.sum() / weights.sum())  # by Jensen's inequality the capital shrinks
    high = low + reach / float(weights.mean())
    while surplus(high) < 0:
        high += high - low
    bound: Any = brentq(surplus, low, high, xtol=_STEP * reach)
    return min(centre + float(bound), known), method


def _bet(shares: Floats, count: int, needed: float) -> float:
    """The bet that gives ``count`` samples the least bound, if they are as those seen.

    Args:
        shares: What each sample seen loses, of the most that one can lose.
        count: How many samples certify.
        needed: The logarithm of the capital that is needed.
    """
    lost = np.array([np.log1p(-bet * shares).sum() for bet in _BETS])
    lost += _UNSEEN * np.log1p(-_BETS)
    return float(_BETS[np.argmin((needed - lost * count / len(shares)) / _BETS)])


def samples_needed(loss: float, confidence: float, differing: float) -> int:
    """How many samples prove that no more than ``loss`` of the decisions is lost.

    It is the number with which a model that loses nothing is certified in 80% of data sets.

    Args:
        loss: The share of decisions that may be lost; above 0.
        confidence: That of the certificate.
        differing: The share of samples on which the two models differ.
    """
    spread = _spread(confidence) * math.sqrt(differing)
    root = (spread + math.sqrt(spread**2 + 4 * loss * _LATTICE)) / (2 * loss)
    return math.ceil(max(root**2, -math.log1p(-confidence) / loss))


def provable_loss(samples: int, confidence: float, differing: float) -> float:
    """The least loss of decisions that so many samples can prove, as ``samples_needed``."""
    by_chance = _spread(confidence) * math.sqrt(differing * samples) + _LATTICE
    return min(1.0, max(by_chance, -math.log1p(-confidence)) / samples)


def _spread(confidence: float) -> float:
    from scipy.special import ndtri

    return float(ndtri(confidence) + ndtri(_POWER))
