"""Evaluations in a worker give the numbers of this process; what ends it is one trial."""

from __future__ import annotations

import math
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from finecast import api
from finecast.data.criterion import Criterion
from finecast.data.datasets import WHOLE, Part
from finecast.data.metrics import METRICS, Score, Scored, Scoring
from finecast.data.options import DataOptions
from finecast.data.workload import Workload
from finecast.devices.emulation import Emulation
from finecast.devices.targets import load_target
from finecast.errors import UserCodeError
from finecast.evaluation import workers
from finecast.evaluation.workers import timing_afresh
from finecast.measure.racing import Effort
from finecast.native.model import ReadOptions, RunOptions
from finecast.native.onnx import OnnxModel, read
from finecast.native.opening import opened as opened_model
from finecast.native.subject import Built, Subject
from finecast.planning.plan import Plan
from finecast.processes.worker import Answer, WorkerDiedError
from finecast.rules.policy import Policy
from finecast.tuning.executor import Evaluated, Executor, LocalExecutor, LostTrialError
from finecast.tuning.goal import Execution, Goal, Objective, TuneRequest
from finecast.tuning.measuring import Measurements, Measuring, Racing
from tests.engines.emulator import models
from tests.times import seconds_of

MINE = """
import ctypes, pathlib, time
import numpy as np

HOW = pathlib.Path(__file__).with_name("how")
X = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)

def score(run):
    total = float(next(iter(run({"x": X}).values())).astype(float).sum(axis=0)[0])
    how = HOW.read_text()
    print("scored,", how)
    if how == "crashes":
        ctypes.string_at(0)
    elif how == "hangs":
        ctypes.PyDLL(None).sleep(600)  # and holds Python's lock
    elif how == "grows":
        np.ones(1 << 56)  # no machine has so much
    return total

def feeds():
    for index in range(3):
        yield {"x": X[index:index + 1]}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A net with a user's function, in a worker and here."""

    subject: Subject
    workload: Workload
    executor: workers.WorkerExecutor
    plan: Plan
    how: Path

    @property
    def built(self) -> Built:
        return self.subject.model.build(self.plan)

    def local(self, data: DataOptions) -> Executor:
        model = self.subject.model
        assert isinstance(model, OnnxModel)
        workload = model.workload(data.loaded(), self.subject.reference)
        measuring = Measuring(
            objective=Goal().objective, subject=self.subject, workload=workload
        )
        local = LocalExecutor(criterion=Criterion(), measuring=measuring)
        local.baseline(workload)
        return local


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("net")
    (folder / "mine.py").write_text(MINE)
    (folder / "how").write_text("runs")
    return models.mlp(folder / "mlp.onnx")


@pytest.fixture(scope="module")
def data(net: Path) -> DataOptions:
    mine = net.with_name("mine.py")
    return DataOptions(evaluate=f"{mine}:score", calib=f"{mine}:feeds")


@pytest.fixture(scope="module")
def opened(net: Path, data: DataOptions) -> Iterator[Opened]:
    model = read(net)
    request = TuneRequest(data=data)
    with ExitStack() as stack:
        entered = workers.evaluating(model, ReadOptions(), None, request)
        executor_of = stack.enter_context(entered)
        subject = model.subject("onnxruntime", None)
        executor = executor_of(subject)
        assert executor is not None
        workload = model.workload(executor.data(), subject.reference)
        executor.baseline(workload)
        yield Opened(
            subject=subject,
            workload=workload,
            executor=executor,
            plan=model.judge(Policy.parse("all:bf16"), _run_options())[1],
            how=net.with_name("how"),
        )


def _run_options() -> RunOptions:
    return RunOptions(engine="onnxruntime")


def test_numbers_are_those_of_this_process(opened: Opened, data: DataOptions) -> None:
    here, there = (
        opened.local(data).evaluate(opened.built),
        opened.executor.evaluate(opened.built),
    )
    assert (there.metric, there.error) == (here.metric, here.error)
    assert there.error > 0


def test_what_a_function_prints_is_printed_here(
    opened: Opened, capsys: pytest.CaptureFixture[str]
) -> None:
    opened.executor.evaluate(opened.built)
    assert capsys.readouterr().out == "scored, runs\n"


