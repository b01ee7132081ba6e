"""Evaluations in worker processes, which open model and data by their paths.

The user's own functions are loaded there alone. A worker is started once and kept; it ends
with this process, whatever ends that.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import compress, count
from pathlib import Path
from typing import Any, Final, TypeVar, final
from uuid import uuid4

from finecast.data.criterion import Criterion
from finecast.data.datasets import Part
from finecast.data.functions import FunctionElsewhere
from finecast.data.metrics import Scoring
from finecast.data.options import DataOptions, names_function
from finecast.data.workload import Workload
from finecast.engines.base import Feeds
from finecast.errors import (
    EngineError,
    FinecastError,
    ModelError,
    OutOfMemoryError,
    UsageError,
    UserCodeError,
)
from finecast.evaluation import trial_worker
from finecast.measure.racing import Race
from finecast.native.model import OpenedModel, ReadOptions
from finecast.native.subject import Built, Origin, Subject
from finecast.plugin import executors, load
from finecast.processes.memory import memory_bytes
from finecast.processes.worker import IN_WORKER, Answer, Telling, Worker, WorkerDiedError
from finecast.tuning.executor import Evaluated, Executor, LostTrialError
from finecast.tuning.goal import LOCAL, Execution, Objective, TuneRequest, place_of
from finecast.tuning.measuring import Afresh, Racer, Racing

# A trial may take this long, and so many times as long as fp32. An emulated format may be many
# times as slow as fp32; what hangs takes forever.
_LEAST_TRIAL_S: Final = 600.0
_TIMES_FP32: Final = 20.0
# So many parts of the data for each of several workers: none waits long for the slowest.
_PARTS_A_WORKER: Final = 4
# A model that takes more than this part of the memory is evaluated in one process alone: a
# second one has the fp32 model and the plan's once more.
_LARGE: Final = 16
# Libraries read variables as they are imported, and then their threads and instructions stay.
# These name folders, which are read when they are needed, or are no library's.
_READ_LATE: Final = frozenset(
    {"HOME", "LOCALAPPDATA", "PYTEST_CURRENT_TEST", "TMPDIR", "USERPROFILE", "XDG_CACHE_HOME"}
)
# Other processes in which the result is timed once more; with this one there are three.
_OTHERS: Final = 2
_ALONE: Final = "call it in python alone, on the fp32 model, to see more"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a worker needs to evaluate the plans of a model: all of it by path or as values.

    Attributes:
        model: The model's file or folder.
        external: Other files that are read with it.
        how: How it is read.
        output: Where the result goes, which decides among frontends.
        digest: Identifies the model's content.
        data: The data, with functions as ``FILE.py:FUNCTION``.
        has_truth: Whether the baseline is that of an fp64 model, with fp32's beside it.
        objective: Decides the configuration that models run in.
        criterion: What of the accuracy is kept.
        folder: The current folder, from which relative paths start.
    """

    model: Path
    external: tuple[Path, ...]
    how: ReadOptions
    output: Path | None
    digest: str
    data: DataOptions
    engine: str
    has_truth: bool
    objective: Objective
    criterion: Criterion
    folder: str
    environment: Mapping[str, str]


class NodeLostError(WorkerDiedError):
    """The machine of a worker is gone, and with it what it worked on."""


