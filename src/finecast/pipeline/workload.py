"""The data a model is tuned on: how to evaluate it, calibrate it and time it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Protocol, final

import numpy as np

from finecast.data.datasets import Dataset
from finecast.data.functions import source_digest
from finecast.data.metrics import Metric
from finecast.data.streams import Stream
from finecast.engines.base import (
    Array,
    Feeds,
    Session,
    StatefulSession,
    Steps,
    TensorSpec,
    calls_of,
    each_call,
)
from finecast.errors import UsageError
from finecast.pipeline.cached_session import CachedSession
from finecast.usercode import guarded


@final
class Run:
    """What a user's evaluation function gets: ``run(feeds)`` gives the outputs.

    A model that keeps a state starts each call with an empty one. Once ``run.reset()`` was
    called, calls go on with the state of the call before, up to the next ``run.reset()``.
    """

    def __init__(self, session: Session, *, remember: bool = False) -> None:
        self._session = session
        self._stateful = session if isinstance(session, StatefulSession) else None
        self._left = _REMEMBERED_BYTES if remember else 0
        self._sequences: list[list[Feeds]] = []
        self._carries = self._begins = False

    def __call__(self, feeds: Feeds) -> dict[str, Array]:
        """Run the model once; outputs by name."""
        self._remember(feeds)
        if self._carries and self._stateful is not None:
            return self._stateful.step(feeds)
        return self._session.run(feeds)

    def reset(self) -> None:
        """Start a new sequence, in which the state is carried from call to call.

        Of a model that keeps no state each call stays a sample of its own.
        """
        if self._stateful is not None and self._stateful.keeps_state:
            self._stateful.reset()
            self._carries = self._begins = True

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


EvalFunction = Callable[[Run], float]
CalibrationFunction = Callable[[], Iterable[Feeds]]

# Feeds of a user's functions that are timed: a small, a middle and a large one,
_TIMED_FEEDS: Final = 3
# chosen among so many calibration feeds,
_LOOKED_AT: Final = 16
# or among the first feeds of the evaluation, of which about so many bytes are kept.
_REMEMBERED_BYTES: Final = 64 << 20
# Of a sequence, in which the model keeps its state, so many steps: every rounding is probed on
# all of them.
_REMEMBERED_STEPS: Final = 32
# Samples on which each of many roundings is probed alone: few samples suffice to rank them, as
# errors are relative to whole outputs.
PROBED_ROWS: Final = 8
# Samples on which everything is rounded at once: compared with hundreds of samples, 8 give an
# error that is up to 40% off, 64 one that is 7% off (ResNet-20 in bf16).
MOST_PROBED_ROWS: Final = 128
# Samples times points that are run in all: 160 points have the least number of samples each.
_PROBED_IN_ALL: Final = 160 * PROBED_ROWS


class Workload(Protocol):
    """Evaluation on all data, calibration feeds, and the feeds that latency is measured on."""

    @property
    def higher_is_better(self) -> bool:
        """Which way the metric improves."""
        ...

    @property
    def digest(self) -> str:
        """Identifies the data and the metric."""
        ...

    @property
    def worst(self) -> float | None:
        """The metric's worst value, where it has one."""
        ...

    @property
    def warnings(self) -> Sequence[str]:
        """Why the metric says little on this data; call after the baseline was evaluated."""
        ...

    def evaluate(self, session: Session, reference: Session | None) -> float:
        """The metric of ``session`` over all data.

        ``reference`` is the model to compare with; None if ``session`` is that model.
        """
        ...

    def calibration(self) -> Iterable[Feeds]:
        """Feeds for facts and sensitivities; each call starts again at the first."""
        ...

    def timing(self) -> Sequence[Feeds]:
        """Feeds to time; call after the baseline was evaluated."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DataWorkload:
    """A data set and a built-in metric.

    ``exact`` holds the cached session of the reference model once a metric compared with it.
    """

    data: Dataset | Stream
    metric: Metric
    batch: int
    data_digest: str
    calibrate: CalibrationFunction
    warnings: list[str] = field(default_factory=list[str])
    exact: list[CachedSession] = field(default_factory=list[CachedSession], compare=False)

    @property
    def worst(self) -> float | None:
        """The worst value of the metric."""
        return self.metric.worst

    @property
    def higher_is_better(self) -> bool:
        """The direction of the metric."""
        return self.metric.higher_is_better

    @property
    def digest(self) -> str:
        """Data, metric and batch."""
        return _digest(self.data_digest, self.metric.name, str(self.batch))

    def evaluate(self, session: Session, reference: Session | None) -> float:
        """Stream all batches through the metric.

        A metric that compares with fp32 runs the fp32 model once on each batch, and again only
        on batches whose outputs are too large to be cached.

        Raises:
            UsageError: If the metric says nothing on this data.
        """
        total = self.metric.start()
        exact = None
        if self.metric.needs_reference:
            exact = self._cached(session if reference is None else reference)
            session = exact if reference is None else session
        for batch in self.data.batches(self.batch):
            outputs = batch.trim(session.run(batch.feeds))
            beside = None
            if exact is not None:
                beside = outputs if exact is session else batch.trim(exact.run(batch.feeds))
            total.update(outputs, batch.labels, beside)
        if reference is None:
            self.warnings[:] = total.doubts()
        return total.result()

    def _cached(self, session: Session) -> CachedSession:
        """``session``, run once on each batch."""
        if isinstance(session, CachedSession):
            return session
        if not self.exact or self.exact[0].session is not session:
            self.exact[:] = [CachedSession(session)]
        return self.exact[0]

    def calibration(self) -> Iterable[Feeds]:
        """The calibration feeds given."""
        return self.calibrate()

    def timing(self) -> Sequence[Feeds]:
        """The first full batch."""
        return [batch.feeds for batch in islice(self.data.batches(self.batch), 1)]


@dataclass(slots=True, kw_only=True)
class FunctionWorkload:
    """A user's evaluation function; feeds of its first call serve if no others are given."""

    function: EvalFunction
    name: str
    lower_is_better: bool = False
    calibrate: CalibrationFunction | None = None
    remembered: list[Feeds] = field(default_factory=list[Feeds])
    worst: None = None
    warnings: tuple[str, ...] = ()

    @property
    def higher_is_better(self) -> bool:
        """As the user states it."""
        return not self.lower_is_better

    @property
    def digest(self) -> str:
        """Of the function's name and its code, as far as that can be read."""
        return _digest(self.name, source_digest(self.function))

    def evaluate(self, session: Session, reference: Session | None) -> float:
        """Call the user's function with the session.

        Raises:
            UserCodeError: If the function fails or returns no number.
        """
        del reference
        run = Run(session, remember=not self.remembered)
        with guarded(
            "the evaluation function failed",
            where=self.name,
            fix="it gets run(feeds) and returns a number: try it on the fp32 model alone",
        ):
            result = float(self.function(run))
        self.remembered = self.remembered or run.seen()
        return result

    def calibration(self) -> Iterable[Feeds]:
        """The calibration feeds given, else some feeds of the baseline evaluation."""
        if self.calibrate is not None:
            return self.calibrate()
        most = max((samples(feeds) for feeds in self.remembered), default=1)
        return spread(self.remembered, max(_TIMED_FEEDS, math.ceil(MOST_PROBED_ROWS / most)))

    def timing(self) -> Sequence[Feeds]:
        """Feeds of small, middle and large size, from the calibration or the evaluation."""
        feeds = self.remembered
        if self.calibrate is not None:
            feeds = list(islice(self.calibrate(), _LOOKED_AT))
        return spread(feeds, _TIMED_FEEDS)


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
    """The first ``rows`` samples, if all inputs have the same free dimension as first axis."""
    fronts = {spec.shape[0] if spec.shape else None for spec in inputs}
    symbol = fronts.pop() if len(fronts) == 1 else None
    if not isinstance(symbol, str) or not symbol:
        return feeds
    return each_call(feeds, lambda call: {n: array[:rows] for n, array in call.items()})


def samples(feeds: Feeds) -> int:
    """Samples of a call: the size of the inputs' first axis; 1 if they do not share it."""
    fronts = {a.shape[0] if a.shape else None for a in feeds.values()}
    return (fronts.pop() if len(fronts) == 1 else None) or 1


def probed(
    calls: Iterable[Feeds], inputs: Sequence[TensorSpec], rows: int = PROBED_ROWS
) -> list[Feeds]:
    """The first calls that together have at least ``rows`` samples, cut to ``rows`` each."""
    found: list[Feeds] = []
    have = 0
    for feeds in calls:
        found.append(thinned(feeds, inputs, rows))
        have += samples(found[-1])
        if have >= rows:
            break
    return found


def probed_rows(points: int) -> int:
    """Samples on which each of ``points`` roundings is probed: the more, the fewer points.

    The errors of some models, recurrent ones for example, differ much from sample to sample.
    """
    rows = _PROBED_IN_ALL // max(points, 1)
    return min(max(rows, PROBED_ROWS), MOST_PROBED_ROWS)


def run_all(session: Session, feeds: Sequence[Mapping[str, Array]]) -> None:
    """One pass over the timing feeds."""
    for one in feeds:
        session.run(one)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
