"""The built-in metrics, listed in ``METRICS``; each is an accumulator that takes batches.

Laws: memory grows by a few numbers per sample, of which a certificate is computed; one NaN in
the outputs makes the result NaN, which passes no criterion; a model compared with itself
scores the metric's ``ideal``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Protocol, Self

import numpy as np

from finecast.data.decisions import (
    F1,
    Agreement,
    NearRows,
    SameRows,
    Spearman,
    TopK,
    margins_of,
)
from finecast.data.distances import (
    Cosine,
    Divergence,
    MaxAbs,
    MeanError,
    Perplexity,
    SignalToNoise,
    counterpart,
)
from finecast.data.labels import is_one_hot
from finecast.data.margins import Margins
from finecast.data.samples import (
    LEAST_DIFFERENT,
    Floats,
    Labels,
    Outputs,
    Reference,
    Samples,
    deviation_of_difference,
)
from finecast.engines.base import Array
from finecast.naming import look_up
from finecast.planning.free_rows import FreeOutput, matched
from finecast.planning.slices import WHOLE, Slice


class Accumulator(Protocol):
    """Computes a metric over batches."""

    def update(self, outputs: Outputs, labels: Labels, reference: Reference) -> None:
        """Take one batch: the first of the outputs, labels, the fp32 model's outputs."""
        ...

    def absorb(self, later: Any) -> None:
        """Take the batches that another one took, which come after these."""
        ...

    def result(self) -> float:
        """The metric over all batches so far; NaN before the first."""
        ...

    def samples(self) -> Samples | None:
        """What the result was computed from, by sample; None where that says nothing."""
        ...

    def doubts(self) -> tuple[str, ...]:
        """Warnings if the fp32 model's result over the batches so far means little.

        Raises:
            UsageError: If it means nothing.
        """
        ...


class Reads(Enum):
    """Which numbers of an output a metric is of, where slices have units of their own."""

    NUMBERS = "the numbers of each slice, and the worst slice counts"
    SCORES = "the scores of classes, and not the numbers beside them"
    ALL = "all together"
    FIRST = "the first of each sample"


class Held(Enum):
    """What the numbers of an output or a slice are to a metric of scores."""

    SCORES = "scores of classes, of which the largest decides"
    CLASSES = "class numbers, which are decisions already"
    NUMBERS = "numbers that decide nothing, as coordinates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What a metric needs and how its score is read.

    ``start`` makes its accumulator, which is of one output. ``ideal`` is the score of the fp32
    model against itself, if the metric compares with that model; None if the baseline has to
    be measured. ``worst`` is the worst possible score; None if there is no bound. ``of_rows``
    says that of an output of free length it is which rows are there, and not their numbers.
    ``of_classes`` says that labels are the numbers of classes. Of a metric of scores
    ``beside`` makes the accumulators of what lies beside them, as boxes and class numbers;
    what it lacks is left to the error of the output. A small loss grows with the ``order``-th
    power of the output's error.
    """

    name: str
    start: Callable[[], Accumulator]
    reads: Reads
    needs_labels: bool = False
    needs_reference: bool = False
    higher_is_better: bool = True
    ideal: float | None = None
    worst: float | None = None
    of_rows: bool = False
    of_classes: bool = False
    beside: Mapping[Held, Callable[[], Accumulator]] = field(
        default_factory=dict[Held, Callable[[], Accumulator]]
    )
    order: int = 1

    @property
    def each_output(self) -> bool:
        """Whether every output is judged by itself, if the user names none; else the first."""
        return self.reads is Reads.NUMBERS

    def start_of(self, scored: Scored) -> Accumulator:
        """The accumulator of an output or a slice of one."""
        return self.beside.get(scored.held, self.start)()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its name."""
        return get_metric, (self.name,)


