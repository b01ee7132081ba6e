"""Metrics of decisions and ranks: top-k, F1, agreement with fp32, rank correlation."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from typing import Any, Final, final

import numpy as np

from finecast.data.distances import counterpart, difference
from finecast.data.labels import (
    IGNORED,
    check_numbers,
    class_labels,
    decided_labels,
    few,
    has_rows,
    is_counted,
    is_one_hot,
    numbers,
)
from finecast.data.samples import (
    SHARE,
    Floats,
    Indices,
    Labels,
    MeanMetric,
    Outputs,
    RankedSamples,
    Reference,
    Samples,
    SummedSamples,
    SumMetric,
    by_sample,
)
from finecast.engines.base import Array
from finecast.errors import UsageError
from finecast.numbers.rounding import widened

_GUESSING_ERRORS: Final = 2.0
"""A result within so many standard errors of that of guessing is taken for guessing."""
NEAR: Final = 0.02
"""Numbers that decide nothing agree within this relative error: five steps of codes of 8 bits
that span them. A box near pixel 300 may be off by 6."""


# Decisions whose margins are kept: of more of them a count tells as much.
_MOST_MARGINS: Final = 1 << 20


class _Share(MeanMetric):
    """The right decisions over all decisions; each is of one sample."""

    score_range = SHARE

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[Any] = set()  # the first decisions of the fp32 model that differ
        self._margins: list[Floats] = []
        self._without_margin = False

    def absorb(self, later: SumMetric) -> None:
        """Take the batches of another one."""
        super().absorb(later)
        assert isinstance(later, _Share)
        self._seen |= later._seen
        self._margins += later._margins
        self._without_margin |= later._without_margin

    def margins(self) -> Floats | None:
        """The margin of each decision: the right class' score less the largest other one.

        None where decisions have none, or are too many to be kept.
        """
        count = sum(map(len, self._margins))
        if self._without_margin or not 0 < count <= _MOST_MARGINS:
            return None
        return np.concatenate(self._margins)

    def _keep_margins(self, scores: Array, right: Array, counted: Array) -> None:
        """Keep the margins of decisions, where ``scores`` lie along the last axis."""
        few = scores.ndim == 0 or scores.shape[-1] < 2
        if scores.dtype.kind in "biuOSU" or few or self._without_margin:
            self._without_margin, self._margins = True, []
            return
        margins = ahead(scores, np.where(counted, right, 0).astype(np.intp))
        self._margins.append(margins[np.broadcast_to(counted.astype(bool), margins.shape)])

    def _see(self, decided: Array) -> None:
        if len(self._seen) < 2:
            self._seen.update(np.unique(decided)[:2].tolist())

    def _alike(self, what: str) -> tuple[str, ...]:
        """A warning, of which ``what`` is the end, if all decisions are the same."""
        told = f"the fp32 model decides alike on all of the data: {what}"
        return (told,) if len(self._seen) == 1 else ()

    @property
    def _count(self) -> int:
        return int(self.sums[1])

    @staticmethod
    def _terms_of(right: Array, counted: Array, nan: bool) -> Floats:
        """Right decisions and all decisions of each sample; of NaN no decision is right."""
        terms = np.stack(
            [by_sample(np.logical_and(right, counted)), by_sample(counted)], axis=-1
        )
        return terms + np.array([np.nan, 0.0]) if nan else terms


@final
class TopK(_Share):
    """Share of decisions whose label is among the ``k`` largest scores of the first output.

    Scores lie along the last axis; labels are class numbers of the shape of the other axes, or
    one-hot. An output of integers or text with a label for each element is taken as
    decisions already made (for ``k`` = 1).
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self._k = k
        self._classes = 0
        self._given: Counter[int] = Counter()  # how often each class is a label

    def terms(self, outputs: Outputs, labels: Labels, reference: Reference) -> Floats:
        """Right decisions and all decisions of each sample.

        Raises:
            UsageError: If there are no labels, they do not fit the scores, or one is no class
                of the model.
        """
        name, scores = _first(outputs)
        if _decided(scores, labels) and self._k == 1:
            given = decided_labels(labels, scores, metric=self._name)
            hits = np.asarray(scores == given)
            self._see(scores)
            return self._terms_of(hits, is_counted(given, hits.shape), nan=False)
        given = class_labels(labels, scores, output=name, metric=self._name)
        self._classes = scores.shape[-1]
        counts = np.bincount(given[given != IGNORED])
        named = counts.nonzero()[0]  # a vocabulary has far more classes than a batch names
        self._given.update(dict(zip(named.tolist(), counts[named].tolist(), strict=True)))
        top = _top(scores, self._k)
        self._see(top[..., 0])
        if self._k == 1:
            self._keep_margins(scores, given, given != IGNORED)
        hits = (top == given[..., None]).any(axis=-1)
        return self._terms_of(hits, given != IGNORED, nan=has_nan(scores))

    def absorb(self, later: SumMetric) -> None:
        """Take the batches of another one."""
        super().absorb(later)
        assert isinstance(later, TopK)
        self._given.update(later._given)

    @property
    def _name(self) -> str:
        return f"top{self._k}"

    def doubts(self) -> tuple[str, ...]:
        """Warnings if there are few decisions, all are the same, or they are right by chance.

        Raises:
            UsageError: If there is one decision, or any is right: there are ``k`` classes.
        """
        if 0 < self._classes <= self._k:
            raise UsageError(
                f"{self._name} of {self._classes} classes is right whatever the model says",
                where="--metric",
                fix="use top1",
            )
        warnings = few(self._count, self._name)
        warnings += self._alike(f"another model that does so has the same {self._name}")
        chance = self._k / self._classes if self._classes else 0.0
        if chance and self.result() <= chance + _deviation(chance, self._count):
            warnings += (
                (
                    f"the fp32 model's {self._name} of {self.result():.3g} is at the level of"
                    f" guessing among {self._classes} classes: are the labels the model's?"
                ),
            )
            return warnings
        named = sum(count for _, count in self._given.most_common(self._k))
        share = named / max(self._given.total(), 1)
        chance = share + _deviation(share, self._count)
        if named and len(self._seen) > 1 and self.result() <= chance:
            warnings += (
                (
                    f"the fp32 model's {self._name} is {self.result():.3g}, and always to name"
                    f" the commonest labels gives {share:.3g}: the data hardly tell a right"
                    " model from a wrong one; check model and labels"
                ),
            )
        return warnings


