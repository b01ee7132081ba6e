"""The built-in metrics, listed in ``METRICS``; each is an accumulator that takes batches.

Laws: memory grows by a few numbers per sample, of which a certificate is computed; one NaN in
the outputs makes the result NaN, which passes no criterion; a model compared with itself
scores the metric's ``ideal``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, Protocol, Self

import numpy as np

from finecast.data.decisions import F1, Agreement, NearRows, Spearman, TopK, margins_of
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
from finecast.data.samples import Floats, Outputs, Samples
from finecast.engines.base import Array, Feeds
from finecast.errors import UsageError
from finecast.naming import enumerated, look_up
from finecast.planning.free_rows import FreeOutput, matched
from finecast.planning.sensitivity import counted_outputs, is_float
from finecast.planning.slices import WHOLE, Slice, decisions_of, slices_of


class Accumulator(Protocol):
    """Computes a metric over batches."""

    def update(
        self, outputs: Outputs, labels: Array | None, reference: Outputs | None
    ) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What a metric needs and how its score is read.

    ``start`` makes its accumulator, which is of one output. ``ideal`` is the score of the fp32
    model against itself, if the metric compares with that model; None if the baseline has to
    be measured. ``worst`` is the worst possible score; None if there is no bound. ``of_rows``
    says that of an output of free length it is which rows are there, and not their numbers.
    ``of_classes`` says that labels are the numbers of classes. Of a metric of scores
    ``of_numbers`` makes the accumulator of the numbers beside them that are none, as boxes;
    without it these are left to the error of the output.
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
    of_numbers: Callable[[], Accumulator] | None = None

    @property
    def each_output(self) -> bool:
        """Whether every output is judged by itself, if the user names none; else the first."""
        return self.reads is Reads.NUMBERS

    def start_of(self, scored: Scored) -> Accumulator:
        """The accumulator of an output or a slice of one."""
        if scored.scores or self.of_numbers is None:
            return self.start()
        return self.of_numbers()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its name."""
        return get_metric, (self.name,)


METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric(
            name="top1",
            start=lambda: TopK(1),
            reads=Reads.SCORES,
            needs_labels=True,
            of_classes=True,
            worst=0.0,
        ),
        Metric(
            name="top5",
            start=lambda: TopK(5),
            reads=Reads.SCORES,
            needs_labels=True,
            of_classes=True,
            worst=0.0,
        ),
        Metric(
            name="f1",
            start=F1,
            reads=Reads.SCORES,
            needs_labels=True,
            of_classes=True,
            worst=0.0,
        ),
        Metric(
            name="agreement",
            start=Agreement,
            reads=Reads.SCORES,
            needs_reference=True,
            of_rows=True,
            of_numbers=NearRows,
            ideal=1.0,
            worst=0.0,
        ),
        Metric(
            name="cosine",
            start=Cosine,
            reads=Reads.NUMBERS,
            needs_reference=True,
            ideal=1.0,
            worst=-1.0,
        ),
        Metric(
            name="spearman",
            start=Spearman,
            reads=Reads.FIRST,
            needs_labels=True,
            worst=-1.0,
        ),
        Metric(
            name="mse",
            start=lambda: MeanError("mse", np.square),
            reads=Reads.ALL,
            needs_labels=True,
            higher_is_better=False,
        ),
        Metric(
            name="mae",
            start=lambda: MeanError("mae", np.abs),
            reads=Reads.ALL,
            needs_labels=True,
            higher_is_better=False,
        ),
        Metric(
            name="perplexity",
            start=Perplexity,
            reads=Reads.SCORES,
            needs_labels=True,
            of_classes=True,
            higher_is_better=False,
        ),
        Metric(
            name="kld",
            start=Divergence,
            reads=Reads.SCORES,
            needs_reference=True,
            higher_is_better=False,
            ideal=0.0,
        ),
        Metric(
            name="snr_db",
            start=SignalToNoise,
            reads=Reads.NUMBERS,
            needs_reference=True,
            ideal=math.inf,
        ),
        Metric(
            name="max_abs",
            start=MaxAbs,
            reads=Reads.NUMBERS,
            needs_reference=True,
            higher_is_better=False,
            ideal=0.0,
        ),
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
    the score of the right class less the largest other one, by output.
    """

    outputs: Mapping[str, float]
    samples: Mapping[str, Samples]
    margins: Mapping[str, Floats]

    def __new__(
        cls,
        value: float,
        outputs: Mapping[str, float] | None = None,
        samples: Mapping[str, Samples] | None = None,
        margins: Mapping[str, Floats] | None = None,
    ) -> Self:
        """A value, and the values by output that it was reduced from."""
        made = super().__new__(cls, value)
        made.outputs = MappingProxyType(dict(outputs or {}))
        made.samples = MappingProxyType(dict(samples or {}))
        made.margins = MappingProxyType(dict(margins or {}))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with its outputs and samples: another process may have computed it."""
        known = dict(self.outputs), dict(self.samples), dict(self.margins)
        return Score, (float(self), *known)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedLoss:
    """What a model is expected to lose on other data of the same kind.

    Attributes:
        loss: By how much its share of right decisions is below fp32's.
        deviation: The deviation of that.
    """

    loss: float
    deviation: float


def expected_loss(exact: float, low: float) -> ExpectedLoss | None:
    """What is expected to be lost on other data, by the margins of decisions.

    Args:
        exact: The fp32 model's score.
        low: Another model's, on the same data.

    Returns:
        None where the metric is no share of decisions, or margins are not known.
    """
    if not isinstance(exact, Score) or not isinstance(low, Score):
        return None
    name = next(iter(low.margins), "")
    if name not in exact.margins or len(exact.margins[name]) != len(low.margins[name]):
        return None
    margins = Margins.of(exact.margins[name], low.margins[name])
    if margins is None:
        return None
    loss, deviation = margins.loss(float(exact) - float(low))
    return ExpectedLoss(loss=loss, deviation=deviation)