_of_classes = partial(Metric, reads=Reads.SCORES, needs_labels=True, of_classes=True)
_of_errors = partial(Metric, reads=Reads.ALL, needs_labels=True, higher_is_better=False)
_of_numbers = partial(Metric, reads=Reads.NUMBERS, needs_reference=True)
_of_choices = partial(Metric, reads=Reads.SCORES, needs_reference=True)
METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        _of_classes(name="top1", start=lambda: TopK(1), worst=0.0),
        _of_classes(name="top5", start=lambda: TopK(5), worst=0.0),
        _of_classes(name="f1", start=F1, worst=0.0),
        _of_choices(
            name="agreement",
            start=Agreement,
            of_rows=True,
            beside={Held.CLASSES: SameRows, Held.NUMBERS: NearRows},
            ideal=1.0,
            worst=0.0,
        ),
        _of_numbers(name="cosine", start=Cosine, order=2, ideal=1.0, worst=-1.0),
        Metric(
            name="spearman", start=Spearman, reads=Reads.FIRST, needs_labels=True, worst=-1.0
        ),
        _of_errors(name="mse", start=lambda: MeanError("mse", np.square)),
        _of_errors(name="mae", start=lambda: MeanError("mae", np.abs)),
        _of_classes(name="perplexity", start=Perplexity, higher_is_better=False),
        _of_choices(name="kld", start=Divergence, order=2, higher_is_better=False, ideal=0.0),
        _of_numbers(name="snr_db", start=SignalToNoise, ideal=math.inf),
        _of_numbers(name="max_abs", start=MaxAbs, higher_is_better=False, ideal=0.0),
    )
}
"""Every metric by name."""
ONE_HOT: Final = "labels are rows with one 1 among zeros: each is read as the class it marks"
_OTHER_NAMES: Final = {"accuracy": "top1", "same_top1": "agreement"}


def get_metric(name: str) -> Metric:
    """The built-in metric of that name.

    Raises:
        UsageError: If there is none.
    """
    table = METRICS | {other: METRICS[own] for other, own in _OTHER_NAMES.items()}
    return look_up(name, table, what="metric", where="--metric")


# ------------------------------------ a metric over batches: of each output, then of the worst
#
# Law: an output that nearly copies an input says nothing of the model. No metric is of it
# unless the user names it or there is no other.


class Score(float):
    """The value of a metric; ``outputs`` has it by output or slice of one, the worst first.

    The value is that of the worst. A user's own metric is of no output: ``outputs`` is
    empty then. ``samples`` has what it was computed from, by output, as far as that is known;
    of a user's own metric under an empty name. ``margins`` has, where each sample is decided,
    the score of the right class less the largest other one, by output; ``whole`` is the value
    where all decisions are right.
    """

    outputs: Mapping[str, float]
    samples: Mapping[str, Samples]
    margins: Mapping[str, Floats]
    whole: float

    def __new__(
        cls,
        value: float,
        outputs: Mapping[str, float] | None = None,
        samples: Mapping[str, Samples] | None = None,
        margins: Mapping[str, Floats] | None = None,
        whole: float = 1.0,
    ) -> Self:
        """A value, and the values by output that it was reduced from."""
        made = super().__new__(cls, value)
        made.outputs = MappingProxyType(dict(outputs or {}))
        made.samples = MappingProxyType(dict(samples or {}))
        made.margins = MappingProxyType(dict(margins or {}))
        made.whole = whole
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with its outputs and samples: another process may have computed it."""
        known = dict(self.outputs), dict(self.samples), dict(self.margins), self.whole
        return Score, (float(self), *known)


# Shares of samples are equal within this.
_ROUND_OFF: Final = 1e-9

OF_DECISIONS: Final = ("top1", "agreement")
"""Metrics whose loss on other data the margins of decisions tell."""


NOT_EXPECTED: Final = (
    f"fewer than {LEAST_DIFFERENT} samples differ, or the metric has no number for each"
)
"""Why nothing is expected of other data."""
_CAUTION: Final = 1.0
"""By how many deviations decisions are taken to be worse on other data than is expected: in
five of six cases they are better than that. Which decisions change differs from plan to plan,
so the fastest of several plans whose losses are just allowed is one of those whose losses are
rated too low. Errors of numbers are off alike for all plans, and none is chosen for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedMetric:
    """What a model's metric is expected to be on other data of the same kind.

    Attributes:
        metric: The metric.
        loss: By how much it is worse than fp32's; infinite where fp32's is.
        deviation: The deviation of either.
        cautious: The metric that has to be within the limit: of decisions a worse one.
    """

    metric: float
    loss: float
    deviation: float
    cautious: float


