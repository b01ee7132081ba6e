"""A user's evaluation function, what it runs, and the workload that it judges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, ClassVar, Final, cast, final

import numpy as np

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
from finecast.data.metrics import Score
from finecast.data.samples import Indices
from finecast.data.streams import to_array
from finecast.data.workload import (
    MOST_PROBED_ROWS,
    CalibrationFunction,
    Workload,
    digest_of,
    feed_bytes,
    samples,
    spread,
)
from finecast.engines.base import Array, Feeds, Session, Steps, calls_of
from finecast.engines.exact import feeds_digest
from finecast.errors import UsageError
from finecast.naming import kind_of, number_of
from finecast.usercode import guarded

EvalFunction = Callable[["Run"], "float | Array"]

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

    def __call__(self, feeds: Mapping[str, Any] | Any) -> dict[str, Array]:
        """Run the model once on arrays, or tensors of any library; outputs by name.

        A model with one input takes its array alone, too.

        Raises:
            UsageError: If it has several, and they are not given by their names.
        """
        feeds = {name: to_array(value) for name, value in self._by_name(feeds).items()}
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

    def _by_name(self, feeds: Mapping[str, Any] | Any) -> Mapping[str, Any]:
        if isinstance(feeds, Mapping):
            return cast("Mapping[str, Any]", feeds)
        names = [spec.name for spec in self._session.inputs]
        if len(names) != 1:
            count = number_of(len(names), "input")
            raise UsageError(
                f"run gets {kind_of(feeds)}, and the model has {count}",
                where="run(feeds)",
                fix=f"give a dict of arrays by name: {', '.join(map(repr, names)) or 'none'}",
            )
        return {names[0]: feeds}

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
        return digest_of(self.name, source_digest(self.function))

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


def _shapes(feeds: Feeds) -> object:
    """The shapes of all inputs of each call, by which calls take as long as each other."""
    return tuple(
        tuple(sorted((name, array.shape) for name, array in call.items()))
        for call in calls_of(feeds)
    )
