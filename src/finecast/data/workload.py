"""The data a model is tuned on: how to evaluate it, calibrate it and time it."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from finecast.data.datasets import WHOLE, Dataset, Part
from finecast.data.decoding import Decoding, DecodingSession
from finecast.data.metrics import Metric, Score, Scored, Scoring
from finecast.data.samples import Indices
from finecast.data.scored_outputs import scored_outputs
from finecast.data.streams import Stream
from finecast.engines.base import (
    Feeds,
    Session,
    Steps,
    TensorSpec,
    calls_of,
    each_call,
)
from finecast.engines.exact import CachedSession
from finecast.errors import EngineError, UsageError
from finecast.numbers.rounding import widened
from finecast.planning.sensitivity import is_float

CalibrationFunction = Callable[[], Iterable[Feeds]]
CallsFunction = Callable[[Feeds], Sequence[Feeds]]

# Samples on which each of many roundings is probed alone: few samples suffice to rank them, as
# errors are relative to whole outputs.
PROBED_ROWS: Final = 8
# Samples on which everything is rounded at once: compared with hundreds of samples, 8 give an
# error that is up to 40% off, 64 one that is 7% off (ResNet-20 in bf16).
MOST_PROBED_ROWS: Final = 128
# Samples times points that are run in all: 80 points have the least number of samples each.
# With twice as many the predicted squared error of half of the points, drawn at random,
# changes by 3% to 5% (the digits' net, 24 samples and 48) and 5% to 14% (ResNet-20, 4 and 8).
# To probe groups first and split those that make 99% of the error would save 3% to 20% of the
# runs of ResNet-20 and MiniLM, whose errors are spread over nearly all points.
_PROBED_IN_ALL: Final = 80 * PROBED_ROWS


class Workload(ABC):
    """Evaluation on all data, calibration feeds, and the feeds that latency is measured on.

    Attributes:
        of: Outputs that the user names, of which the metric and the error are; empty for all.
        slices: The axis of their slices that the user names; None to find them.
        warnings: Why the metric says little on this data, once the baseline was evaluated.
        samples: Samples that the metric is of, once the baseline was evaluated; 0 if unknown.
        groups: The number of each sample's cluster; None where each is drawn by itself.
        learns: Names of the attributes that the evaluation of the baseline sets.
    """

    learns: ClassVar[tuple[str, ...]] = ()
    of: tuple[str, ...] = ()
    slices: int | None = None
    warnings: Sequence[str] = ()
    samples: int = 0
    groups: Indices | None = None

    @property
    @abstractmethod
    def higher_is_better(self) -> bool:
        """Which way the metric improves."""

    @property
    def assumes_direction(self) -> bool:
        """Whether nobody said which way the metric improves, so that more counts as better."""
        return False

    @property
    def parts(self) -> int:
        """The most parts that can be evaluated apart from one another."""
        return 1

    @property
    def copies(self) -> int:
        """How many samples have the inputs of one before them; 0 where that is not known."""
        return 0

    @property
    def digest(self) -> str:
        """Identifies the data and the metric; empty if no study remembers trials on them."""
        return ""

    @property
    def worst(self) -> float | None:
        """The metric's worst value, where it has one."""
        return None

    @property
    def order(self) -> int:
        """The power of the output's error that a small loss of the metric grows with."""
        return 1

    @abstractmethod
    def evaluate(self, session: Session, reference: Session | None) -> float:
        """The metric of ``session`` over all data; a ``Score`` tells it by output.

        ``reference`` is the model to compare with; None if ``session`` is that model.
        """

    @abstractmethod
    def calibration(self) -> Iterable[Feeds]:
        """Feeds for facts and sensitivities; each call starts again at the first."""

    def evaluated(self) -> Iterable[Feeds]:
        """The feeds of the evaluation, as far as they are known after the baseline's."""
        return ()

    def timing(self) -> Sequence[Feeds]:
        """Feeds to time; call after the baseline was evaluated."""
        return [*self.calibration()]

    def compared(self) -> Sequence[Feeds]:
        """Feeds on which outputs are compared with fp32's: more of them say more."""
        return self.timing()

    @property
    def state(self) -> Mapping[str, str]:
        """The output that becomes an input of the next call, by the input's name."""
        return {}

    @property
    def decodes(self) -> bool:
        """Whether a first call and a step may be timed apart."""
        return False

    def texts(self) -> Sequence[Feeds]:
        """Some of the texts that are decoded; none where none are."""
        return ()

    def decoded(self, session: Session) -> Session:
        """A session that decodes the texts that it is given; itself where none are decoded."""
        return session

    def of_call(self, number: int) -> Workload:
        """The same data and metric, of which only the first call or a step is timed.

        Args:
            number: 0 for the first call, 1 for a step.

        Raises:
            UsageError: If no texts are decoded.
        """
        raise UsageError(
            "first calls and steps are not timed apart here",
            where="--objective",
            fix="give --decode-steps: they are calls of decoding",
        )

    def learned(self) -> Mapping[str, Any]:
        """What the evaluation of the baseline set here, by attribute."""
        return {name: getattr(self, name) for name in self.learns}

    def learn(self, learned: Mapping[str, Any]) -> None:
        """Take over what a workload of the same data learned in another process."""
        for name, value in learned.items():
            setattr(self, name, value)