@final
class F1:
    """F1 of each class, averaged over the classes that occur (macro average).

    Labels and decisions are as for top1.
    """

    def __init__(self) -> None:
        self._sample: list[Indices] = []
        self._decided: list[Array] = []
        self._labelled: list[Array] = []
        self._count = 0
        self._nan = False

    def update(self, outputs: Outputs, labels: Labels, reference: Reference) -> None:
        """Take one batch.

        Raises:
            UsageError: As for top1.
        """
        name, scores = _first(outputs)
        if _decided(scores, labels):
            decided, given = scores, decided_labels(labels, scores, metric="f1")
            counted = is_counted(given, given.shape)
        else:
            given = class_labels(labels, scores, output=name, metric="f1")
            self._nan = self._nan or has_nan(scores)
            counted = given != IGNORED
            decided = _top(scores, 1)[..., 0]
        samples = len(given) if given.ndim else 1
        sample = np.arange(samples).reshape(-1, *[1] * max(given.ndim - 1, 0))
        self._sample.append(self._count + np.broadcast_to(sample, given.shape)[counted])
        self._decided.append(decided[counted])
        self._labelled.append(given[counted])
        self._count += samples

    def absorb(self, later: F1) -> None:
        """Take the batches of another one, whose samples have the numbers after these."""
        self._sample += [number + self._count for number in later._sample]
        self._decided += later._decided
        self._labelled += later._labelled
        self._count += later._count
        self._nan = self._nan or later._nan

    def result(self) -> float:
        """2 right / (decided + labelled), averaged over classes."""
        return self.samples().value() if self._count else math.nan

    def samples(self) -> Samples:
        """Right decisions, decisions and labels of each class, by sample."""
        from scipy.sparse import csr_array

        sample = np.concatenate(self._sample)
        both = np.concatenate([*self._decided, *self._labelled])
        names, codes = np.unique(both, return_inverse=True)
        decided, labelled = np.split(codes.reshape(-1), 2)
        right = decided == labelled
        columns = (decided[right], len(names) + decided, 2 * len(names) + labelled)
        at = np.concatenate([sample[right], sample, sample]), np.concatenate(columns)
        terms = csr_array(
            (np.full(len(at[0]), math.nan if self._nan else 1.0), at),
            shape=(self._count, 3 * len(names)),
        )
        return SummedSamples(terms=terms, metric=_macro_f1)

    def doubts(self) -> tuple[str, ...]:
        """Warnings if there are few decisions, or all labels are one class.

        Raises:
            UsageError: If there is one decision.
        """
        labels = np.concatenate(self._labelled)
        warnings = few(labels.size, "f1")
        one = len(np.unique(labels)) == 1
        return (
            *warnings,
            *(("f1 where all labels are one class says little",) if one else ()),
        )


