"""Evaluations in worker processes, which open model and data by their paths.

The user's own functions are loaded there alone. A worker is started once and kept; it ends
with this process, whatever ends that.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from finecast.data.criterion import Criterion
from finecast.data.datasets import Part
from finecast.data.functions import FunctionElsewhere
from finecast.data.scoring import Scoring
from finecast.data.sources import DataOptions, is_npz
from finecast.data.workload import Workload
from finecast.engines.base import Feeds
from finecast.errors import EngineError, FinecastError, OutOfMemoryError, UserCodeError
from finecast.native.model import OpenedModel, ReadOptions
from finecast.native.subject import Built, Origin, Subject
from finecast.processes.worker import IN_WORKER, Answer, Worker, WorkerDiedError
from finecast.tuning import trial_worker
from finecast.tuning.executor import Evaluated, Executor, LostTrialError
from finecast.tuning.goal import Execution, Objective, TuneRequest

# Without a limit of its own a trial may take this long, and so many times as long as fp32. An
# emulated format may be many times as slow as fp32; what hangs takes forever.
_LEAST_TRIAL_S: Final = 600.0
_TIMES_FP32: Final = 20.0
_NO_LIMIT: Final = 1 << 60
# A model that takes more than this part of the memory is evaluated in one process alone: a
# second one has the fp32 model and the plan's once more.
_LARGE: Final = 16
# Libraries read variables as they are imported, and then their threads and instructions stay.
# These name folders, which are read when they are needed, or are no library's.
_READ_LATE: Final = frozenset(
    {"HOME", "LOCALAPPDATA", "PYTEST_CURRENT_TEST", "TMPDIR", "USERPROFILE", "XDG_CACHE_HOME"}
)
_ALONE: Final = "call it in python alone, on the fp32 model, to see more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a worker needs to evaluate the plans of a model: all of it by path or as values.

    Attributes:
        model: The model's file or folder.
        how: How it is read.
        output: Where the result goes, which decides among frontends.
        digest: Identifies the model's content.
        data: The data, with functions as ``FILE.py:FUNCTION``.
        engine: ``NAME:DEVICE``.
        objective: Decides the configuration that models run in.
        criterion: What of the accuracy is kept.
        folder: The current folder, from which relative paths start.
        environment: The environment's variables.
    """

    model: Path
    how: ReadOptions
    output: Path | None
    digest: str
    data: DataOptions
    engine: str
    objective: Objective
    criterion: Criterion
    folder: str
    environment: Mapping[str, str]


class WorkerProcess:
    """One worker process that evaluates, and what it has opened.

    It is started anew where the environment of this process has changed since.
    """

    def __init__(self) -> None:
        self._worker = Worker(
            trial_worker.__file__,
            str(Path(trial_worker.__file__).parents[2]),
            instead=trial_worker.answer,
            environment=IN_WORKER,
        )
        self._environment: dict[str, str] = {}

    def start(self) -> None:
        """Start the process unless it runs, without waiting for it."""
        now = {k: v for k, v in os.environ.items() if k not in _READ_LATE}
        if self._environment != now:
            self._environment = now
            self._worker.end()
        self._worker.warm_up()

    def ask(
        self, call: str, *arguments: Any, limits: Mapping[str, float] | None = None
    ) -> Any:
        """What a function of ``trial_worker`` returns there, or raises.

        Raises:
            WorkerDiedError: If the process dies.
            Exception: What the function raises.
        """
        request = {"call": call, **(limits or {})}
        header, result = self._asked(request, pickle.dumps(arguments))
        found = pickle.loads(result)  # this process's own worker made it
        if header["status"] == "raised":
            raise found
        return found

    def _asked(self, request: Mapping[str, Any], payload: bytes) -> Answer:
        return self._worker.ask(request, payload, _print)

    def end(self) -> None:
        """End the process."""
        self._worker.end()


def _print(status: str, text: str) -> None:
    """Print what a user's function printed in a worker."""
    stream = sys.stdout if status == "stdout" else sys.stderr
    stream.write(text)
    stream.flush()


@cache
def kept_worker(number: int) -> WorkerProcess:
    """A worker of this process, for all of its searches: its imports take a second."""
    del number
    return WorkerProcess()