def by_output(value: float) -> dict[str, float]:
    """A metric's value by output, the worst first; empty for a metric of no output."""
    return dict(value.outputs) if isinstance(value, Score) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """An output that a metric is of, or a slice of it.

    Attributes:
        output: The output's name.
        part: The slice.
        axis: The axis along which a row lies: the scores of a decision, or a box.
        scores: False of numbers beside the scores that a metric is of.
        doubt: What the metric of the output says little of; empty for nothing.
    """

    output: str
    part: Slice = WHOLE
    axis: int = -1
    scores: bool = True
    doubt: str = ""

    def __str__(self) -> str:
        """As it is reported: ``y`` or ``y[:, 4:24]``."""
        return f"{self.output}{self.part}"

    def of(self, outputs: Outputs) -> Outputs:
        """That output alone, by the name that is reported; rows lie along the last axis."""
        array = self.part.of(outputs[self.output])
        if -array.ndim <= self.axis < array.ndim:
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

    def update(
        self, outputs: Outputs, labels: Array | None, reference: Outputs | None
    ) -> None:
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
            if reference is not None and one.part is not WHOLE:
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
            for doubt in (*total.doubts(), self.scored[name].doubt)
            if doubt
        )
        return (*warnings, ONE_HOT) if self._one_hot else warnings

    def _goodness(self, value: float) -> float:
        if math.isnan(value):
            return -math.inf
        return value if self.metric.higher_is_better else -value


def scored_outputs(
    metric: Metric,
    of: Sequence[str],
    feeds: Feeds,
    outputs: Outputs,
    axis: int | None = None,
    free: Sequence[FreeOutput] = (),
) -> tuple[Scored, ...]:
    """The outputs that ``metric`` is of, by slices whose numbers have a unit of their own.

    Args:
        metric: The metric.
        of: The outputs that the user names; empty for none.
        feeds: What the fp32 model was given.
        outputs: What it gave.
        axis: The axis of their slices; None to find them.
        free: The outputs of free length: which rows they have is no matter of units.

    Raises:
        UsageError: If the metric is of scores, and an output of different units has none.
    """
    rows = {one.name for one in free} if metric.of_rows else frozenset[str]()
    return tuple(
        scored
        for name in of or _scored_names(metric, feeds, outputs)
        for scored in (
            [Scored(output=name)]
            if name in rows
            else _scored_slices(metric, name, outputs[name], axis)
        )
    )


def _scored_slices(metric: Metric, name: str, wanted: Array, axis: int | None) -> list[Scored]:
    """What the metric is of in one output; alone by its units that differ."""
    if metric.reads is Reads.NUMBERS:
        return [Scored(output=name, part=part) for part in slices_of(wanted, axis)]
    if metric.reads is Reads.SCORES:
        return _decided(metric, name, wanted, axis)
    slices = slices_of(wanted)
    if metric.reads is Reads.FIRST or len(slices) == 1:
        return [Scored(output=name)]
    doubt = (
        f"the numbers of output {name!r} have different units, {enumerated(slices)}:"
        f" {metric.name} is of all together, and the largest decide it; use --eval"
    )
    return [Scored(output=name, doubt=doubt)]


def _decided(metric: Metric, name: str, wanted: Array, axis: int | None) -> list[Scored]:
    """The slice with scores and, where the metric is of other numbers too, their slices."""
    decisions, numbers = decisions_of(wanted)
    if WHOLE in decisions or (not decisions and metric.of_classes):
        return _together(metric, name, wanted, axis)
    if not decisions and metric.of_numbers is None:
        raise UsageError(
            f"no slice of output {name!r} holds scores of several classes: the numbers of"
            f" {enumerated(numbers)} have different units",
            where="--metric",
            fix="use --metric snr_db or cosine, or --eval",
        )
    slices = [Scored(output=name, part=part, axis=part.axis) for part in decisions]
    if metric.of_classes:
        doubt = (
            f"{metric.name} is of {slices[0]}, as the other numbers have other units: labels"
            " are the numbers of its classes, from 0"
        )
        return [replace(one, doubt=doubt) for one in slices]
    if metric.of_numbers is not None:
        slices += [
            Scored(output=name, part=part, axis=part.axis, scores=False) for part in numbers
        ]
    return slices


def _together(metric: Metric, name: str, wanted: Array, axis: int | None) -> list[Scored]:
    """An output whose numbers all decide, along the last axis.

    They decide alone by the indices of another axis that the user named, unless labels are of
    all of them.
    """
    parts = (WHOLE,) if axis is None else slices_of(wanted, axis)
    if WHOLE not in parts and parts[0].axis == wanted.ndim - 1:
        doubt = (
            f"which numbers of output {name!r} are scores is not known from the data:"
            f" {metric.name} is of the largest of each row, whatever --slices says; use --eval"
        )
        return [Scored(output=name, doubt=doubt)]
    parts = (WHOLE,) if metric.of_classes else parts
    return [Scored(output=name, part=part) for part in parts]


def _scored_names(metric: Metric, feeds: Feeds, outputs: Outputs) -> tuple[str, ...]:
    """Names of the outputs that ``metric`` is of where the user names none."""
    names, arrays = [*outputs], [*outputs.values()]
    counted = counted_outputs(feeds.values(), arrays)
    own = [n for n, a in zip(names, arrays, strict=True) if not is_float(a)]
    own = [n for i, n in enumerate(names) if i in counted or n in own]
    if not metric.each_output:
        return tuple(own[:1])
    return tuple(n for i, n in enumerate(names) if i in counted) or tuple(own[:1])