class _Agreement(_Share):
    """Share of rows in which the first output agrees with the fp32 model's.

    Rows whose label is -100 do not count, where there are labels for rows. Where an output has
    another shape than fp32's, none of its rows agrees.
    """

    @abstractmethod
    def agrees(self, got: Array, expected: Array, name: str) -> tuple[Array, Array | None]:
        """Which rows of two arrays of one shape agree, and what fp32 decides in each.

        None where rows are no decisions.
        """

    def terms(self, outputs: Outputs, labels: Labels, reference: Reference) -> Floats:
        """Rows that agree and all rows of each sample.

        Raises:
            UsageError: If there is no reference, or the output holds no rows.
        """
        if reference is None:
            raise UsageError("agreement needs the fp32 model's outputs")
        name, got = _first(outputs)
        expected = counterpart(reference, name)
        fits = got.shape == expected.shape
        same, decided = self.agrees(got if fits else expected, expected, name)
        same = np.logical_and(same, fits)
        counted = is_counted(labels, same.shape)
        if decided is None or not fits:
            self._without_margin = True
        else:
            self._keep_margins(got, decided, counted)
        nan = has_nan(got) or has_nan(expected)
        return self._terms_of(same, counted, nan)

    def doubts(self) -> tuple[str, ...]:
        """Warnings if there are few decisions, or all of fp32's are the same.

        Raises:
            UsageError: If there is one decision.
        """
        warnings = few(self._count, "agreement")
        return (*warnings, *self._alike("to agree with it says little"))


@final
class Agreement(_Agreement):
    """Share of decisions (largest score of the first output) equal to the fp32 model's.

    Of a decoder it is the share of tokens that both would choose, where both read the same
    text. Of an output whose length depends on numbers it is pairs of rows over pairs and rows
    without a partner, of either model.
    """

    def agrees(self, got: Array, expected: Array, name: str) -> tuple[Array, Array | None]:
        """Where the largest score is of the same class.

        Raises:
            UsageError: If the output holds no scores.
        """
        decided = _decisions(expected, name)
        self._see(decided)
        return np.asarray(_decisions(got, name) == decided), decided


@final
class NearRows(_Agreement):
    """Share of rows, along the last axis, whose relative error is at most ``NEAR``.

    It is the agreement of numbers that are no scores, as the coordinates of boxes.
    """

    def agrees(self, got: Array, expected: Array, name: str) -> tuple[Array, Array | None]:
        """Where ||y - r|| is at most that share of ||r||."""
        y, r = (widened(array) for array in (got, expected))
        size = np.linalg.norm(np.where(np.isfinite(r), r, 0.0), axis=-1)
        return np.asarray(np.linalg.norm(difference(y, r), axis=-1) <= NEAR * size), None


@final
class SameRows(_Agreement):
    """Share of rows, along the last axis, all of whose numbers equal the fp32 model's.

    It is the agreement of decisions that floats hold, as the numbers of classes.
    """

    def agrees(self, got: Array, expected: Array, name: str) -> tuple[Array, Array | None]:
        """Where no number differs."""
        return np.asarray((got == expected).all(axis=-1)), None