class _Opened:
    """A worker process with model and data, opened anew after it died."""

    def __init__(self, opening: Opening, process: WorkerProcess) -> None:
        self._opening, self._process = opening, process
        self._is_open = False

    def open(self, learned: Mapping[str, Any] | None) -> bool:
        """Open model and data, unless they are; whether it finds the same model at its path.

        Raises:
            WorkerDiedError: If that ends the process.
        """
        if not self._is_open:
            self._is_open = self._process.ask("open", self._opening, learned)
        return self._is_open

    def ask(self, call: str, *arguments: Any, limits: Mapping[str, float]) -> Any:
        """As ``WorkerProcess.ask``."""
        try:
            return self._process.ask(call, *arguments, limits=limits)
        except (WorkerDiedError, OutOfMemoryError):
            self._is_open = False
            raise

    def close(self) -> None:
        """Forget model and data; the process stays for the next search."""
        if self._is_open:
            with suppress(WorkerDiedError):
                self._process.ask("close")
        self._is_open = False

    def end(self) -> None:
        """End the process."""
        self._is_open = False
        self._process.end()


class WorkerExecutor(Executor):
    """Evaluates in worker processes: the baseline in the first, parts of the data in all.

    Law: the parts joined are the whole, bit for bit, as metrics keep terms by batch.

    Args:
        opening: What they open.
        execution: What a trial may take.
        processes: The workers.
    """

    def __init__(
        self, opening: Opening, execution: Execution, processes: Sequence[WorkerProcess]
    ) -> None:
        self._opening, self._execution = opening, execution
        self._workers = [_Opened(opening, one) for one in processes]
        self._learned: Mapping[str, Any] | None = None
        self._parts, self._fp32_s = 1, 0.0

    @property
    def _first(self) -> _Opened:
        return self._workers[0]

    def opens(self) -> bool:
        """Have the first worker open model and data; whether it finds the same model there.

        Raises:
            FinecastError: If that fails, or ends the worker.
        """
        try:
            return self._first.open(None)
        except WorkerDiedError as error:
            raise self._died(f"to load the model {error}") from error

    def data(self) -> DataOptions:
        """The data's options for this process, where the user's functions are not loaded.

        Raises:
            FinecastError: If the functions cannot be loaded.
        """
        given = self._opening.data
        calib, evaluate = given.calib, given.evaluate
        if isinstance(calib, str) and not is_npz(calib):
            feeds = partial(self._feeds, calib)
            given = replace(given, calib=self._elsewhere(calib, feeds))
        if isinstance(evaluate, str):
            function = self._elsewhere(evaluate)
            given = replace(given, evaluate=function, evaluate_name=evaluate)
        return given

    def baseline(self, workload: Workload) -> float:
        """The metric to keep, by the first worker.

        Raises:
            UserCodeError, EngineError: If that ends the process: no plan can be judged.
        """
        start = time.perf_counter()
        try:
            self._first.open(None)
            found = self._first.ask("baseline", limits=self._limits(math.inf))
        except WorkerDiedError as error:
            raise self._died(f"the evaluation of the fp32 model {error}") from error
        self._fp32_s = time.perf_counter() - start
        baseline, learned = found
        self._learned = learned
        workload.learn(learned)
        self._parts = min(workload.parts, len(self._workers))
        return baseline

    def evaluate(self, built: Built) -> Evaluated:
        """Evaluate a model that the workers make anew from its origin."""
        limits = self._limits(max(_LEAST_TRIAL_S, _TIMES_FP32 * self._fp32_s))
        try:
            if self._parts == 1:
                self._first.open(self._learned)
                return self._first.ask("evaluate", built.origin, limits=limits)
            return self._joined(built.origin, limits)
        except (WorkerDiedError, OutOfMemoryError) as error:
            text = error.what if isinstance(error, OutOfMemoryError) else str(error)
            raise LostTrialError(text) from error

    def _joined(self, origin: Origin, limits: Mapping[str, float]) -> Evaluated:
        """The parts of an evaluation, each in a worker of its own."""

        def part(index: int) -> tuple[Scoring, float]:
            worker = self._workers[index]
            worker.open(self._learned)
            wanted = Part(index=index, count=self._parts)
            return worker.ask("evaluate_part", origin, wanted, limits=limits)

        with ThreadPoolExecutor(self._parts) as pool:
            try:
                (scoring, error), *others = pool.map(part, range(self._parts))
            except BaseException:  # a part failed, or Ctrl-C: the others are of no use
                for one in self._workers:
                    one.end()
                raise
        for other, _ in others:
            scoring.absorb(other)
        return Evaluated(metric=scoring.result(), error=error)

    def close(self) -> None:
        """Have the workers forget model and data; they stay for the next search."""
        for one in self._workers:
            one.close()

    def _limits(self, default_s: float) -> dict[str, float]:
        """The limits of an evaluation; without one of the user's own ``default_s`` holds."""
        execution = self._execution
        seconds, gib = execution.trial_timeout_s or default_s, execution.trial_memory_gib
        memory = _NO_LIMIT if gib is None else int(gib * (1 << 30))
        limits: dict[str, float] = {"memory": memory}
        return limits if math.isinf(seconds) else {**limits, "seconds": seconds}

    def _elsewhere(
        self, spec: str, feeds: Callable[[], Iterator[Feeds]] | None = None
    ) -> FunctionElsewhere:
        """A function that the first worker has loaded."""
        self._of_function(spec, "load")
        return FunctionElsewhere(
            spec=spec, digest=partial(self._of_function, spec, "digest"), feeds=feeds
        )

    def _feeds(self, spec: str) -> Iterator[Feeds]:
        """What a user's function yields in the first worker."""
        number = self._of_function(spec, "begin_feeds")
        while (feeds := self._of_function(spec, "next_feeds", number)) is not None:
            yield feeds

    def _of_function(self, spec: str, call: str, *arguments: Any) -> Any:
        """What the first worker answers about a user's function.

        Raises:
            UserCodeError: If the function ends the worker.
        """
        try:
            return self._first.ask(call, spec, *arguments, limits=self._limits(math.inf))
        except WorkerDiedError as error:
            raise UserCodeError(f"it {error}", where=spec, fix=_ALONE) from error

    def _died(self, text: str) -> FinecastError:
        """The error where the worker died before any trial."""
        evaluate = self._opening.data.evaluate
        if isinstance(evaluate, str):
            return UserCodeError(text, where=evaluate, fix=_ALONE)
        fix = "try another --engine"
        return EngineError(text, where=str(self._opening.model), fix=fix)