def whole_batch(feeds: Feeds) -> tuple[Feeds]:
    """A batch as one call."""
    return (feeds,)


@dataclass(slots=True, kw_only=True)
class DataWorkload(Workload):
    """A data set and a built-in metric.

    With ``decoding`` the model is given the texts token by token, and the metric is of the
    steps. ``calls`` has the calls of a batch that calibrate and are timed; with ``call`` that
    one alone is timed. ``exact`` is the cached session of the reference model once a metric
    compared with it, ``scored`` the outputs that the metric is of, once the baseline was
    evaluated.
    """

    learns: ClassVar[tuple[str, ...]] = ("warnings", "samples", "scored")

    data: Dataset | Stream
    metric: Metric
    batch: int
    data_digest: str
    calibrate: CalibrationFunction
    of: tuple[str, ...] = ()
    slices: int | None = None
    decoding: Decoding | None = None
    calls: CallsFunction = whole_batch
    call: int | None = None
    warnings: Sequence[str] = ()
    samples: int = 0
    groups: Indices | None = field(default=None, compare=False)
    scored: Sequence[Scored] = field(default=(), compare=False)
    exact: CachedSession | None = field(default=None, compare=False)
    _of: Session | None = field(default=None, compare=False, repr=False)

    @property
    def worst(self) -> float | None:
        """The worst value of the metric."""
        return self.metric.worst

    @property
    def order(self) -> int:
        """The order of the metric."""
        return self.metric.order

    @property
    def higher_is_better(self) -> bool:
        """The direction of the metric."""
        return self.metric.higher_is_better

    @property
    def copies(self) -> int:
        """Those of a data set."""
        return self.data.copies

    @property
    def digest(self) -> str:
        """Data, metric, its outputs and batch."""
        return digest_of(self.data_digest, self.metric.name, str(self.batch), *self.of)

    def evaluate(self, session: Session, reference: Session | None) -> Score:
        """Stream all batches through the metric.

        A metric that compares with fp32 runs the fp32 model once on each batch, and again only
        on batches whose outputs are too large to be cached.

        Raises:
            UsageError: If the metric says nothing on this data.
        """
        scoring = self.scoring(session, reference)
        if reference is None:
            assumed = self.data.notices if isinstance(self.data, Stream) else ()
            self.warnings = (*assumed, *scoring.doubts())
        return scoring.result()

    @property
    def parts(self) -> int:
        """Batches, if they can be evaluated apart from one another; else 1."""
        if not isinstance(self.data, Dataset):
            return 1
        return math.ceil(self.data.size / (self.data.fixed_batch or self.batch))

    def scoring(
        self, session: Session, reference: Session | None, part: Part = WHOLE
    ) -> Scoring:
        """The metric of the batches of a part, to be joined with those of the others."""
        exact, scoring, samples = None, None, 0
        fp32 = session if reference is None else reference
        free = fp32.free
        if self.metric.needs_reference:
            exact = self._cached(fp32)
        session = exact if exact and reference is None else self.decoded(session)
        data = self.data
        whole = isinstance(data, Stream)
        for batch in (
            data.batches(self.batch) if whole else data.batches(self.batch, part=part)
        ):
            samples += batch.count
            untrimmed = session.run(batch.feeds)
            if scoring is None:
                if (reference is None and not part.index) or not self.scored:
                    self.scored = scored_outputs(
                        self.metric,
                        self.of,
                        batch.feeds,
                        untrimmed,
                        self.slices,
                        free,
                        fp32.joined,
                    )
                scoring = Scoring(self.metric, self.scored, free)
            outputs, beside = batch.trim(untrimmed), None
            if exact is not None:
                beside = outputs if exact is session else batch.trim(exact.run(batch.feeds))
            labels = batch.labels
            if self.decoding is not None:
                labels = self.decoding.labels(labels, batch.feeds)
            scoring.update(outputs, labels, beside)
        if reference is None:
            self.samples = samples
        return scoring or Scoring(self.metric, self.scored)

    def _cached(self, session: Session) -> CachedSession:
        """``session``, run once on each batch."""
        if isinstance(session, CachedSession):
            return session
        if self.exact is None or self._of is not session:
            self.exact, self._of = CachedSession(self.decoded(session)), session
        return self.exact

    def texts(self) -> Sequence[Feeds]:
        """The first full batch."""
        return [next(self.data.batches(self.batch)).feeds] if self.decoding else ()

    def decoded(self, session: Session) -> Session:
        """``session``, which decodes the texts that it is given if that is asked for."""
        return DecodingSession(session, self.decoding) if self.decoding else session

    def evaluated(self) -> Iterable[Feeds]:
        """All samples, without those that are repeated to fill up a batch."""
        return (batch.trim(batch.feeds) for batch in self.data.batches(self.batch))

    def calibration(self) -> Iterable[Feeds]:
        """The calibration feeds given."""
        return self.calibrate()

    def timing(self) -> Sequence[Feeds]:
        """The calls of the first full batch, or one of them."""
        calls = self.calls(next(self.data.batches(self.batch)).feeds)
        if self.call is not None:
            return [calls[self.call]]
        *_, last = calls
        return [Steps(last.calls)] if isinstance(last, Steps) and last.untimed else calls

    @property
    def decodes(self) -> bool:
        """Whether texts are decoded."""
        return self.decoding is not None

    @property
    def state(self) -> Mapping[str, str]:
        """The state of a decoder that is in its inputs and outputs."""
        return {} if self.decoding is None else self.decoding.state

    def of_call(self, number: int) -> Workload:
        """The same, of which one of ``calls`` is timed; raises as it does elsewhere."""
        return replace(self, call=number) if self.decodes else Workload.of_call(self, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCalls(Workload):
    """Calls to be timed, in a process that has no other data and judges nothing."""

    calls: Sequence[Feeds]

    @property
    def higher_is_better(self) -> bool:
        """Nothing is judged."""
        return True

    def evaluate(self, session: Session, reference: Session | None) -> float:
        """Not to be called."""
        raise NotImplementedError("calls are timed")

    def calibration(self) -> Iterable[Feeds]:
        """The calls."""
        return self.calls


def nonfinite_data(workload: Workload) -> str:
    """How many NaN and Inf the first input that has some has, as text; empty if none has."""
    counts: dict[str, NDArray[np.int64]] = {}
    for feeds in workload.evaluated():
        for call in calls_of(feeds):
            for name, array in call.items():
                if is_float(array):
                    values = widened(array)
                    found = np.isnan(values).sum(), np.isinf(values).sum(), values.size
                    counts[name] = counts.get(name, np.zeros(3, np.int64)) + found
    for name, (nans, infs, size) in counts.items():
        if nans + infs:
            return f"input {name!r} of the data has {nans} NaN and {infs} Inf in {size} values"
    return ""


def feed_bytes(feeds: Feeds) -> int:
    """Bytes of all arrays."""
    return sum(a.nbytes for call in calls_of(feeds) for a in call.values())


def spread(feeds: Sequence[Feeds], count: int) -> list[Feeds]:
    """At most ``count`` of ``feeds``, evenly spaced in the order of size, the largest first.

    Raises:
        UsageError: If ``feeds`` is empty.
    """
    if not feeds:
        raise UsageError(
            "the evaluation never ran the model", fix="call run(feeds) in it, or give --calib"
        )
    ordered = sorted(feeds, key=feed_bytes, reverse=True)
    step = max(1, math.ceil(len(ordered) / count))
    return ordered[::step][:count]


def thinned(feeds: Feeds, inputs: Sequence[TensorSpec], rows: int = PROBED_ROWS) -> Feeds:
    """The first ``rows`` samples, if all inputs have the same free dimension as first axis.

    Of dimensions that the model's library does not name those of the same size are the same.
    """
    fronts = {_front(spec) for spec in inputs}
    front = fronts.pop() if len(fronts) == 1 else None
    sizes = {array.shape[:1] for call in calls_of(feeds) for array in call.values()}
    if not isinstance(front, str) or (not front and len(sizes) > 1):
        return feeds
    return each_call(feeds, lambda call: {n: array[:rows] for n, array in call.items()})


def _front(spec: TensorSpec) -> int | str | None:
    """The first dimension: its size, its symbol, or "" if it is free and has no symbol."""
    front = spec.shape[0] if spec.shape else None
    return "" if front == f"{spec.name}.0" else front


def samples(feeds: Feeds) -> int:
    """Samples of a call: the size of the inputs' first axis; 1 if they do not share it."""
    fronts = {a.shape[0] if a.shape else None for a in feeds.values()}
    return (fronts.pop() if len(fronts) == 1 else None) or 1


def sample_count(calls: Iterable[Feeds]) -> int:
    """Samples of several calls; of a sequence those of its first step."""
    return sum(samples(step) for call in calls for step in calls_of(call)[:1])


def probed(calls: Iterable[Feeds], session: Session, rows: int = PROBED_ROWS) -> list[Feeds]:
    """The first calls that together have at least ``rows`` samples, cut to ``rows`` each.

    They are left whole if ``session`` runs on whole calls alone: a model may declare a free
    batch and compute with the one that it was exported with.
    """
    whole: list[Feeds] = []
    have = 0
    for feeds in calls:
        whole.append(feeds)
        have += min(samples(feeds), rows)
        if have >= rows or session.free:  # rows have their partners within a call
            break
    thinned_calls = [thinned(feeds, session.inputs, rows) for feeds in whole]
    cut = next(
        (c for c, w in zip(thinned_calls, whole, strict=True) if samples(c) < samples(w)), None
    )
    if cut is not None:
        try:
            session.run(cut)
        except EngineError:
            return whole
    return thinned_calls


def probed_rows(points: int) -> int:
    """Samples on which each of ``points`` roundings is probed: the more, the fewer points.

    The errors of some models, recurrent ones for example, differ much from sample to sample.
    """
    rows = _PROBED_IN_ALL // max(points, 1)
    return min(max(rows, PROBED_ROWS), MOST_PROBED_ROWS)


def digest_of(*parts: str) -> str:
    """Identifies what a workload is made of."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