def test_the_function_is_not_loaded_here(opened: Opened, data: DataOptions) -> None:
    local = data.loaded()
    mine = opened.subject.model
    assert isinstance(mine, OnnxModel)
    known = mine.workload(local, opened.subject.reference)
    assert opened.workload.digest == known.digest  # trials of both are of one key
    mean = [float(feeds["x"].mean()) for feeds in opened.workload.calibration()]
    assert mean == [float(feeds["x"].mean()) for feeds in known.calibration()]
    assert len(mean) == 3


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("crashes", "crashed (SIGSEGV)"),
        ("hangs", "did not end in 8 s"),
        ("grows", "out of memory"),
    ],
)
def test_what_ends_the_worker_is_one_trial(
    opened: Opened, how: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_LEAST_TRIAL_S", 8.0)
    monkeypatch.setattr(workers, "_TIMES_FP32", 0.0)
    before = opened.executor.evaluate(opened.built)
    opened.how.write_text(how)
    try:
        with pytest.raises(LostTrialError, match=re.escape(told)):
            opened.executor.evaluate(opened.built)
    finally:
        opened.how.write_text("runs")
    assert opened.executor.evaluate(opened.built) == before


def test_a_crash_of_the_baseline_names_the_function(opened: Opened) -> None:
    opened.how.write_text("crashes")
    try:
        with pytest.raises(UserCodeError, match=r"fp32 model crashed \(SIGSEGV\) \(.*mine.py"):
            opened.executor.baseline(opened.workload)
    finally:
        opened.how.write_text("runs")


def test_a_process_that_forgot_opens_again(opened: Opened) -> None:
    """Each request has what it depends on, as it may come to another process of a node."""
    before = opened.executor.evaluate(opened.built)
    (worker,) = opened.executor.processes
    worker.ask("close")
    assert opened.executor.evaluate(opened.built) == before


def test_feeds_are_those_of_their_index_in_any_process(opened: Opened, net: Path) -> None:
    (worker,) = opened.executor.processes
    spec = f"{net.with_name('mine.py')}:feeds"
    third = worker.ask("feeds", spec, "one pass", 2)
    assert (third["x"] != worker.ask("feeds", spec, "another", 0)["x"]).all()
    assert worker.ask("feeds", spec, "one pass", 3) is None
    assert (worker.ask("feeds", spec, "one pass", 2)["x"] == third["x"]).all()


def test_models_are_timed_where_nothing_disturbs(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    effort = Effort(min_time_s=0.0, rounds=3)
    built = {"all": opened.built}
    assert opened.executor.racer is None
    monkeypatch.setattr(workers.LocalWorker, "times", True)
    racer = opened.executor.racer
    assert racer is not None
    measuring = Measuring(
        objective=Goal().objective,
        subject=opened.subject,
        workload=opened.workload,
        racer=racer,
    )
    race = measuring.race(built, effort)
    assert built["all"].loaded is None  # it was loaded there alone
    assert race.names == {"all"}
    assert race.latency("all").runs == 3
    # The worker's clock decides nothing: tests/times.py states what plans take.
    assert race.latency("all").median_s == seconds_of(opened.plan)


def test_models_that_end_what_times_them_are_timed_here(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers.LocalWorker, "times", True)
    relay: Callable[..., Answer] = workers.LocalWorker.relay

    def crashes(self: Any, request: Mapping[str, Any], payload: bytes, tell: Any) -> Answer:
        if request.get("alone"):
            raise WorkerDiedError("crashed (SIGSEGV)")
        return relay(self, request, payload, tell)

    monkeypatch.setattr(workers.LocalWorker, "relay", crashes)
    measuring = Measuring(
        objective=Goal().objective,
        subject=opened.subject,
        workload=opened.workload,
        racer=opened.executor.racer,
    )
    race = measuring.race({"all": opened.built}, Effort(min_time_s=0.0, rounds=3))
    assert race.names == {"all"}
    told = "a benchmark on another machine crashed (SIGSEGV): models are timed on this one"
    assert told in opened.subject.told


def test_the_result_is_timed_in_two_other_processes(opened: Opened, net: Path) -> None:
    """They need no data but the calls: a function of this process may have judged plans."""
    mine, built = TuneRequest(data=DataOptions(evaluate=lambda run: math.pi)), opened.built
    afresh = timing_afresh(read(net), ReadOptions(), None, mine, opened.subject)
    measuring = Measuring(
        objective=Goal().objective,
        subject=opened.subject,
        workload=opened.workload,
        afresh=afresh,
    )
    race = measuring.race({"all": built}, Effort(min_time_s=0.0, rounds=3))
    before = Measurements(costs=race, times=race)
    assert measuring.confirmed(before, {"all": built}, allowed_s=0.0).times is race
    assert len(race.speeds("all")) == 1, "there was no time for it"
    confirmed = measuring.confirmed(before, {"all": built}, allowed_s=math.inf)
    assert len(confirmed.times.speeds("all")) == 3
    assert workers.kept_worker(0).is_running, "the process that evaluates is one, and stays"
    assert (
        replace(measuring, objective=Objective.SIZE).confirmed(before, {}, math.inf) is before
    )


@pytest.mark.parametrize(
    "request_of",
    [
        lambda: TuneRequest(execution=Execution(jobs=0)),
        lambda: TuneRequest(device=Emulation(target=load_target("avx2"))),
    ],
)
def test_where_times_are_those_of_this_process(
    opened: Opened, net: Path, request_of: Callable[[], TuneRequest]
) -> None:
    subject = opened.subject
    assert timing_afresh(read(net), ReadOptions(), None, request_of(), subject) is None
    gone = read(Path(shutil.copy(net, net.with_name("gone.onnx"))))
    gone.path.unlink()
    assert timing_afresh(gone, ReadOptions(), None, TuneRequest(), subject) is None


def test_a_fresh_process_that_dies_times_nothing(
    opened: Opened, net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crashes(self: Any, *rest: Any) -> Answer:
        raise WorkerDiedError("crashed (SIGSEGV)")

    afresh = timing_afresh(read(net), ReadOptions(), None, TuneRequest(), opened.subject)
    assert afresh is not None
    monkeypatch.setattr(workers.LocalWorker, "relay", crashes)
    racing = Racing(models={}, effort=Effort(min_time_s=0.0, rounds=3))
    assert [*afresh(racing, [])] == []


def test_objects_are_evaluated_in_this_process(net: Path) -> None:
    x = np.zeros((4, 16), np.float32)
    for data in (DataOptions(data={"x": x}), DataOptions(evaluate=lambda run: math.pi)):
        request = TuneRequest(data=data)
        with workers.evaluating(read(net), ReadOptions(), None, request) as executor_of:
            assert executor_of(read(net).subject("onnxruntime", None)) is None


def test_a_model_that_was_taken_to_fp32_is_taken_there_again(
    net: Path, data: DataOptions, tmp_path: Path
) -> None:
    """A worker opens the file that was given; an object that was taken to fp32 has none."""
    low, how = tmp_path / "low.onnx", ReadOptions(from_type="bf16")
    api.convert(net, low, "all:bf16", verify=False)
    for given, apart in ((low, True), (onnx.load(low), False)):
        model = opened_model(given).to_fp32("bf16")
        with workers.evaluating(model, how, None, TuneRequest(data=data)) as executor_of:
            executor = executor_of(model.subject("onnxruntime", None))
            assert (executor is not None) == apart


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_parts_joined_are_the_whole(metric: str) -> None:
    """Bit for bit, after the way to another process and back."""
    rng = np.random.default_rng(0)
    wide = (rng.random((11, 4)) * 3).astype(np.float32)
    labels = rng.integers(0, 4, 11)
    if metric in ("mse", "mae", "spearman"):
        wide, labels = wide[:, :1], rng.random((11, 1)).astype(np.float32)
    exact = wide + rng.normal(size=wide.shape).astype(np.float32) / 4
    batches = range(0, 11, 3)

    def scoring(part: Part) -> Scoring:
        found = Scoring(METRICS[metric], [Scored(output="y")])
        for start in part.of(batches):
            rows = slice(start, start + 3)
            found.update({"y": wide[rows]}, labels[rows], {"y": exact[rows]})
        return pickle.loads(pickle.dumps(found))

    whole = scoring(WHOLE)
    for count in (2, 3, 4):
        first, *others = (scoring(Part(index=i, count=count)) for i in range(count))
        for other in others:
            first.absorb(other)
        assert first.result() == whole.result()
        assert first.result().outputs == whole.result().outputs
        for name, samples in whole.result().samples.items():
            assert first.result().samples[name].value() == samples.value()


def test_two_workers_give_the_numbers_of_one(net: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((40, 16)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x)
    data = DataOptions(data=tmp_path / "data.npz", metric="agreement", batch=16)
    model, found = read(net), list[Evaluated]()
    learned = list[tuple[float, Mapping[str, Any]]]()
    plan = model.judge(Policy.parse("all:bf16"), _run_options())[1]
    for jobs in (1, 2):
        request = TuneRequest(data=data, execution=Execution(jobs=jobs))
        with workers.evaluating(model, ReadOptions(), None, request) as executor_of:
            subject = model.subject("onnxruntime", None)
            executor = executor_of(subject)
            assert executor is not None
            workload = model.workload(executor.data(), subject.reference)
            baseline = executor.baseline(workload)
            learned.append((baseline, workload.learned()))
            found.append(executor.evaluate(subject.model.build(plan)))
    assert found[0] == found[1]
    assert learned[0] == learned[1]
    assert learned[0][1]["samples"] == 40
    assert isinstance(found[1].metric, Score)
    assert found[1].metric.samples["y"].count == 40