@contextmanager
def evaluating(
    model: OpenedModel, how: ReadOptions, output: Path | None, request: TuneRequest
) -> Generator[Callable[[Subject], WorkerExecutor | None]]:
    """Gives the executor of a subject of ``model`` in a worker, which starts at once.

    None where the worker could not open the same by path: Python objects, an emulated device,
    or a model so large that it may not fit into memory twice.
    """
    data, execution = request.data, request.execution
    given = (data.data, data.calib, data.evaluate)
    paths = all(one is None or isinstance(one, str | Path) for one in given)
    there = model.path.exists() and how.example_inputs is None
    small = model.size_bytes <= _memory_bytes() // _LARGE
    if not (paths and there and small and execution.jobs and request.device is None):
        yield lambda subject: None
        return
    processes = [kept_worker(number) for number in range(execution.jobs)]
    for process in processes:
        process.start()
    made: list[WorkerExecutor] = []

    def executor(subject: Subject) -> WorkerExecutor | None:
        opening = Opening(
            model=model.path,
            how=how,
            output=output,
            digest=model.digest,
            data=data,
            engine=subject.runs_in,
            objective=request.goal.objective,
            criterion=request.goal.criterion,
            folder=os.getcwd(),
            environment=dict(os.environ),
        )
        one = WorkerExecutor(opening, execution, processes)
        made.append(one)
        return one if one.opens() else None

    try:
        yield executor
    finally:
        for one in made:
            one.close()


def _memory_bytes() -> int:
    """The memory of this machine; where that is not told, more than any model takes."""
    if not hasattr(os, "sysconf"):
        return _NO_LIMIT
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