class WorkerProcess(ABC):
    """A worker process, here or on another machine.

    Attributes:
        times: Whether models can be timed there, while nothing else runs on the machine.
    """

    times: bool = False

    @abstractmethod
    def start(self) -> None:
        """Start the process unless it runs, without waiting for it."""

    @abstractmethod
    def relay(self, request: Mapping[str, Any], payload: bytes, tell: Telling) -> Answer:
        """Its answer to a request; ``tell`` gets what is printed there.

        Raises:
            WorkerDiedError: If the process dies.
        """

    @abstractmethod
    def end(self) -> None:
        """End the process; the next request starts another one."""

    def opening(self, opening: Opening) -> Opening:
        """``opening`` with paths as the process knows them."""
        return opening

    def function(self, spec: str) -> str:
        """``FILE.py:FUNCTION`` as the process knows it."""
        return spec

    @final
    def ask(self, call: str, *arguments: Any, how: Mapping[str, float] | None = None) -> Any:
        """What a function of ``trial_worker`` returns there, or raises.

        ``how`` has limits of the request; ``alone`` if nothing else may run on the machine.

        Raises:
            WorkerDiedError: If the process dies.
            Exception: What the function raises.
        """
        request = {"call": call, **(how or {})}
        header, result = self.relay(request, pickle.dumps(arguments), _print)
        answer = pickle.loads(result)  # a worker of this search made it
        if header["status"] == "raised":
            raise answer
        return answer


class LocalWorker(WorkerProcess):
    """A worker process of this machine.

    It is started anew where the environment of this process has changed since.
    """

    def __init__(self) -> None:
        self._worker = Worker(
            trial_worker.__file__,
            str(Path(trial_worker.__file__).parents[2]),
            instead=trial_worker.Served().answer,
            environment=IN_WORKER,
        )
        self._environment: dict[str, str] = {}

    def start(self) -> None:
        """Start it unless it runs, without waiting for it."""
        now = {k: v for k, v in os.environ.items() if k not in _READ_LATE}
        if self._environment != now:
            self._environment = now
            self._worker.end()
        self._worker.warm_up()

    def relay(self, request: Mapping[str, Any], payload: bytes, tell: Telling) -> Answer:
        """Its answer; raises WorkerDiedError."""
        return self._worker.call(request, payload, tell=tell)

    @property
    def is_running(self) -> bool:
        """Whether it was started and is not ended."""
        return self._worker.child is not None

    def is_apart(self) -> bool:
        """Whether it is another process than this one; waits until that is ready."""
        return self._worker.serving() is not None

    def end(self) -> None:
        """End it."""
        self._worker.end()


def _print(status: str, text: str) -> None:
    """Print what a user's function printed in a worker."""
    stream = sys.stdout if status == "stdout" else sys.stderr
    stream.write(text)
    stream.flush()


@cache
def kept_worker(number: int) -> LocalWorker:
    """A worker of this process, for all of its searches: its imports take a second."""
    return LocalWorker()


class _Opened:
    """A worker process with model and data, opened anew after it died."""

    def __init__(self, opening: Opening, process: WorkerProcess) -> None:
        self._opening, self.process = opening, process
        self._there: Opening | None = None
        self._is_open = False

    def open(self) -> bool:
        """Open model and data, unless they are; whether it finds the same model at its path.

        Raises:
            WorkerDiedError: If that ends the process.
        """
        if not self._is_open:
            self._there = self._there or self.process.opening(self._opening)
            self._is_open = self.process.ask("open", self._there)
        return self._is_open

    def on(
        self,
        learned: Mapping[str, Any] | None,
        call: str,
        *arguments: Any,
        how: Mapping[str, float] | None = None,
    ) -> Any:
        """What a call gives for model and data, as ``WorkerProcess.ask``.

        Opening them is not limited, unless the process that had them open is gone.
        """
        self.open()
        try:
            return self.process.ask("on", self._there, learned, call, arguments, how=how)
        except (WorkerDiedError, OutOfMemoryError):
            self._is_open = False
            raise

    def close(self) -> None:
        """Forget model and data; the process stays for the next search."""
        if self._is_open:
            with suppress(WorkerDiedError):
                self.process.ask("close")
        self._is_open = False

    def end(self) -> None:
        self._is_open = False
        self.process.end()


