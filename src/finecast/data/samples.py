"""What a metric is computed from, sample by sample.

Law: the value of all samples, each taken once, is the metric. What the metric would be on
samples drawn anew from these is then known without the model, and certificates rest on that.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from finecast.engines.base import Array
from finecast.errors import UsageError
from finecast.numbers.rounding import widened

Outputs = Mapping[str, Array]
Labels = Array | None
Reference = Outputs | None
Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

SHARE: Final = (0.0, 1.0)
"""The range of scores whose mean is a share of decisions."""
UNKNOWN: Final = (-math.inf, math.inf)
"""The range of scores of which none is known."""
_ROUNDING: Final = 1e-9
"""Scores may lie outside of their range by this share of it; differences that are smaller
beside the largest one are none."""
_GROUPS: Final = 100
"""Groups of samples that are left out in turn: a deviation is then known to some 7%."""
LEAST_DIFFERENT: Final = 10
"""Groups in which two models have to differ, so that their difference is nearly normal."""


class Samples(ABC):
    """The samples of a metric, or clusters of samples that are drawn together."""

    @property
    @abstractmethod
    def count(self) -> int:
        """How many there are."""

    @abstractmethod
    def values(self, times: Floats) -> Floats:
        """The metric where each sample is taken so many times.

        Args:
            times: Whole numbers, of each sample in a row: shape [rows, samples].

        Returns:
            The metric of each row: shape [rows].
        """

    @abstractmethod
    def part(self, rows: Indices) -> Samples:
        """Some of the samples, by number."""

    @abstractmethod
    def grouped(self, group: Indices) -> Samples:
        """Clusters in place of samples; ``group`` has the number of each sample's cluster."""

    def value(self) -> float:
        """The metric of all samples."""
        return float(self.values(np.ones((1, self.count)))[0])

    def scores(self) -> Scores | None:
        """The scores of the samples, where the metric is their mean."""
        return None

    def with_range(self, least: float, most: float) -> Samples:
        """The same with scores that are known to lie between ``least`` and ``most``.

        Raises:
            UsageError: If the metric is no mean of scores, or one of them lies elsewhere.
        """
        raise UsageError(
            "the metric is no mean of scores of samples, and so has no range of them",
            where="--score-range",
            fix="leave it out",
        )

    def decisions(self) -> NDArray[np.bool_] | None:
        """Which samples are right, where each is one decision and the metric their share."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores of samples, whose mean by weight is a metric.

    Attributes:
        totals: The score of each sample times its weight.
        weights: The weight of each: how many decisions, tokens or elements it has.
        range: The least and the largest score that there is; infinite where that is unknown.
    """

    totals: Floats
    weights: Floats
    range: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedSamples(Samples):
    """Samples of a metric that is a function of sums over them.

    Attributes:
        terms: The terms of each sample, dense or sparse: shape [samples, sums].
        metric: The metric of sums, which lie along the last axis.
        score_range: The least and the largest score, where the metric is the first sum over
            the second: the mean of scores. None for any other metric.
    """

    terms: Any
    metric: Callable[[Floats], Floats]
    score_range: tuple[float, float] | None = None

    @property
    def count(self) -> int:
        """The rows of ``terms``."""
        return self.terms.shape[0]

    def values(self, times: Floats) -> Floats:
        """The metric of each row's sums."""
        with np.errstate(all="ignore"):
            return self.metric(times @ self.terms)

    def part(self, rows: Indices) -> SummedSamples:
        """The terms of these rows."""
        return replace(self, terms=self.terms[rows])

    def grouped(self, group: Indices) -> SummedSamples:
        """The terms of a cluster are the sums over it."""
        from scipy.sparse import csr_array

        members = csr_array((np.ones(self.count), (group, np.arange(self.count))))
        return replace(self, terms=members @ self.terms)

    def decisions(self) -> NDArray[np.bool_] | None:
        """The first term of each, where the second is 1."""
        right, counted = (self.terms[:, i] for i in range(2))
        single = self.score_range == SHARE and (counted == 1).all()
        return right == 1 if single and np.isin(right, (0, 1)).all() else None

    def scores(self) -> Scores | None:
        """The first two terms of each, where the metric is the ratio of their sums."""
        if self.score_range is None:
            return None
        totals, weights = (self.terms[:, i] for i in range(2))
        return Scores(totals=totals, weights=weights, range=self.score_range)

    def with_range(self, least: float, most: float) -> Samples:
        """The same with scores that are known to lie between ``least`` and ``most``.

        Raises:
            UsageError: If the metric is no mean of scores, or one of them lies elsewhere.
        """
        scores = self.scores()
        if scores is None:
            return super().with_range(least, most)
        rounding = _ROUNDING * (most - least) * scores.weights
        low, high = least * scores.weights - rounding, most * scores.weights + rounding
        outside = np.flatnonzero((scores.totals < low) | (scores.totals > high))
        if outside.size:
            score = scores.totals[outside[0]] / scores.weights[outside[0]]
            raise UsageError(
                f"sample {outside[0]} scores {score:.6g}, which is not in {least:g}:{most:g}",
                where="--score-range",
                fix="give the least and the largest score that a sample can have",
            )
        return replace(self, score_range=(least, most))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedSamples(Samples):
    """Pairs of numbers of which the metric is the correlation of ranks (Spearman's).

    Equal numbers have the mean of their ranks.

    Attributes:
        first: The first numbers; of a NaN among them the metric is NaN.
        second: The second numbers.
        group: The number of each pair's cluster; None where each is a sample.
    """

    first: Floats
    second: Floats
    group: Indices | None = None

    @property
    def count(self) -> int:
        """The clusters, or the pairs."""
        return len(self.first) if self.group is None else int(self.group.max()) + 1

    def values(self, times: Floats) -> Floats:
        """Pearson's correlation of the ranks among each row's pairs."""
        if np.isnan(self.first).any():
            return np.full(len(times), math.nan)
        times = times if self.group is None else times[:, self.group]
        whole = times.sum(axis=1, keepdims=True)
        a, b = (_ranks(x, times) - (whole + 1) / 2 for x in (self.first, self.second))
        with np.errstate(all="ignore"):
            spread = np.sqrt((times * a * a).sum(axis=1) * (times * b * b).sum(axis=1))
            return (times * a * b).sum(axis=1) / spread

    def part(self, rows: Indices) -> RankedSamples:
        """The pairs of these samples."""
        if self.group is None:
            return replace(self, first=self.first[rows], second=self.second[rows])
        chosen = np.isin(self.group, rows)
        place = np.full(self.count, -1)
        place[rows] = np.arange(len(rows))
        return RankedSamples(
            first=self.first[chosen],
            second=self.second[chosen],
            group=place[self.group[chosen]],
        )

    def grouped(self, group: Indices) -> RankedSamples:
        """The pairs, drawn by cluster."""
        return replace(self, group=group)


