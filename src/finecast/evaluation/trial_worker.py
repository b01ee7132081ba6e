"""Evaluates plans, and runs the user's functions, for a process that does not want to crash.

``workers`` has this done in a ``worker_process``; its argument is the folder of the package.
A request's payload has the arguments of a function below, and the answer's what it returned
or raised. Both are pickled: the two processes are one program. Requests are idempotent: each
has all that it depends on, and what this process keeps of earlier ones only saves time.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import TextIOBase
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

if __name__ == "finecast_served" and sys.argv[1] not in sys.path:
    sys.path.insert(0, sys.argv[1])

from finecast.data.functions import load_function, source_digest
from finecast.data.sources import user_feeds
from finecast.data.workload import TimedCalls
from finecast.engines.base import Feeds
from finecast.errors import EngineError, FinecastError
from finecast.native.opening import opened
from finecast.tuning.executor import Evaluated, LocalExecutor
from finecast.tuning.measuring import Measuring

if TYPE_CHECKING:
    from finecast.data.datasets import Part
    from finecast.data.metrics import Scoring
    from finecast.evaluation.workers import Opening
    from finecast.measure.racing import Race
    from finecast.native.subject import Built, Origin, Subject
    from finecast.tuning.measuring import Racing

_SERVED: Final = "finecast_served"
"""The name that ``worker_process`` gives the file that it runs."""
_MOST_ITERATED: Final = 8
"""Passes over calibration data that are kept: the caller abandons some of them half-way."""


class Served:
    """What this process has opened."""

    def __init__(self) -> None:
        self.opened: Opening | None = None
        self.executor: LocalExecutor | None = None
        self.made: tuple[Origin, Built] | None = None
        self.alone: tuple[Measuring, Mapping[str, Built], Racing] | None = None
        self.passes: OrderedDict[str, tuple[int, Iterator[Feeds]]] = OrderedDict()

    def answer(
        self, request: Mapping[str, Any], payload: bytes, tell: Callable[..., None]
    ) -> tuple[dict[str, str], bytes]:
        """Do what ``request`` calls for. Never raises."""
        if __name__ == _SERVED:
            sys.stdout, sys.stderr = (_Told(s, tell) for s in ("stdout", "stderr"))
        try:
            result = getattr(self, request["call"])(*pickle.loads(payload))
            return {"status": "done"}, pickle.dumps(result)
        except MemoryError:
            return {"status": "died", "text": "ran out of memory"}, b""
        except BaseException as error:  # what a user's code raises, Ctrl-C's exception too
            if not isinstance(error, FinecastError):
                error.add_note(traceback.format_exc())
            return {"status": "raised"}, pickle.dumps(error)

    def on(
        self,
        opening: Opening,
        learned: Mapping[str, Any] | None,
        call: str,
        arguments: Sequence[Any],
    ) -> Any:
        """What ``call`` gives for a model and its data, which are opened unless they are.

        ``learned`` is what another workload of the data learned of the baseline.

        Raises:
            FinecastError: If that fails here.
        """
        if self.opened != opening:
            self.open(opening)
        if learned is not None:
            self._executor.measuring.workload.learn(learned)
        return getattr(self, call)(*arguments)

    def open(self, opening: Opening) -> bool:
        """Open model and data.

        Returns:
            Whether it is the model that the calling process has.

        Raises:
            FinecastError: If that fails here.
        """
        self.close()
        subject = _subject(opening)
        if subject is None:
            return False
        workload = subject.model.workload(opening.data.loaded(), subject.reference)
        workload = opening.objective.timed(workload)
        better = workload.higher_is_better
        self.executor = LocalExecutor(
            criterion=replace(opening.criterion, higher_is_better=better),
            measuring=Measuring(
                objective=opening.objective, subject=subject, workload=workload
            ),
        )
        self.opened = opening
        return True

    def close(self) -> None:
        """Forget model and data."""
        self.opened = self.executor = self.made = None
        self.passes.clear()

    def baseline(self) -> tuple[float, Mapping[str, Any]]:
        """The metric to keep, and what the workload learned of its evaluation."""
        executor = self._executor
        workload = executor.measuring.workload
        return executor.baseline(workload), workload.learned()

    def baseline_part(self, part: Part) -> tuple[Scoring, Mapping[str, Any]]:
        """The fp32 model's metric of a part, and what was learned; of the first one before."""
        return self._executor.baseline_part(part)

    def evaluate(self, origin: Origin) -> Evaluated:
        """Evaluate the model of an origin."""
        return self._executor.evaluate(self._made(origin))

    def evaluate_part(self, part: Part, origin: Origin) -> tuple[Scoring, float]:
        """Evaluate the model of an origin on a part of the data."""
        return self._executor.evaluate_part(self._made(origin), part)

    def race(self, racing: Racing) -> tuple[Race, Sequence[str]]:
        """Models of origins timed here; and what the subject has to tell."""
        measuring, self.made = self._executor.measuring, None
        built = _built(measuring.subject, racing)
        race = measuring.race(built, racing.effort, streams=racing.streams, call=racing.call)
        return race, measuring.subject.told

    def load_alone(self, opening: Opening, racing: Racing) -> bool:
        """Load models of origins, to be timed without data; whether it finds the model."""
        opens = self.opened is not None and replace(self.opened, data=opening.data) == opening
        subject = self._executor.measuring.subject if opens else _subject(opening)
        if subject is None:
            return False
        measuring = Measuring(
            objective=opening.objective, subject=subject, workload=TimedCalls(calls=())
        )
        built = _built(subject, racing)
        if not racing.streams:
            for one in built.values():
                subject.session(one)
        self.alone = measuring, built, racing
        return True

    def race_alone(self, calls: Sequence[Feeds]) -> Race:
        """The models that ``load_alone`` loaded timed here on ``calls``, and forgotten."""
        if self.alone is None:
            raise EngineError("the process that loaded the models is gone")
        (measuring, built, racing), self.alone = self.alone, None
        measuring = replace(measuring, workload=TimedCalls(calls=calls))
        return measuring.race(built, racing.effort, streams=racing.streams)

    def _made(self, origin: Origin) -> Built:
        """The model of an origin, which stays for its other parts."""
        if self.made is None or self.made[0] != origin:
            self.made = None
            self.made = origin, self._executor.measuring.subject.made_from(origin)
        return self.made[1]

    @staticmethod
    def load(spec: str) -> None:
        """Import the file of a user's function."""
        load_function(spec)

    @staticmethod
    def digest(spec: str) -> str:
        """The digest of a user's function, and of what it has imported by now."""
        return source_digest(load_function(spec))

    def feeds(self, spec: str, name: str, index: int) -> Feeds | None:
        """Those of an index in a pass over what a user's function yields; None at its end.

        A pass of a name goes on where it was, or begins anew and leaves out those before.
        """
        at, remaining_feeds = self.passes.pop(name, (0, iter(())))
        if at != index or not index:
            remaining_feeds = islice(user_feeds(load_function(spec)), index, None)
        self.passes[name] = index + 1, remaining_feeds
        if len(self.passes) > _MOST_ITERATED:
            self.passes.popitem(last=False)
        return next(remaining_feeds, None)

    @property
    def _executor(self) -> LocalExecutor:
        assert self.executor is not None  # ``open`` made it
        return self.executor


def _subject(opening: Opening) -> Subject | None:
    """The model in its engine; None if its path has another one than the caller's.

    Raises:
        FinecastError: If that fails here.
    """
    if opening.folder:
        os.chdir(opening.folder)
    os.environ.update(opening.environment)
    how = opening.how
    model = opened(opening.model, how, output=opening.output)
    model = model if how.from_type is None else model.to_fp32(how.from_type)
    return model.subject(opening.engine, None) if model.digest == opening.digest else None


def _built(subject: Subject, racing: Racing) -> Mapping[str, Built]:
    return {name: subject.made_from(origin) for name, origin in racing.models.items()}


class _Told(TextIOBase):
    """A standard stream whose text is printed by the calling process."""

    def __init__(self, status: str, print_there: Callable[[str, str], None]) -> None:
        self._status, self._print = status, print_there

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        if text:
            self._print(text, self._status)
        return len(text)


if __name__ == _SERVED:
    answer = Served().answer