def on_new_data(
    exact: float, low: float, *, higher_is_better: bool = True
) -> ExpectedMetric | None:
    """What is expected on other data: by the margins of decisions, or by how samples differ.

    Args:
        exact: The fp32 model's score.
        low: Another model's, on the same data.
        higher_is_better: Which way the metric improves.

    Returns:
        None where neither is known, or too few samples differ.
    """
    if decided := by_margins(exact, low):
        return decided
    if not isinstance(exact, Score) or not isinstance(low, Score):
        return None
    deviation = _deviation(exact, low)
    if deviation is None:
        return None
    metric, sign = float(low), 1 if higher_is_better else -1
    loss = sign * (float(exact) - metric)
    return ExpectedMetric(metric=metric, loss=loss, deviation=deviation, cautious=metric)


def by_margins(exact: float, low: float) -> ExpectedMetric | None:
    """The same by the margins of decisions alone, which decide whether a model passes.

    Returns:
        None where margins are not known.
    """
    if not isinstance(exact, Score) or not isinstance(low, Score):
        return None
    margins = _margins(exact, low)
    if margins is None:
        return None
    here = (float(exact) - float(low)) / exact.whole
    loss, off = (exact.whole * x for x in margins.loss(here))
    metric = float(exact) - loss
    cautious = metric - _CAUTION * off
    return ExpectedMetric(metric=metric, loss=loss, deviation=off, cautious=cautious)


def _margins(exact: Score, low: Score) -> Margins | None:
    """Those of the worst output's decisions; None where they are not known."""
    name = next(iter(low.margins), "")
    if name not in exact.margins or len(exact.margins[name]) != len(low.margins[name]):
        return None
    return Margins.of(exact.margins[name], low.margins[name])


def _deviation(exact: Score, low: Score) -> float | None:
    """That of the worst output's metric on other samples, beside fp32's; None if unknown."""
    name, samples = next(iter(low.samples.items()), ("", None))
    if samples is None or name not in exact.samples:
        return None
    return deviation_of_difference(exact.samples[name], samples)


def losses_at(exact: float, low: float) -> Callable[[float], float] | None:
    """What is expected to be lost on other data by a model that moves margins as another does.

    Args:
        exact: The fp32 model's score.
        low: The other model's, on the same data.

    Returns:
        The cautious loss of a model that moves each margin so many times as far. None where
        the metric is not the share of samples whose margin is above 0.
    """
    if not isinstance(exact, Score) or not isinstance(low, Score):
        return None
    margins = _margins(exact, low)
    if margins is None:
        return None
    name, moved = next(iter(low.margins.items()))
    still, whole = exact.margins[name], exact.whole
    if abs((moved > 0).mean() - float(low) / whole) > _ROUND_OFF:
        return None
    known = np.isfinite(still) & np.isfinite(moved)
    moves = np.zeros(len(still))
    moves[known] = moved[known] - still[known]
    start = np.where(known, still, moved)

    def lost(scale: float) -> float:
        here = float(exact) / whole - float((start + scale * moves > 0).mean())
        loss, deviation = margins.scaled(scale).loss(here)
        return whole * (loss + _CAUTION * deviation)

    return lost