def _ranks(numbers: Floats, times: Floats) -> Floats:
    """The rank of each number where it occurs so many times: shape of ``times``."""
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order], prepend=math.nan) != 0)
    equal = np.add.reduceat(times[:, order], starts, axis=1)
    ranks = np.cumsum(equal, axis=1) - (equal - 1) / 2
    place = np.empty(len(numbers), dtype=np.intp)
    place[order] = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(numbers)))
    return ranks[:, place]


class SumMetric(ABC):
    """Computes a metric that is a function of sums over samples.

    It keeps the few numbers of each sample that are summed.
    """

    score_range: ClassVar[tuple[float, float] | None] = None

    def __init__(self) -> None:
        self._terms: list[Floats] = []

    @abstractmethod
    def terms(self, outputs: Outputs, labels: Labels, reference: Reference) -> Floats:
        """The terms of each sample of a batch: shape [samples, sums]. NaN stays NaN."""

    @abstractmethod
    def metric(self, sums: Floats) -> Floats:
        """The metric of sums, which lie along the last axis; NaN of no sample."""

    def update(self, outputs: Outputs, labels: Labels, reference: Reference) -> None:
        """Take one batch: the first of the outputs, labels, the fp32 model's outputs.

        Raises:
            UsageError: If the metric is not one of such outputs or labels.
        """
        self._terms.append(self.terms(outputs, labels, reference))

    def absorb(self, later: SumMetric) -> None:
        """Take the batches that another accumulator took, which come after these."""
        self._terms += later._terms

    @property
    def sums(self) -> Floats:
        """The sums over all samples so far; at least one batch was taken."""
        return np.sum([terms.sum(axis=0) for terms in self._terms], axis=0)

    def result(self) -> float:
        """The metric over all samples so far; NaN before the first."""
        if not self._terms:
            return math.nan
        with np.errstate(all="ignore"):
            return float(self.metric(self.sums))

    def samples(self) -> Samples:
        """The samples so far."""
        return SummedSamples(
            terms=np.concatenate(self._terms), metric=self.metric, score_range=self.score_range
        )


class MeanMetric(SumMetric):
    """The first sum over the second: the mean of scores, whose range is ``score_range``."""

    score_range = UNKNOWN

    def metric(self, sums: Floats) -> Floats:
        """The mean; NaN of nothing."""
        return ratio(sums)


def deviation_of_difference(first: Samples, second: Samples) -> float | None:
    """The standard error of the difference of two models' metrics on the same samples.

    By the jackknife: each of up to 100 groups of samples is left out in turn. Where ``first``
    has no finite metric, as fp32 beside itself in dB, the deviation is that of ``second``.
    Source: B. Efron and C. Stein, "The jackknife estimate of variance" (1981).

    Returns:
        None where too few groups differ to tell, or one of them alone makes the difference.
    """
    count = second.count
    if first.count != count or count < LEAST_DIFFERENT:
        return None
    groups = min(count, _GROUPS)
    members = np.arange(count) % groups
    left_out = 1.0 - np.eye(groups)
    differences = second.grouped(members).values(left_out)
    if math.isfinite(first.value()):
        differences = differences - first.grouped(members).values(left_out)
    if not np.isfinite(differences).all():
        return None
    off = np.abs(differences - np.median(differences))
    if np.count_nonzero(off > _ROUNDING * off.max()) < LEAST_DIFFERENT:
        return None
    return math.sqrt((groups - 1) * differences.var())


def ratio(sums: Floats) -> Floats:
    """The first sum over the second, along the last axis."""
    return sums[..., 0] / sums[..., 1]


def mean_samples(values: Floats) -> SummedSamples:
    """Samples of which the metric is the mean of a value of each; of 0 and 1 it is a share."""
    terms = np.stack([values, np.ones(len(values))], axis=-1)
    return SummedSamples(
        terms=terms,
        metric=ratio,
        score_range=SHARE if np.isin(values, (0, 1)).all() else UNKNOWN,
    )


def by_sample(array: Array) -> Floats:
    """The sum over all axes but the first; a number is one sample. Shape [samples]."""
    wide = widened(array)
    return wide.sum(axis=tuple(range(1, wide.ndim))) if wide.ndim else wide[None]