@final
class Spearman:
    """Rank correlation of each sample's first output scalar with its label."""

    def __init__(self) -> None:
        self._values: list[Floats] = []
        self._labels: list[Floats] = []

    def update(self, outputs: Outputs, labels: Labels, reference: Reference) -> None:
        """Take one batch.

        Raises:
            UsageError: If there are no labels, not one per sample, or one is not a number.
        """
        name, scores = _first(outputs)
        check_numbers(scores, name, "spearman")
        given = numbers(labels, "spearman")
        values = scores.reshape(len(scores), -1)[:, 0] if scores.ndim else scores[None]
        if given.size != len(values):
            raise UsageError(
                f"{given.size} labels for {len(values)} samples of output {name!r}",
                fix="give one number per sample",
            )
        self._values.append(widened(values))
        self._labels.append(given.reshape(-1))

    def absorb(self, later: Spearman) -> None:
        """Take the batches of another one."""
        self._values += later._values
        self._labels += later._labels

    def result(self) -> float:
        """Spearman's rho; NaN where all values or all labels are equal."""
        return self.samples().value() if self._values else math.nan

    def samples(self) -> Samples:
        """The values with their labels."""
        values, labels = np.concatenate(self._values), np.concatenate(self._labels)
        return RankedSamples(first=values, second=labels)

    def doubts(self) -> tuple[str, ...]:
        """Warnings if there are few samples, or the correlation is that of random numbers.

        Raises:
            UsageError: If there are fewer than three samples.
        """
        count = sum(len(v) for v in self._values)
        warnings = few(count, "spearman", least=3)
        # Of unrelated numbers rho has a standard error of 1 / sqrt(n - 1).
        if abs(self.result()) <= _GUESSING_ERRORS / math.sqrt(max(count - 1, 1)):
            warnings += (
                (
                    f"the fp32 model's spearman of {self.result():.3g} is that of unrelated"
                    " numbers: are the labels the model's?"
                ),
            )
        return warnings


def ahead(scores: Array, classes: Indices) -> Floats:
    """The score of a class less the largest other one; scores lie along the last axis."""
    wide = scores.astype(np.result_type(scores.dtype, np.float32))
    own = np.take_along_axis(wide, classes[..., None], axis=-1)
    best = wide.argmax(axis=-1)[..., None]
    first = np.take_along_axis(wide, best, axis=-1)
    np.put_along_axis(wide, best, -np.inf, axis=-1)
    other = np.where(own == first, wide.max(axis=-1, keepdims=True), first)
    with np.errstate(invalid="ignore"):  # Inf less Inf is no margin
        margins: Floats = (widened(own) - other)[..., 0]
    return margins


def margins_of(metric: object) -> Floats | None:
    """The margins of the decisions that a metric is the share of; None of another metric."""
    return metric.margins() if isinstance(metric, _Share) else None


def _macro_f1(sums: Floats) -> Floats:
    """The mean over classes of 2 right / (decided + labelled); of sums of each, in a row."""
    right, decided, labelled = np.split(sums, 3, axis=-1)
    occurs = decided + labelled != 0  # NaN, too
    each = np.where(occurs, 2 * right / (decided + labelled), 0.0)
    return each.sum(axis=-1) / occurs.sum(axis=-1)


def has_nan(array: Array) -> bool:
    """Whether an array holds a NaN; of any float type, ml_dtypes' too."""
    return array.dtype.kind not in "biuOSU" and bool(np.isnan(array.astype(np.float32)).any())


def _deviation(share: float, count: int) -> float:
    """Two standard errors of the share of right guesses, if it is ``share`` on average."""
    return _GUESSING_ERRORS * math.sqrt(share * (1 - share) / max(count, 1))


def _first(outputs: Outputs) -> tuple[str, Array]:
    return next(iter(outputs.items()))


def _decided(scores: Array, labels: Labels) -> bool:
    """Whether the output is decisions (integers or text), one for each label, not scores."""
    if scores.dtype.kind not in "biuOSU" or labels is None:
        return False
    # Integers other than 0 and 1 beside rows that mark one class each are quantized scores.
    same, whole = scores.shape == labels.shape, scores.dtype.kind in "iu"
    if same and whole and is_one_hot(labels) and not np.isin(scores, (0, 1)).all():
        return False
    return scores.size == labels.size or has_rows(labels, scores.shape)


def _top(scores: Array, k: int) -> Array:
    wide = scores.astype(np.float32)
    if k == 1:
        return wide.argmax(axis=-1)[..., None]
    # A stable sort gives ties to the lower class, as argmax does.
    return np.argsort(-wide, axis=-1, kind="stable")[..., :k]


def _decisions(scores: Array, name: str) -> Array:
    if scores.dtype.kind in "biuOSU":
        return scores
    if scores.ndim == 0 or scores.shape[-1] < 2 or scores.ndim < 2:
        raise UsageError(
            f"output {name!r} of shape {list(scores.shape)} holds no scores per class",
            fix="use --metric cosine or snr_db, or --eval",
        )
    return scores.astype(np.float32).argmax(axis=-1)