class WorkerExecutor(Executor):
    """Evaluates in worker processes, a part of the data at a time if there are several.

    Law: the parts joined are the whole, bit for bit, as metrics keep terms by batch.

    Attributes:
        parts: The parts of an evaluation, once the baseline was evaluated.
    """

    def __init__(
        self, opening: Opening, execution: Execution, processes: Sequence[WorkerProcess]
    ) -> None:
        self._opening, self._execution = opening, execution
        self._workers = [_Opened(opening, one) for one in processes]
        self._learned: Mapping[str, Any] | None = None
        self.parts, self._fp32_s = 1, 0.0

    @property
    def processes(self) -> Sequence[WorkerProcess]:
        """The workers that are left."""
        return [one.process for one in self._workers]

    @property
    def _first(self) -> _Opened:
        return self._workers[0]

    def opens(self) -> bool:
        """Have the first worker open model and data; whether it finds the same model there.

        It does not if a frontend that reads the model was registered in this process alone.

        Raises:
            FinecastError: If the data cannot be read, or that ends the worker.
        """
        try:
            return self._first.open()
        except ModelError:
            return False  # this process has opened it
        except WorkerDiedError as error:
            raise self._died(
                f"opening the model, its data and their functions {error}"
            ) from error

    def data(self) -> DataOptions:
        """The data's options for this process, where the user's functions are not loaded.

        Raises:
            FinecastError: If the functions cannot be loaded.
        """
        options = self._opening.data
        calib, evaluate = options.calib, options.evaluate
        if isinstance(calib, str) and names_function(calib):
            feeds = partial(self._feeds, calib)
            options = replace(options, calib=self._elsewhere(calib, feeds))
        if isinstance(evaluate, str):
            function = self._elsewhere(evaluate)
            options = replace(options, evaluate=function, evaluate_name=evaluate)
        return options

    def baseline(self, workload: Workload) -> float:
        """The metric to keep.

        Raises:
            UserCodeError, EngineError: If that ends the process: no plan can be judged.
        """
        start = time.perf_counter()
        several = len(self._workers) > 1
        self.parts = min(workload.parts, several * _PARTS_A_WORKER * len(self._workers) or 1)
        try:
            if self.parts > 1 and not self._opening.has_truth:
                baseline, learned = self._joined_baseline()
            else:
                baseline, learned = self._anywhere(lambda w: w.on(None, "baseline"))
        except WorkerDiedError as error:
            raise self._died(f"the evaluation of the fp32 model {error}") from error
        self._fp32_s = time.perf_counter() - start
        self._learned = learned
        workload.learn(learned)
        return baseline

    def _joined_baseline(self) -> tuple[float, Mapping[str, Any]]:
        """The metric to keep, of parts, and what was learned of them."""
        first = Part(index=0, count=self.parts)
        scoring, learned = self._anywhere(
            lambda worker: worker.on(None, "baseline_part", first)
        )
        self._learned = learned
        others = self._in_parts(1, ("baseline_part",))
        for other, _ in others:
            scoring.absorb(other)
        samples = learned["samples"] + sum(one["samples"] for _, one in others)
        totals = {"warnings": scoring.doubts(), "samples": samples}
        return scoring.result(), {**learned, **totals}

    def evaluate(self, built: Built) -> Evaluated:
        """Evaluate a model that the workers make anew from its origin."""
        how = {"seconds": max(_LEAST_TRIAL_S, _TIMES_FP32 * self._fp32_s)}
        try:
            if self.parts == 1:
                return self._anywhere(
                    lambda worker: worker.on(self._learned, "evaluate", built.origin, how=how)
                )
            return self._joined(built.origin, how)
        except NodeLostError as error:
            raise EngineError(
                f"no node of the cluster is left: the evaluation {error}",
                where=f"--executor {self._execution.executor}",
                fix="run it again with --resume: the study keeps what was finished",
            ) from error
        except (WorkerDiedError, OutOfMemoryError) as error:
            text = error.what if isinstance(error, OutOfMemoryError) else str(error)
            raise LostTrialError(text) from error

    def _anywhere(self, call: Callable[[_Opened], T]) -> T:
        """What a worker with model and data gives; of one that is gone, another one.

        Raises:
            WorkerDiedError: If it dies, or none is left.
        """
        while True:
            try:
                return call(self._first)
            except NodeLostError:
                if len(self._workers) == 1:
                    raise
                del self._workers[0]

    def _joined(self, origin: Origin, how: Mapping[str, float]) -> Evaluated:
        (scoring, error), *others = self._in_parts(0, ("evaluate_part", origin), how)
        for other, _ in others:
            scoring.absorb(other)
        return Evaluated(metric=scoring.result(), error=error)

    def _in_parts(
        self,
        first: int,
        call: tuple[str, *tuple[Any, ...]],
        how: Mapping[str, float] | None = None,
    ) -> list[tuple[Scoring, Any]]:
        """What calls give, each of a part, from part ``first`` on, in their order.

        Each worker takes the next part as it is done with one.

        Raises:
            NodeLostError: If all workers are gone.
        """
        name, *arguments = call
        waiting = deque(range(first, self.parts))
        answers_by_part: dict[int, tuple[Scoring, Any]] = {}

        def work(worker: _Opened) -> _Opened | None:
            while waiting:
                with suppress(IndexError):  # another one took the last
                    index = waiting.popleft()
                    part = Part(index=index, count=self.parts)
                    try:
                        answers_by_part[index] = worker.on(
                            self._learned, name, part, *arguments, how=how
                        )
                    except NodeLostError:
                        waiting.append(index)
                        return None
            return worker

        with ThreadPoolExecutor(len(self._workers)) as pool:
            try:
                while len(answers_by_part) < self.parts - first and self._workers:
                    left = pool.map(work, self._workers)
                    self._workers = [one for one in left if one is not None]
            except BaseException:  # a part failed, or Ctrl-C: the others are of no use
                waiting.clear()
                for one in self._workers:
                    with suppress(NodeLostError):
                        one.end()
                raise
        if not self._workers:
            raise NodeLostError("was on nodes that are gone")
        return [answers_by_part[index] for index in sorted(answers_by_part)]

    @property
    def racer(self) -> Racer | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Times models where that is possible without disturbance; None if nowhere is."""
        return self._race if any(one.times for one in self.processes) else None

    def _race(self, racing: Racing) -> tuple[Race | None, Sequence[str]]:
        """Time models on one machine; where that one is lost, on another one.

        No race if none is left, or if a model ends the process. This machine, which computes
        as those do, then times them: it loads each in a process of its own first.
        """
        how = {"alone": 1.0}
        for worker in [one for one in self._workers if one.process.times]:
            try:
                return worker.on(self._learned, "race", racing, how=how)
            except NodeLostError:
                self._workers.remove(worker)
            except (WorkerDiedError, OutOfMemoryError) as error:
                return None, [
                    f"a benchmark on another machine {error}: models are timed on this one"
                ]
        return None, ["no node that times models is left: they are timed on this machine"]

    def close(self) -> None:
        """Have the workers forget model and data; they stay for the next search."""
        for one in self._workers:
            one.close()

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
        name = uuid4().hex
        for index in count():
            feeds = self._of_function(spec, "feeds", name, index)
            if feeds is None:
                return
            yield feeds

    def _of_function(self, spec: str, call: str, *arguments: Any) -> Any:
        """What the first worker answers about a user's function.

        Raises:
            UserCodeError: If the function ends the worker.
        """
        try:
            process = self._first.process
            return process.ask(call, process.function(spec), *arguments)
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
    model: OpenedModel,
    how: ReadOptions,
    output: Path | None,
    request: TuneRequest,
) -> Generator[Callable[[Subject], WorkerExecutor | None]]:
    """Gives the executor of a subject of ``model`` in a worker, which starts at once.

    None where the worker could not open the same by path: Python objects, an emulated device,
    or a model so large that it may not fit into memory twice.
    """
    data, execution = request.data, request.execution
    sources = (data.data, data.calib, data.evaluate)
    paths = all(one is None or isinstance(one, str | Path) for one in sources)
    by_path = paths and _is_there(model, how) and request.device is None
    processes: Sequence[WorkerProcess] = ()
    if execution.executor != LOCAL:
        if not by_path:
            raise UsageError(
                "models, data and functions of other machines are read by path, and of a"
                " device that is emulated nothing is evaluated there",
                where=f"--executor {execution.executor}",
                fix="give paths, without --target; or leave it out",
            )
        workers = load(executors()[place_of(execution.executor)])
        processes = workers(execution.executor, request.progress)
    elif by_path and _is_small(model):
        processes = [kept_worker(number) for number in range(execution.jobs)]
    if not processes:
        yield lambda subject: None
        return
    for process in processes:
        process.start()
    worker_executors: list[WorkerExecutor] = []

    def executor(subject: Subject) -> WorkerExecutor | None:
        opening = _opening(model, how, output, request, subject)
        worker_executor = WorkerExecutor(opening, execution, processes)
        worker_executors.append(worker_executor)
        return worker_executor if worker_executor.opens() else None

    try:
        yield executor
    finally:
        for one in worker_executors:
            one.close()


def timing_afresh(
    model: OpenedModel,
    how: ReadOptions,
    output: Path | None,
    request: TuneRequest,
    subject: Subject,
) -> Afresh | None:
    """Times models of ``subject`` in other processes of this machine.

    The process that evaluated plans is one of them, where there is one: it has loaded the
    libraries, and maybe the model. None where these could not load the model by its path,
    where no other process is wanted, or where times are modelled, those of another machine, or
    of models that compile for long.
    """
    execution = request.execution
    here = execution.executor == LOCAL and execution.jobs > 0 and request.device is None
    by_path = _is_there(model, how) and _is_small(model)
    if subject.compiles or not (here and by_path):
        return None
    opening = _opening(model, how, output, request, subject)
    return partial(_race_afresh, replace(opening, data=DataOptions()))


def _race_afresh(opening: Opening, racing: Racing, calls: Sequence[Feeds]) -> Sequence[Race]:
    """The races of other processes; of one that dies or fails there is none."""
    kept = [worker for worker in [kept_worker(0)] if worker.is_running]
    own = [LocalWorker() for _ in range(_OTHERS - len(kept))]
    processes = [*kept, *own]
    how, races = {"seconds": _LEAST_TRIAL_S}, list[Race]()

    def load(process: LocalWorker) -> bool:
        with suppress(WorkerDiedError, FinecastError):
            return process.is_apart() and process.ask("load_alone", opening, racing, how=how)
        return False

    try:
        for process in processes:
            process.start()
        with ThreadPoolExecutor(_OTHERS) as pool:  # no process loads while another one races
            loaded = [*pool.map(load, processes)]
        for process in compress(processes, loaded):
            with suppress(WorkerDiedError, FinecastError):
                races.append(process.ask("race_alone", calls, how=how))
            if process in own:
                process.end()
    finally:
        for process in own:
            process.end()
    return races


def _opening(
    model: OpenedModel,
    how: ReadOptions,
    output: Path | None,
    request: TuneRequest,
    subject: Subject,
) -> Opening:
    return Opening(
        model=_path(model, how),
        external=tuple(model.external),
        how=how,
        output=output,
        digest=model.digest,
        data=request.data,
        engine=subject.runs_in,
        has_truth=subject.truth is not None,
        objective=request.goal.objective,
        criterion=request.goal.criterion,
        folder=os.getcwd(),
        environment=dict(os.environ),
    )


def _path(model: OpenedModel, how: ReadOptions) -> Path:
    """Where a worker reads the model: it takes what was given to fp32 itself."""
    return model.path if how.from_type is None else model.source


def _is_there(model: OpenedModel, how: ReadOptions) -> bool:
    """Whether another process of this machine finds the model by its path."""
    return _path(model, how).exists() and how.example_inputs is None


def _is_small(model: OpenedModel) -> bool:
    """Whether the model fits into memory twice."""
    return model.size_bytes <= memory_bytes() // _LARGE