def by_output(value: float) -> dict[str, float]:
    """A metric's value by output, the worst first; empty for a metric of no output."""
    return dict(value.outputs) if isinstance(value, Score) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """An output that a metric is of, or a slice of it.

    Attributes:
        output: The output's name.
        part: The slice.
        axis: The axis along which a row lies: the scores of a decision, or a box. None if
            each number is a row.
        held: What its numbers are to a metric of scores.
        doubt: What the metric of the output says little of; empty for nothing.
    """

    output: str
    part: Slice = WHOLE
    axis: int | None = -1
    held: Held = Held.SCORES
    doubt: str = ""

    def __str__(self) -> str:
        """As it is reported: ``y`` or ``y[:, 4:24]``."""
        return f"{self.output}{self.part}"

    def of(self, outputs: Outputs) -> Outputs:
        """That output alone, by the name that is reported; rows lie along the last axis."""
        array = self.part.of(outputs[self.output])
        if self.axis is None:
            array = array[..., None]
        elif -array.ndim <= self.axis < array.ndim:
            array = np.moveaxis(array, self.axis, -1)
        return {str(self): array}


class Scoring:
    """Takes batches for ``metric`` of the outputs and slices in ``scored``.

    Rows of outputs of free length, ``free``, are compared with their partners in fp32's, and
    each batch of them is one sample: rows are not drawn by themselves.
    """

    def __init__(
        self, metric: Metric, scored: Sequence[Scored], free: Sequence[FreeOutput] = ()
    ) -> None:
        self.metric = metric
        self._free = free
        self.scored = {str(one): one for one in scored}
        self.totals: dict[str, Accumulator] = {
            name: metric.start_of(one) for name, one in self.scored.items()
        }
        self._filled: set[str] = set()  # outputs that were not empty in every batch
        self._one_hot = False

    def update(self, outputs: Outputs, labels: Labels, reference: Reference) -> None:
        """Take one batch: all of the model's outputs, labels, the fp32 model's outputs.

        Raises:
            UsageError: If the metric is not one of such outputs or labels.
        """
        numbers: Mapping[str, tuple[Array, Array]] = {}
        self._one_hot |= self.metric.of_classes and labels is not None and is_one_hot(labels)
        if reference is not None and self._free:
            pairs = matched(self._free, outputs, reference)
            outputs, reference, numbers = pairs.got, pairs.wanted, pairs.numbers
        for name, one in self.scored.items():
            total, got, wanted = self.totals[name], one.of(outputs), reference
            if reference is not None:
                wanted = one.of({one.output: counterpart(reference, one.output)})
            if got[name].size:
                self._filled.add(name)
            if one.output in numbers and reference is not None:
                rows = got[name], one.of(reference)[name]
                first, second = numbers[one.output] if self.metric.of_rows else rows
                total.update({name: first[None]}, None, {name: second[None]})
            else:
                total.update(got, labels, wanted)

    def absorb(self, later: Scoring) -> None:
        """Take the batches that another one took, which come after these."""
        for name, total in later.totals.items():
            self.totals[name].absorb(total)
        self._filled |= later._filled
        self._one_hot |= later._one_hot

    def result(self) -> Score:
        """The metric of the worst output; NaN before the first batch.

        An output that is empty in every batch has no value and does not count.
        """
        scores = {n: t.result() for n, t in self.totals.items() if n in self._filled}
        order = sorted(scores, key=lambda name: self._goodness(scores[name]))
        sampled = {name: one for name in order if (one := self.totals[name].samples())}
        return Score(
            scores[order[0]] if order else math.nan,
            {name: scores[name] for name in order},
            sampled if len(sampled) == len(order) else None,
            {n: m for n in order if (m := margins_of(self.totals[n])) is not None},
        )

    def doubts(self) -> tuple[str, ...]:
        """Why the metric of the fp32 model says little; of several outputs with their names.

        Raises:
            UsageError: If it says nothing.
        """
        several = len(self.totals) > 1
        warnings = tuple(
            f"output {name!r}: {doubt}" if several else doubt
            for name, total in self.totals.items()
            for doubt in total.doubts()
        )
        warnings += tuple(one.doubt for one in self.scored.values() if one.doubt)
        return (*warnings, ONE_HOT) if self._one_hot else warnings

    def _goodness(self, value: float) -> float:
        if math.isnan(value):
            return -math.inf
        return value if self.metric.higher_is_better else -value
