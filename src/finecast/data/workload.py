"""The data a model is tuned on: how to evaluate it, calibrate it and time it."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, ClassVar, Final, final

import numpy as np

from finecast.data.datasets import WHOLE, Batch, Dataset, Part
from finecast.data.decoding import Decoding, DecodingSession
from finecast.data.functions import (
    OtherCallError,
    Recording,
    Replacement,
    check_baseline,
    metric_value,
    quietly,
    source_digest,
)
from finecast.data.implied_labels import ImpliedLabels, implied_labels, seconds_for
from finecast.data.metrics import Metric, Score, Scored, Scoring, scored_outputs
from finecast.data.samples import Indices
from finecast.data.streams import Stream
from finecast.engines.base import (
    Array,
    Feeds,
    Session,
    Steps,
    TensorSpec,
    calls_of,
    each_call,
)
from finecast.engines.exact import CachedSession, feeds_digest
from finecast.errors import EngineError, UsageError
from finecast.planning.sensitivity import is_float
from finecast.usercode import guarded

EvalFunction = Callable[["Run"], "float | Array"]
CalibrationFunction = Callable[[], Iterable[Feeds]]
CallsFunction = Callable[[Feeds], Sequence[Feeds]]

# Feeds of a user's functions that are timed: a small, a middle and a large one,
_TIMED_FEEDS: Final = 3
# chosen among so many calibration feeds,
_LOOKED_AT: Final = 16
# or among the first feeds of the evaluation, of which about so many bytes are kept.
_REMEMBERED_BYTES: Final = 64 << 20
# Of a sequence, in which the model keeps its state, so many steps: every rounding is probed on
# all of them.
_REMEMBERED_STEPS: Final = 32
_EVALUATION: Final = "it gets run(feeds) and returns a number: try it on the fp32 model alone"
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


@final
class Run:
    """What a user's evaluation function gets: ``run(feeds)`` gives the outputs.

    A model that keeps a state starts each call with an empty one. Once ``run.reset()`` was
    called, calls go on with the state of the call before, up to the next ``run.reset()``.
    """

    def __init__(
        self, session: Session, *, remember: bool = False, record: bool = False
    ) -> None:
        self.runs = 0
        self._session = session
        self._left = _REMEMBERED_BYTES if remember else 0
        self._sequences: list[list[Feeds]] = []
        self._carries = self._begins = False
        self._recording = Recording[dict[str, Array]]() if record else None
        self._replay: Recording[dict[str, Array]] | None = None
        self._replace: Replacement | None = None

    def __call__(self, feeds: Feeds) -> dict[str, Array]:
        """Run the model once; outputs by name."""
        digest = partial(feeds_digest, feeds)
        known = None if self._replay is None else self._replay.next(digest)
        if self._replace is not None:
            if known is None:
                raise OtherCallError
            return {name: self._replace(array.copy()) for name, array in known.items()}
        if known is not None:
            return {name: array.copy() for name, array in known.items()}
        self._remember(feeds)
        outputs = self._session.step(feeds) if self._carries else self._session.run(feeds)
        self.runs += 1
        if self._recording is not None:
            self._record(self._recording, feeds, outputs)
        return outputs

    def _record(
        self,
        recording: Recording[dict[str, Array]],
        feeds: Feeds,
        outputs: Mapping[str, Array],
    ) -> None:
        """Keep a copy of the outputs of a call; of objects there is none."""
        if any(array.dtype.hasobject for array in outputs.values()):
            recording.lose()
            return
        size_bytes = sum(array.nbytes for array in outputs.values())
        copied = {name: array.copy() for name, array in outputs.items()}
        recording.keep(feeds_digest(feeds), copied, size_bytes)

    def reset(self) -> None:
        """Start a new sequence, in which the state is carried from call to call.

        Of a model that keeps no state each call stays a sample of its own.
        """
        if self._session.keeps_state:
            self._session.reset()
            self._carries = self._begins = True

    def replayed(self) -> Run:
        """Gives the outputs of the same calls again; on other feeds it runs the model.

        A step of a sequence depends on the steps before: where some outputs were too many to
        be kept, all steps are run again.
        """
        again = Run(self._session)
        if self._recording is not None and (self._recording.is_whole or not self._carries):
            again._replay = self._recording.again()
        return again

    def replaced(self, replace: Replacement) -> Run | None:
        """Gives the outputs of the same calls, replaced; other calls fail: no model is run.

        None where outputs were too many to be kept.
        """
        if self._recording is None or not self._recording.is_whole:
            return None
        again = self.replayed()
        again._replace = replace
        return again

    @property
    def outputs(self) -> Sequence[Mapping[str, Array]]:
        """The outputs of all calls; none where they were too many to be kept."""
        whole = self._recording is not None and self._recording.is_whole
        return self._recording.outputs if self._recording and whole else ()

    def exchanged(self, name: str, arrays: Sequence[Array]) -> Run:
        """Gives the outputs of the same calls, one of them another array in each call."""
        again = Run(self._session)
        calls = zip(self.outputs, arrays, strict=True)
        outputs = [{**call, name: array} for call, array in calls]
        again._replay = Recording[dict[str, Array]].of(outputs)
        again._replace = np.asarray
        return again

    def _remember(self, feeds: Feeds) -> None:
        """Keep a copy of the feeds, as the next call of their sequence."""
        begins, self._begins = self._begins or not self._carries, False
        if self._left <= 0:
            return
        if begins:
            self._sequences.append([])
        if len(self._sequences[-1]) < _REMEMBERED_STEPS:
            call = {k: np.array(v, copy=True) for k, v in feeds.items()}
            self._sequences[-1].append(call)
            self._left -= feed_bytes(call)

    def seen(self) -> list[Feeds]:
        """The first feeds, each of a call or of a sequence."""
        return [Steps(s) if self._carries else s[0] for s in self._sequences]


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
        del number
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
    def digest(self) -> str:
        """Data, metric, its outputs and batch."""
        return _digest(self.data_digest, self.metric.name, str(self.batch), *self.of)

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
        for batch in self._batches(part):
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

    def _batches(self, part: Part) -> Iterable[Batch]:
        if isinstance(self.data, Dataset):
            return self.data.batches(self.batch, part=part)
        return self.data.batches(self.batch)

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


@dataclass(slots=True, kw_only=True)
class JudgedByFunction(Workload):
    """Data of which only a user's function knows.

    Attributes:
        function: Returns the accuracy of what it is given.
        name: The function's name.
        lower_is_better: Whether less of what it returns is better.
        calibrate: Gives the calibration feeds, if the user has some.
        implied: The right classes that the function implies; None where it implies none.
    """

    function: Callable[[Any], float]
    name: str
    lower_is_better: bool = False
    calibrate: CalibrationFunction | None = None
    of: tuple[str, ...] = ()
    slices: int | None = None
    groups: Indices | None = field(default=None, compare=False)
    implied: ImpliedLabels | None = None

    @property
    def higher_is_better(self) -> bool:
        """As the user states it."""
        return not self.lower_is_better

    @property
    def assumes_direction(self) -> bool:
        """True unless the user states that lower is better."""
        return not self.lower_is_better

    def _with_margins(self, value: Score, outputs: Sequence[Mapping[str, Array]]) -> Score:
        return self.implied.score(value, outputs) if self.implied else value


@dataclass(slots=True, kw_only=True)
class FunctionWorkload(JudgedByFunction):
    """A user's evaluation function; feeds of its first call serve if no others are given."""

    learns: ClassVar[tuple[str, ...]] = ("remembered", "implied")

    remembered: list[Feeds] = field(default_factory=list[Feeds])

    @property
    def digest(self) -> str:
        """Of the function's name and its code, as far as that can be read."""
        return _digest(self.name, source_digest(self.function))

    def evaluate(self, session: Session, reference: Session | None) -> float:
        """Call the user's function with the session; for the baseline call it again.

        The second call gets the outputs of the first and does not run the model, but on feeds
        that the first call did not have, or whose outputs were too many to be kept. Further
        calls get other outputs in place of these: the number has to change with one of them.

        Raises:
            UserCodeError: If the function fails, returns no finite number for the baseline,
                never runs the model, returns something else for the same outputs, or the same
                for any outputs.
        """
        if reference is not None:
            run = Run(session, record=self.implied is not None)
            return self._with_margins(self._called(run), run.outputs)
        run, start = Run(session, remember=not self.remembered, record=True), perf_counter()
        result = self._called(run)
        seconds = perf_counter() - start
        self.remembered = self.remembered or run.seen()
        check_baseline(
            result,
            self.name,
            runs=run.runs > 0,
            again=lambda: self._called(run.replayed()),
            replaced=partial(self._on_replaced, run),
            call="run(feeds)",
        )
        if self.higher_is_better:
            self.implied = implied_labels(
                result, run.outputs, partial(self._on_exchanged, run), seconds_for(seconds)
            )
        return self._with_margins(result, run.outputs)

    def _on_exchanged(self, run: Run, name: str, arrays: Sequence[Array]) -> float | None:
        """The metric where an output is another array in each call."""
        return quietly(lambda: self._called(run.exchanged(name, arrays)))

    def _called(self, run: Run) -> Score:
        with guarded("the evaluation function failed", where=self.name, fix=_EVALUATION):
            metric = self.function(run)
        return metric_value(metric, self.name)

    def _on_replaced(self, run: Run, replacement: Replacement) -> float | None:
        """The metric of replaced outputs; None where outputs were too many to be kept."""
        again = run.replaced(replacement)
        return None if again is None else self._called(again)

    def evaluated(self) -> Iterable[Feeds]:
        """The first feeds that the user's function had."""
        return self.remembered

    def calibration(self) -> Iterable[Feeds]:
        """The calibration feeds given, else some feeds of the baseline evaluation."""
        if self.calibrate is not None:
            return self.calibrate()
        most = max((samples(feeds) for feeds in self.remembered), default=1)
        return spread(self.remembered, max(_TIMED_FEEDS, math.ceil(MOST_PROBED_ROWS / most)))

    def timing(self) -> Sequence[Feeds]:
        """Feeds of small, middle and large size, from the calibration or the evaluation.

        Of feeds of the same shapes one is timed: calls on them take as long.
        """
        feeds_by_shapes: dict[object, Feeds] = {}
        for feeds in self.compared():
            feeds_by_shapes.setdefault(_shapes(feeds), feeds)
        return [*feeds_by_shapes.values()]

    def compared(self) -> Sequence[Feeds]:
        """Feeds of small, middle and large size, of the same shapes too."""
        feeds = self.remembered
        if self.calibrate is not None:
            feeds = list(islice(self.calibrate(), _LOOKED_AT))
        return spread(feeds, _TIMED_FEEDS)


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
    counts: dict[str, list[int]] = {}
    for feeds in workload.evaluated():
        for call in calls_of(feeds):
            for name, array in call.items():
                if is_float(array):
                    values = array.astype(np.float64, copy=False)
                    array_counts = (
                        np.isnan(values).sum(),
                        np.isinf(values).sum(),
                        values.size,
                    )
                    before = counts.get(name, [0, 0, 0])
                    counts[name] = [
                        a + int(b) for a, b in zip(before, array_counts, strict=True)
                    ]
    for name, (nans, infs, size) in counts.items():
        if nans + infs:
            return f"input {name!r} of the data has {nans} NaN and {infs} Inf in {size} values"
    return ""


def _shapes(feeds: Feeds) -> object:
    """The shapes of all inputs of each call, by which calls take as long as each other."""
    return tuple(
        tuple(sorted((name, array.shape) for name, array in call.items()))
        for call in calls_of(feeds)
    )


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


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
