"""The built-in metrics, listed in ``METRICS``; each is an accumulator that takes batches.

Laws: memory grows by a few numbers per sample, of which a certificate is computed; one NaN in
the outputs makes the result NaN, which passes no criterion; a model compared with itself
scores the metric's ``ideal``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from finecast.data.comparison import Cosine, MaxAbs, SignalToNoise
from finecast.data.decisions import F1, Agreement, Spearman, TopK
from finecast.data.distances import Divergence, MeanError, Perplexity
from finecast.data.samples import Outputs, Samples
from finecast.engines.base import Array
from finecast.naming import look_up


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What a metric needs and how its score is read.

    ``start`` makes its accumulator, which is of one output. ``each_output`` says that, if the
    user names no output, every one is judged by itself; else the first is. ``ideal`` is the
    score of the fp32 model against itself, if the metric compares with that model; None if the
    baseline has to be measured. ``worst`` is the worst possible score; None if there is no
    bound.
    """

    name: str
    start: Callable[[], Accumulator]
    needs_labels: bool = False
    needs_reference: bool = False
    each_output: bool = False
    higher_is_better: bool = True
    ideal: float | None = None
    worst: float | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its name."""
        return get_metric, (self.name,)


METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric(
            name="top1",
            start=lambda: TopK(1),
            needs_labels=True,
            worst=0.0,
        ),
        Metric(
            name="top5",
            start=lambda: TopK(5),
            needs_labels=True,
            worst=0.0,
        ),
        Metric(
            name="f1",
            start=F1,
            needs_labels=True,
            worst=0.0,
        ),
        Metric(
            name="agreement",
            start=Agreement,
            needs_reference=True,
            ideal=1.0,
            worst=0.0,
        ),
        Metric(
            name="cosine",
            start=Cosine,
            needs_reference=True,
            each_output=True,
            ideal=1.0,
            worst=-1.0,
        ),
        Metric(
            name="spearman",
            start=Spearman,
            needs_labels=True,
            worst=-1.0,
        ),
        Metric(
            name="mse",
            start=lambda: MeanError("mse", np.square),
            needs_labels=True,
            higher_is_better=False,
        ),
        Metric(
            name="mae",
            start=lambda: MeanError("mae", np.abs),
            needs_labels=True,
            higher_is_better=False,
        ),
        Metric(
            name="perplexity",
            start=Perplexity,
            needs_labels=True,
            higher_is_better=False,
        ),
        Metric(
            name="kld",
            start=Divergence,
            needs_reference=True,
            higher_is_better=False,
            ideal=0.0,
        ),
        Metric(
            name="snr_db",
            start=SignalToNoise,
            needs_reference=True,
            each_output=True,
            ideal=math.inf,
        ),
        Metric(
            name="max_abs",
            start=MaxAbs,
            needs_reference=True,
            each_output=True,
            higher_is_better=False,
            ideal=0.0,
        ),
    )
}
"""Every metric by name."""
_OTHER_NAMES: Final = {"accuracy": "top1", "same_top1": "agreement"}


def get_metric(name: str) -> Metric:
    """The built-in metric of that name.

    Raises:
        UsageError: If there is none.
    """
    table = METRICS | {other: METRICS[own] for other, own in _OTHER_NAMES.items()}
    return look_up(name, table, what="metric", where="--metric")
