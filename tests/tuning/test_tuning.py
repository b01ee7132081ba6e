"""Tuning end to end, in engines whose times are stated."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from finecast.data.criterion import Criterion, CriterionKind
from finecast.data.function_workload import EvalFunction, Run
from finecast.data.options import DataOptions
from finecast.data.sources import workload_of
from finecast.engines import get_engine
from finecast.engines.base import Array, Capability, Engine, Feeds, KernelTime, Session
from finecast.errors import EngineError, ModelError, UsageError
from finecast.frontends import onnx as frontend
from finecast.measure.racing import Race
from finecast.measure.study import Study
from finecast.native.engine_subject import EngineExamined, EngineSubject
from finecast.native.onnx import OnnxModel
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.planning.problem import Proposal
from finecast.planning.proposing import lowered_by_one
from finecast.processes import memory
from finecast.progress import ExpectedTime, Progress, silent
from finecast.rules.policy import Policy
from finecast.tuning import loop, proposers
from finecast.tuning import tune as tuning
from finecast.tuning.findings import Found
from finecast.tuning.goal import MIN_SPEEDUP, Goal, Objective
from finecast.tuning.loop import Loop
from finecast.tuning.models import PlanModels
from finecast.tuning.result import Result, Verdict
from finecast.tuning.search import Corrections
from tests.times import race_all

_LABELS: dict[int, str] = {
    TensorProto.FLOAT: "fp32",
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
}

# Calls of a user's function for the baseline in which the model runs: others get its outputs.
BASELINE = 1


@dataclass
class Clock:
    """Time that only the toy engine moves; stands for the module ``time``."""

    now_s: float = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    process_time = staticmethod(time.process_time)


@dataclass
class ToySession(Session):
    """A real engine's numbers at stated times."""

    inner: Session
    engine: ToyEngine
    proto: onnx.ModelProto

    def __post_init__(self) -> None:
        self.inputs, self.outputs = self.inner.inputs, self.inner.outputs
        self.runs = 0

    def run(self, feeds: Feeds) -> dict[str, Array]:
        self.runs += 1
        formats = {k.format for k in self.engine.kernels(self.proto) if k.kind != "Cast"}
        if 0 < self.engine.lasts < self.runs and formats == {"fp16"}:
            raise EngineError("out of scratch memory")
        took_s = sum(k.time_s for k in self.engine.kernels(self.proto))
        self.engine.clock.now_s += took_s * self.engine.noise()
        return self.inner.run(feeds)

    def profile(self, feeds: Feeds, *, repeats: int = 5) -> list[KernelTime]:
        del feeds, repeats
        return self.engine.kernels(self.proto)


@dataclass(eq=False)
class ToyEngine(Engine):
    """An op takes 1 ms in fp32 and ``1 / gain`` ms in a low format; a cast 0.1 ms."""

    clock: Clock
    gain: float = 4.0
    inner: str = "onnxruntime"
    name: str = "toy"
    device: str = "CPU"
    refuses_mixes: bool = False
    refuses_low: str = ""
    misruns: str = ""
    """An op that runs in fp32 all the same where another one is in fp32."""
    noise: Callable[[], float] = lambda: 1.0
    slow: frozenset[str] = frozenset()
    lasts: int = 0
    """So many runs do the sessions last in which every op is low; 0 for all."""

    def capabilities(self) -> Mapping[Format, Capability]:
        return {}

    def load(self, model: Path | bytes, *, profiling: bool = False) -> ToySession:
        del profiling
        proto = onnx.load(model) if isinstance(model, Path) else onnx.load_from_string(model)
        formats = {k.format for k in self.kernels(proto) if k.kind != "Cast"}
        if self.refuses_mixes and len(formats) > 1:
            raise EngineError("no kernel for this mix")
        low = {k.ops[0] for k in self.kernels(proto) if k.format == "fp16"}
        if self.misruns in low and len(formats) > 1:
            unfit = {self.misruns: ("fp16", "runs it in fp32 all the same")}
            raise EngineError(f"'{self.misruns}' runs in fp32 all the same", unfit=unfit)
        if self.refuses_low in low or (low and self.refuses_low == "any"):
            raise EngineError(f"no kernel for node '{self.refuses_low}': fp16")
        return ToySession(get_engine(self.inner).load(model), self, proto)

    def kernels(self, proto: onnx.ModelProto) -> list[KernelTime]:
        graph = onnx.shape_inference.infer_shapes(proto, strict_mode=True).graph
        infos = (*graph.value_info, *graph.output)
        types = {v.name: _LABELS.get(v.type.tensor_type.elem_type, "other") for v in infos}
        kernels: list[KernelTime] = []
        for node in graph.node:
            label = types[node.output[0]]
            low = label in ("fp16", "bf16")
            time_s = 1e-3 / (self.gain if low else 1.0)
            if low and node.name in self.slow:
                time_s = 1.0
            kernels.append(
                KernelTime(
                    kernel=node.name,
                    kind=node.op_type,
                    ops=(node.name,),
                    format=label,
                    time_s=1e-4 if node.op_type == "Cast" else time_s,
                )
            )
        return kernels


class CompilingSubject(EngineSubject):
    @property
    def compiles(self) -> bool:
        return True


@dataclass(frozen=True)
class Bench:
    """A small convolutional net, its data and an engine."""

    model: Path
    data: Path
    engine: ToyEngine

    def tune(
        self,
        *,
        metric: str = "top1",
        tolerance: float = 0.05,
        policy: str = "auto:fp16",
        study: Study | None = None,
        engine: Engine | None = None,
        evaluate: EvalFunction | None = None,
        max_trials: int | None = None,
        min_speedup: float = MIN_SPEEDUP,
        start_s: float | None = None,
        objective: Objective = Objective.LATENCY,
        compiles: bool = False,
        start: Plan | None = None,
        confidence: float | None = None,
        max_size: str | int | None = None,
        max_bits: float | None = None,
        progress: Progress = silent,
    ) -> Result:
        chosen = engine or self.engine
        options = DataOptions(data=self.data, metric=metric, batch=16)
        if evaluate is not None:
            options = DataOptions(evaluate=evaluate, evaluate_name="mine")
        workload = workload_of(options, chosen.load(self.model))
        criterion = Criterion(
            kind=CriterionKind.ABSOLUTE,
            tolerance=tolerance,
            higher_is_better=workload.higher_is_better,
            confidence=confidence,
        )
        model = OnnxModel(file=frontend.load(self.model))
        kind = CompilingSubject if compiles else EngineSubject
        reference = chosen.load(self.model)
        subject = kind(model=model, engine=chosen, reference=reference, study=study)
        goal = Goal(
            criterion=criterion,
            objective=objective,
            max_trials=max_trials,
            min_speedup=min_speedup,
            max_size=max_size,  # type: ignore[arg-type]
            max_bits=max_bits,
        )
        if start_s is not None:
            goal = replace(goal, start_s=start_s)
        asked = Policy.parse(policy)
        place = tuning.Place(subject=subject, workload=workload)
        return tuning.tune(place, goal, asked, start=start, progress=progress)


def conv_net(path: Path, *, middle: str = "Relu") -> None:
    """conv, an activation, conv, relu, average, gemm; seeded weights."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        array = rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        return numpy_helper.from_array(array.astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], "conv0", pads=[1] * 4),
        helper.make_node(middle, ["a"], ["b"], "middle"),
        helper.make_node("Conv", ["b", "w1"], ["c"], "conv1", pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["d"], "relu"),
        helper.make_node("GlobalAveragePool", ["d"], ["e"], "pool"),
        helper.make_node("Flatten", ["e"], ["f"], "flat"),
        helper.make_node("Gemm", ["f", "w2"], ["y"], "head", transB=1),
    ]
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])
    scores = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
    weights = [weight("w0", 8, 3, 3, 3), weight("w1", 8, 8, 3, 3), weight("w2", 4, 8)]
    graph = helper.make_graph(nodes, "net", [image], [scores], weights)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    clock = Clock()
    monkeypatch.setattr("finecast.measure.timing.time", clock)
    model, data = tmp_path / "net.onnx", tmp_path / "data.npz"
    conv_net(model)
    x = np.random.default_rng(1).standard_normal((40, 3, 8, 8)).astype(np.float32)
    scores = next(iter(get_engine("onnxruntime").load(model).run({"x": x}).values()))
    np.savez(data, x=x, label=scores.argmax(axis=1))
    return Bench(model, data, ToyEngine(clock))


def test_improved(bench: Bench) -> None:
    outcome = bench.tune()
    assert outcome.verdict is Verdict.IMPROVED
    assert outcome.baseline.metric == 1.0
    assert outcome.tuned.metric >= 0.95
    # Seven ops at a quarter of the time, one cast in and one out: 7 ms become 1.95 ms.
    assert outcome.baseline.latency_s == pytest.approx(7e-3)
    assert outcome.tuned.latency_s == pytest.approx(7e-3 / 4 + 2e-4)
    assert outcome.speedup == pytest.approx(7 / 1.95)
    assert set(outcome.plan.formats.values()) == {Format.FP16}
    assert outcome.evaluations == 2
    assert [t.passed for t in outcome.trials] == [True]
    assert outcome.casts == 0  # both are on the model's own input and output


def test_a_plan_that_fails_in_a_later_run_is_left_out(bench: Bench) -> None:
    bench.engine.lasts = 5  # dry runs and the first run of a race are fewer
    outcome = bench.tune()
    assert outcome.improved
    assert set(outcome.plan.formats.values()) == {Format.FP16, Format.FP32}
    assert any("a plan was dropped (7 fp16): out of scratch" in w for w in outcome.warnings)


def first_plan_misses() -> EvalFunction:
    """A score of 1, and of 0 for the first plan that is evaluated, which is the fastest."""
    evaluated: list[float] = []

    def score(run: Run) -> float:
        if run_once(run):
            evaluated.append(0.0)
        return 0.0 if len(evaluated) == BASELINE + 1 else 1.0

    return score


def test_of_a_plan_that_does_not_run_as_planned_the_rest_is_tried(bench: Bench) -> None:
    bench.engine.misruns = "conv0"
    outcome = bench.tune(evaluate=first_plan_misses())
    steps = outcome.findings.journal
    refused = [s for s in steps if s.result == "the engine does not run it as planned"]
    assert refused
    assert f"{refused[0].plan}, 1 op in fp32" in {s.plan for s in steps}
    assert outcome.improved
    assert outcome.plan.formats["conv0"] is Format.FP32


def test_what_is_predicted_to_be_slow_races_only_if_the_fastest_misses(bench: Bench) -> None:
    fast = bench.tune().findings
    least = min(c.predicted_cost for c in fast.candidates)
    assert all(c.predicted_cost <= 1.3 * least for c in fast.candidates)
    all_raced = bench.tune(evaluate=first_plan_misses())
    assert all_raced.improved
    assert max(c.predicted_cost for c in all_raced.findings.candidates) > 1.3 * least


def test_what_is_predicted_to_miss_is_not_evaluated(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest is tried before others race; its metric tells which error is allowed.

    How a model computes on one thread, which takes a compilation, is asked of plans that pass.
    """
    worst = deviation_of_all_low(bench)
    checked: list[str] = []

    def check(self: EngineSubject, built: Any, exact: object) -> None:
        checked.append(built.plan.digest)

    monkeypatch.setattr(EngineSubject, "check", check)
    outcome = bench.tune(metric="max_abs", tolerance=0.3 * worst)
    assert outcome.improved
    steps = [p for p in outcome.findings.frontier if p.plan.lowers]
    fastest = min(steps, key=lambda p: p.predicted_cost)
    assert outcome.trials[0].key.plan == fastest.plan.digest
    assert not outcome.trials[0].passed
    far = [p for p in steps if p is not fastest and p.predicted_error > 0.45 * worst_of(steps)]
    assert far
    assert {t.key.plan for t in outcome.trials}.isdisjoint(p.plan.digest for p in far)
    assert {*checked} == {t.key.plan for t in outcome.trials if t.passed}


def worst_of(steps: Sequence[Found]) -> float:
    return max(p.predicted_error for p in steps)


def test_the_error_is_told_as_predicted_and_as_measured(bench: Bench) -> None:
    """Both relative errors, not their squares."""
    outcome = bench.tune()
    assert outcome.improved
    assert 1e-5 < outcome.measured_error < 1e-2
    assert 1 / 3 < outcome.predicted_error / outcome.measured_error < 3


def test_errors_are_predicted_and_measured_on_the_same_samples(bench: Bench) -> None:
    """A call of 16 is timed; the samples after it have another error."""
    with np.load(bench.data) as found:
        x, label = found["x"].copy(), found["label"]
    x[16:] *= 100.0
    np.savez(bench.data, x=x, label=label)
    outcome = bench.tune(tolerance=0.5)
    assert outcome.improved
    run = get_engine("onnxruntime").load
    low, exact = (
        np.asarray(run(one).run({"x": x})["y"], np.float64)
        for one in (frontend.to_bytes(outcome.model), bench.model)
    )
    error = np.linalg.norm(low - exact) / np.linalg.norm(exact)
    assert outcome.measured_error == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize(
    ("off_by", "least"),
    [(0.0, 1.0), (0.3, 1.0), (0.0, 1.15), (0.1, 1.1)],
)
def test_a_plan_is_not_taken_unless_all_its_interval_gains_what_is_asked(
    bench: Bench, off_by: float, least: float
) -> None:
    noise = cycle([1.0, 1.0 + off_by, 1.0 + off_by / 2])
    bench.engine.gain, bench.engine.noise = 1.2, lambda: next(noise)
    outcome = bench.tune(min_speedup=least)
    assert outcome.improved == (off_by == 0)
    wanted = "(faster|x1.1 as fast as fp32)"
    unknown = rf"is not shown to be {wanted} here: measured x[01]\.\d+ to x1\.\d+, as times"
    assert bool(re.search(unknown, outcome.why)) == (off_by > 0)
    assert ("improved" in "\n".join(outcome.lines)) == (off_by == 0)


def test_what_the_search_considered_is_told(bench: Bench) -> None:
    """Nobody need run it again to see what a faster plan, or another node, would cost."""
    outcome = bench.tune(evaluate=first_plan_misses())
    found, faster = outcome.findings, outcome.next_faster
    assert outcome.improved
    assert faster is not None
    assert faster.passed is False
    assert faster.metric == 0.0
    own = next(c for c in found.candidates if c.plan.digest == outcome.plan.digest)
    assert own.passed
    assert faster.cost is not None
    assert own.cost is not None
    assert faster.cost < own.cost == pytest.approx(own.predicted_cost, rel=0.5)
    assert own.error == pytest.approx(outcome.measured_error)
    assert faster.error is not None
    assert faster.error > 0
    assert faster.predicted_error > own.predicted_error > 0
    # Every op that may be low stands in the sensitivities, the worst first.
    nodes = {name for one in found.sensitivities for name in one.nodes}
    assert {"conv0", "conv1", "head"} <= nodes
    errors = [one.error for one in found.sensitivities]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0
    assert [s.predicted_error for s in found.frontier] == sorted(
        s.predicted_error for s in found.frontier
    )
    told = outcome.to_dict()
    assert told["next_faster"]["changes"].keys() <= told["formats"].keys()
    assert told["next_faster"]["changes"]
    assert told["next_faster"]["measured"]["ms"] == pytest.approx(faster.cost * 1e3)


def test_the_result_replays_to_a_valid_model(bench: Bench, tmp_path: Path) -> None:
    applied = frontend.apply(frontend.load(bench.model), bench.tune().plan)
    frontend.save(applied.model, tmp_path / "tuned.onnx")
    onnx.checker.check_model(tmp_path / "tuned.onnx", full_check=True)
    inputs = get_engine("onnxruntime").load(tmp_path / "tuned.onnx").inputs
    assert [(i.name, i.dtype) for i in inputs] == [("x", "fp32")]


def test_a_criterion_that_nothing_meets(bench: Bench) -> None:
    calls: list[float] = []

    def score(run: Run) -> float:
        if run_once(run):
            calls.append(0.0)
        return 1.0 if len(calls) <= BASELINE else 0.0

    outcome = bench.tune(evaluate=score)
    assert outcome.verdict is Verdict.UNCHANGED
    assert outcome.evaluations == len(calls) - BASELINE + 1
    tried = len(calls) - BASELINE
    assert f"none of the {tried} plans tried is within your limit" in outcome.why
    assert "final" in {
        phase.split()[0] for phase in outcome.phases
    }  # of fp32 and hints, after the evaluations
    assert outcome.trials
    assert not any(t.passed for t in outcome.trials)
    assert outcome.baseline == outcome.tuned
    assert outcome.speedup == 1.0
    assert set(outcome.plan.formats.values()) == {Format.FP32}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Digests of the plans whose models were timed, which may take a compilation each."""
    found: set[str] = set()
    times = EngineSubject.times

    def recorded(
        self: EngineSubject, built: Mapping[str, Any], workload: Any, effort: Any
    ) -> Race:
        found.update(built)
        return times(self, built, workload, effort)

    monkeypatch.setattr(EngineSubject, "times", recorded)
    return found


def test_only_what_may_be_chosen_is_compiled(bench: Bench, timed: set[str]) -> None:
    """A plan that misses, or is predicted to be slower, costs no compilation."""

    def score() -> EvalFunction:
        calls: list[float] = []

        def fastest_misses(run: Run) -> float:
            if run_once(run):
                calls.append(0.0)
            return 0.0 if len(calls) == BASELINE + 1 else 1.0

        return fastest_misses

    every = bench.tune(evaluate=score())
    raced = set(timed)
    timed.clear()
    found = bench.tune(evaluate=score(), compiles=True)
    assert every.improved
    assert found.improved
    assert found.speedup > 0.95 * every.speedup
    missed = {t.key.plan for t in found.trials if not t.passed}
    assert missed
    assert found.plan.digest in timed
    assert not missed & timed
    assert len(timed) < len(raced)
    assert [t.latency_s for t in found.trials] == [None] * len(found.trials)
    assert found.next_faster is not None
    assert found.next_faster.passed is False
    assert found.next_faster.cost is None  # it was never timed


def test_nothing_is_compiled_where_nothing_keeps_the_criterion(
    bench: Bench, timed: set[str]
) -> None:
    calls: list[float] = []

    def score(run: Run) -> float:
        if run_once(run):
            calls.append(0.0)
        return 1.0 if len(calls) <= BASELINE else 0.0

    outcome = bench.tune(evaluate=score, compiles=True)
    assert outcome.verdict is Verdict.UNCHANGED
    assert "is within your limit" in outcome.why
    assert outcome.findings.fp32_cost is None
    assert not timed


def test_what_is_predicted_to_be_fast_and_is_slow_is_told_by_its_race(
    bench: Bench, timed: set[str]
) -> None:
    """Predictions are profiles of the first seconds; then low ops are slow."""
    calls: list[float] = []

    def score(run: Run) -> float:
        if run_once(run):
            calls.append(0.0)
        if len(calls) > BASELINE:
            bench.engine.gain = 0.9
        return 1.0

    outcome = bench.tune(evaluate=score, compiles=True)
    assert outcome.verdict is Verdict.UNCHANGED
    assert "no plan is faster here" in outcome.why
    assert timed
    assert "by times of single kernels" not in outcome.why


@pytest.mark.parametrize("limited", ["memory_bytes", "most_mappings"])
def test_no_more_plans_are_loaded_than_memory_takes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, limited: str
) -> None:
    """All plans that are proposed at first race together, as far as memory allows."""
    raced: list[set[str]] = []
    times = EngineSubject.times

    def counted(
        self: EngineSubject, built: Mapping[str, Any], workload: Any, effort: Any
    ) -> Race:
        raced.append({*built})
        return times(self, built, workload, effort)

    race_all(monkeypatch)
    monkeypatch.setattr(EngineSubject, "times", counted)
    outcome = bench.tune(max_trials=8)
    whole = [*raced]
    raced.clear()
    # Half of either limit has fp32 and two plans more.
    ops = len(outcome.plan.formats)
    of_one = {"memory_bytes": bench.model.stat().st_size, "most_mappings": 1.5 * ops}
    monkeypatch.setattr(memory, "most_mappings", lambda: 1 << 60)
    monkeypatch.setattr(memory, limited, lambda: int(2 * 3.4 * of_one[limited]))
    outcome = bench.tune(max_trials=8)
    assert outcome.improved
    assert max(map(len, raced)) <= 3 < max(map(len, whole))
    assert set().union(*whole) <= set().union(*raced)  # in several races


def test_a_plan_that_raced_and_gained_nothing_races_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that had not raced race then, each beside fp32."""
    races: list[frozenset[str]] = []
    times = EngineSubject.times

    def recorded(
        self: EngineSubject, built: Mapping[str, Any], workload: Any, effort: Any
    ) -> Race:
        if built:
            races.append(frozenset(built))
            bench.engine.gain = 0.9  # predictions were profiles of the time before
        return times(self, built, workload, effort)

    monkeypatch.setattr(EngineSubject, "times", recorded)
    outcome = bench.tune(metric="cosine", compiles=True)
    assert outcome.verdict is Verdict.UNCHANGED
    assert "no plan is faster here" in outcome.why
    assert races
    assert len(frozenset.union(*races)) == sum(map(len, races))


def test_nothing_is_compiled_where_all_is_predicted_to_be_far_slower(
    bench: Bench, timed: set[str]
) -> None:
    """bf16 on a CPU without it: a compilation and a race would take minutes."""
    bench.engine.gain = 0.3
    outcome = bench.tune(compiles=True)
    assert outcome.verdict is Verdict.UNCHANGED
    assert "the fastest, by times of single kernels, takes 3.3" in outcome.why
    assert not timed


def test_a_slower_plan_is_written_where_the_one_found_is_not_certified(bench: Bench) -> None:
    count = 400
    x = np.random.default_rng(1).standard_normal((count, 3, 8, 8)).astype(np.float32)
    exact = get_engine("onnxruntime").load(bench.model).run({"x": x})["y"]
    certifying = np.random.default_rng(0).permutation(count)[count // 2 :]
    errors: list[float] = []

    def right(run: Run) -> Array:
        """Large errors show on all samples, middle ones on those that certify alone."""
        got = run({"x": x})["y"]
        error = float(np.linalg.norm(np.subtract(got, exact)) / np.linalg.norm(exact))
        if run.runs:
            errors.append(error)
        found = np.ones(count)
        if error > 0.7 * largest:
            found[::2] = 0
        elif error > 0.56 * largest:
            found[certifying[:20]] = 0
        return found

    largest = 1.0
    bench.tune(evaluate=right)
    largest = max(errors)
    outcome = bench.tune(
        evaluate=right,
        tolerance=0.05,
        max_trials=30,
        confidence=0.95,
    )
    assert outcome.improved
    assert outcome.certificate is not None
    assert outcome.certificate.bound <= 0.05
    chosen = next(t for t in outcome.trials if t.key.plan == outcome.plan.digest)
    faster = [t for t in outcome.trials if 0.9 < t.metric < chosen.metric]
    assert faster
    assert not any(t.passed for t in faster)


def test_an_engine_that_gains_nothing(bench: Bench) -> None:
    bench.engine.gain = 0.9
    outcome = bench.tune()
    assert outcome.verdict is Verdict.UNCHANGED
    assert "no plan is faster here" in outcome.why
    assert outcome.evaluations == 1  # the baseline: what is not faster is not evaluated


def test_a_plan_that_keeps_the_limit_and_gains_nothing_is_not_called_too_inaccurate(
    bench: Bench,
) -> None:
    """Times vary so much that it is evaluated though it seems not to gain."""
    rng = np.random.default_rng(1)
    bench.engine.gain = 1.0
    bench.engine.noise = lambda: float(np.exp(0.3 * rng.standard_normal()))
    outcome = bench.tune(max_trials=5)
    assert outcome.verdict is Verdict.UNCHANGED
    assert any(trial.passed for trial in outcome.trials)
    assert "no plan is faster here" in outcome.why
    assert "within your limit" not in outcome.why


def test_what_is_fast_at_first_only_is_not_returned(bench: Bench) -> None:
    """The ranking's winner turns out slower when it is timed once more."""
    calls: list[float] = []

    def score(run: Run) -> float:
        if run_once(run):
            calls.append(0.0)
        if len(calls) > BASELINE:
            bench.engine.gain = 0.9  # from here on
        return 1.0

    outcome = bench.tune(evaluate=score, max_trials=1)
    assert outcome.verdict is Verdict.UNCHANGED
    assert (
        "no plan is faster here: the fastest takes 1.14 times what fp32 takes" in outcome.why
    )
    assert outcome.speedup == 1.0


@pytest.mark.parametrize("seed", range(4))
def test_a_noisy_ranking_changes_no_plan(bench: Bench, seed: int) -> None:
    """What the ranking leaves open the last race decides, in which there is no noise."""
    bench.engine.gain = 1.3
    rng = np.random.default_rng(seed)

    def score(run: Run) -> float:
        run_once(run)
        return 1.0

    wanted = bench.tune(evaluate=score)
    found: list[float] = []

    def noisy(run: Run) -> float:
        found.append(score(run))
        if len(found) > 1:
            bench.engine.noise = lambda: 1.0  # the ranking is over
        return 1.0

    bench.engine.noise = lambda: float(np.exp(0.1 * rng.standard_normal()))
    outcome = bench.tune(evaluate=noisy)
    assert wanted.improved
    assert outcome.improved
    assert outcome.plan.formats == wanted.plan.formats


def test_the_search_goes_on_where_the_plan_found_is_not_faster(bench: Bench) -> None:
    """The plan with the last op low turns out slow; those without it are as fast as before."""
    found: list[Run] = []

    def score(run: Run) -> float:
        if run_once(run):
            found.append(run)
        if len(found) > BASELINE:
            bench.engine.slow = frozenset({"head"})  # from here on
        return 1.0

    outcome = bench.tune(evaluate=score)
    assert outcome.improved, outcome.why
    assert outcome.plan.formats["head"] is Format.FP32


def test_rules_that_leave_nothing(bench: Bench) -> None:
    outcome = bench.tune(policy="none:fp16")
    assert outcome.verdict is Verdict.UNCHANGED
    assert "no op may have a lower format here (" in outcome.why
    assert "by the rule 'scope': scope none changes nothing" in outcome.why


def test_a_middle_plan_where_the_fastest_misses(bench: Bench) -> None:
    # The errors of single roundings differ: some tolerance lies between all and none.
    worst = deviation_of_all_low(bench)
    outcome = bench.tune(metric="max_abs", tolerance=worst * 0.9)
    if outcome.verdict is Verdict.IMPROVED:
        assert outcome.tuned.metric <= worst * 0.9
        assert set(outcome.plan.formats.values()) == {Format.FP16, Format.FP32}
    assert outcome.evaluations > 2


def test_a_mix_that_the_engine_cannot_load_is_no_candidate(bench: Bench) -> None:
    free = bench.tune(metric="max_abs", tolerance=0.0)
    assert any(len(mixed(t.plan_json)) > 1 for t in free.trials)
    bench.engine.refuses_mixes = True
    outcome = bench.tune(metric="max_abs", tolerance=0.0)
    assert outcome.verdict is Verdict.UNCHANGED
    assert [mixed(t.plan_json) for t in outcome.trials] == [{"fp16"}]


def deviation_of_all_low(bench: Bench) -> float:
    """Of the plan with all ops in fp16, whatever other plans a search tries."""
    trials = bench.tune(metric="max_abs", tolerance=0.0).trials
    return next(t.metric for t in trials if mixed(t.plan_json) == {"fp16"})


def mixed(plan: str) -> set[str]:
    return {d["format"] for d in json.loads(plan)["decisions"]}


def test_a_trial_of_another_metric_is_not_taken_for_this_one(
    bench: Bench, tmp_path: Path
) -> None:
    study = Study(tmp_path / "study.db")
    bench.tune(study=study)
    other = bench.tune(study=study, metric="cosine")
    assert other.reused == 0
    assert other.tuned.metric != 1.0
    assert bench.tune(study=study, metric="cosine").reused == len(other.trials)


def test_trials_of_a_study_are_not_repeated(bench: Bench, tmp_path: Path) -> None:
    study = Study(tmp_path / "study.db")
    first, second = bench.tune(study=study), bench.tune(study=study)
    # The winner alone is evaluated again: a remembered trial decides nothing.
    assert (first.evaluations, second.evaluations) == (2, 2)
    assert (first.reused, second.reused) == (0, 1)
    assert second.plan.digest == first.plan.digest
    assert second.tuned.metric == first.tuned.metric
    moved = ToyEngine(bench.engine.clock, device="GPU")
    assert bench.tune(study=study, engine=moved).reused == 0


def test_a_stored_trial_is_judged_by_the_criterion_of_now(
    bench: Bench, tmp_path: Path
) -> None:
    study = Study(tmp_path / "study.db")
    strict = bench.tune(metric="max_abs", tolerance=0.0, study=study)
    loose = bench.tune(metric="max_abs", tolerance=10.0, study=study)
    assert strict.trials[0].key == loose.trials[0].key
    assert not strict.trials[0].passed
    assert loose.trials[0].passed
    assert loose.reused == 1
    assert loose.evaluations == 2  # the baseline, and the winner once more


def run_once(run: Run) -> bool:
    """Run the model, for a metric that is made up: it takes no outputs but the model's.

    Returns:
        Whether the model ran, and did not give outputs again that it had given before.
    """
    outputs = run({"x": np.ones((2, 3, 8, 8), np.float32)})
    assert sum(y.sum() for y in outputs.values()) > 0
    return run.runs > 0


@dataclass
class Score:
    """A user's metric that reads what it judges by from elsewhere, as from a file."""

    fp32: float
    low: float
    calls: int = 0

    def __call__(self, run: Run) -> float:
        self.calls += run_once(run)
        return self.fp32 if self.calls <= BASELINE else self.low


def test_trials_of_other_data_are_not_taken_for_these(bench: Bench, tmp_path: Path) -> None:
    study = Study(tmp_path / "study.db")
    assert bench.tune(study=study, evaluate=Score(1.0, 0.9875)).verdict is Verdict.IMPROVED
    # The same function, and data on which fp32 itself gives something else.
    outcome = bench.tune(study=study, evaluate=Score(0.1, 0.02))
    assert outcome.reused == 0
    assert outcome.verdict is Verdict.UNCHANGED
    assert all(t.metric == 0.02 for t in outcome.trials)


def test_a_remembered_trial_decides_nothing(bench: Bench, tmp_path: Path) -> None:
    study = Study(tmp_path / "study.db")
    assert bench.tune(study=study, evaluate=Score(1.0, 1.0)).verdict is Verdict.IMPROVED
    # The baseline is as it was, and what once passed now fails.
    changed = Score(1.0, 0.0)
    outcome = bench.tune(study=study, evaluate=changed)
    assert outcome.verdict is Verdict.UNCHANGED
    assert outcome.reused == 0
    assert outcome.evaluations == changed.calls - BASELINE + 1 == 1 + len(outcome.trials)
    assert all(t.metric == 0.0 for t in outcome.trials)
    assert "remembered" not in outcome.why
    # Back again: the study now remembers failures, so that only another plan may pass.
    again = bench.tune(study=study, evaluate=Score(1.0, 1.0))
    failed = {t.key.plan for t in outcome.trials}
    remembered = [t for t in again.trials if t.key.plan in failed]
    assert again.reused == len(remembered) > 0
    assert not any(t.passed for t in remembered)
    assert again.plan.digest not in failed


def test_without_resume_a_study_is_only_added_to(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    bench.tune(study=Study(path))
    kept = Study(path).count()
    outcome = bench.tune(study=Study(path, resume=False))
    assert outcome.reused == 0
    assert outcome.evaluations == 2
    assert Study(path).count() == kept


def test_a_nan_baseline_names_the_op(bench: Bench) -> None:
    conv_net(bench.model, middle="Log")  # of negative numbers
    with pytest.raises(ModelError, match=r"metric is NaN.*first op.*'middle'"):
        bench.tune(metric="cosine")


@pytest.mark.parametrize("by_function", [False, True])
def test_a_nan_baseline_names_the_data(bench: Bench, by_function: bool) -> None:
    """A sample of the last batch, behind those that are observed, has Inf; or NaN, too."""
    arrays = dict(np.load(bench.data))
    nans = int(by_function)  # NaN in arrays is refused as they are read
    arrays["x"][-1].flat[:3] = np.nan if by_function else 0, np.inf, -np.inf
    np.savez(bench.data, **arrays)

    def evaluate(run: Run) -> float:
        return float(run({"x": arrays["x"]})["y"].sum())

    text = rf"metric is NaN: input 'x' .* {nans} NaN and 2 Inf in {arrays['x'].size} values"
    with pytest.raises(UsageError, match=text) as caught:
        bench.tune(metric="cosine", evaluate=evaluate if by_function else None)
    assert "leave out samples" in caught.value.fix


@pytest.mark.parametrize("gain", [4.0, 0.5])
def test_never_worse_in_a_real_engine(bench: Bench, gain: float) -> None:
    """OpenVINO's numbers at stated times: those of a busy machine decide no test."""
    engine = replace(bench.engine, inner="openvino", gain=gain)
    outcome = bench.tune(policy="auto:bf16", engine=engine)
    if gain < 1:
        assert outcome.verdict is Verdict.UNCHANGED
        assert outcome.why
        assert outcome.tuned == outcome.baseline
        return
    assert outcome.verdict is Verdict.IMPROVED
    assert outcome.tuned.metric >= 0.95
    assert outcome.speedup > 1.0
    assert outcome.tuned.latency_s < outcome.baseline.latency_s


def test_times_beside_busy_processes_are_a_warning(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any("other processes" in w for w in bench.tune().warnings)
    monkeypatch.setattr(Race, "denied", 0.551)
    (found,) = (w for w in bench.tune().warnings if "other processes" in w)
    assert found.startswith("calls waited 55% of their time for other processes")


def test_a_budget_is_kept_and_said(bench: Bench) -> None:
    free = bench.tune(metric="max_abs", tolerance=0.0)
    assert free.evaluations > 2
    outcome = bench.tune(metric="max_abs", tolerance=0.0, max_trials=1)
    assert outcome.evaluations == 2  # the baseline's, and one
    assert outcome.verdict is Verdict.UNCHANGED
    assert "the limit of one trial is reached" in outcome.why


def test_a_plan_that_passes_is_found_by_the_only_trial(bench: Bench) -> None:
    """It is looked at before the search, which then asked for a budget to see it again."""
    outcome = bench.tune(max_trials=1)
    assert outcome.improved
    (trial,) = outcome.trials
    assert trial.passed


def test_the_seconds_count_from_when_it_was_asked_for(bench: Bench) -> None:
    said: list[str] = []

    def report(stage: str, done: int, total: int) -> None:
        del done, total
        said.append(stage)

    outcome = bench.tune(start_s=time.perf_counter() - 1000.0, progress=report)
    assert outcome.seconds > 1000.0
    # Loading took a fifth of what such a search takes, give or take a factor of two.
    (expected,) = [one for one in said if isinstance(one, ExpectedTime)]
    least, most = map(int, re.findall(r"(\d+) min", expected))
    assert least == pytest.approx(5000 / 2 / 60, rel=0.1)
    assert most == pytest.approx(2 * 5000 / 60, rel=0.1)
    assert expected.most_s == pytest.approx(10_000, rel=0.1)


def test_a_plan_that_is_not_fast_enough(bench: Bench) -> None:
    fast = bench.tune()
    assert fast.speedup > 2
    outcome = bench.tune(min_speedup=fast.speedup * 1.5)
    assert outcome.verdict is Verdict.UNCHANGED
    said = "as fast as fp32 here" in outcome.why or "not fast enough" in outcome.why
    assert said, "it is faster, and that it is not is not said"


def test_what_passes_between_two_steps_is_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One candidate at first, of everything low, misses: steps of the frontier are tried."""
    worst = deviation_of_all_low(bench)
    monkeypatch.setattr(tuning, "propose", lambda *_, **__: [])
    outcome = bench.tune(metric="max_abs", tolerance=worst * 0.9)
    assert outcome.improved
    assert set(outcome.plan.formats.values()) == {Format.FP16, Format.FP32}


def test_a_budget_finds_a_faster_plan(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the frontier only the most accurate step and all low are candidates at first."""
    tolerance = 0.9 * deviation_of_all_low(bench)
    every = tuning.propose
    monkeypatch.setattr(tuning, "propose", lambda *a, **k: every(*a, **k)[:2])
    first = bench.tune(metric="max_abs", tolerance=tolerance)
    more = bench.tune(metric="max_abs", tolerance=tolerance, max_trials=8)
    assert first.improved
    assert more.improved
    assert more.tuned.metric <= tolerance
    assert more.speedup >= first.speedup
    assert more.evaluations <= 9
    assert more.evaluations > first.evaluations


def test_after_a_miss_plans_of_the_error_that_is_allowed_are_tried(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metric says it: of all low it is known, and of nothing low it is the baseline."""
    worst = deviation_of_all_low(bench)
    asked: list[float] = []

    def near(_planner: object, _analysis: object, error: float, *_: object) -> list[Any]:
        asked.append(error)
        return []

    monkeypatch.setattr(loop, "near", near)
    monkeypatch.setattr(tuning, "propose", lambda *_, **__: [])
    outcome = bench.tune(metric="max_abs", tolerance=worst * 0.5, max_trials=4)
    lowest = max(c.predicted_error for c in outcome.findings.candidates) ** 2
    before, after = asked[0], asked[-1]
    assert after < before
    assert lowest / 16 < after < lowest  # half the error, squared, with a chance to miss


def test_a_search_goes_on_where_the_engine_does_not_run_single_roundings(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended in the engine's error, after plans had been evaluated."""

    def refused(*_: object, **__: object) -> None:
        raise EngineError("no kernel for a switch")

    monkeypatch.setattr(EngineExamined, "analysis", refused)
    monkeypatch.setattr(EngineExamined, "outline", refused)
    told: list[str] = []
    monkeypatch.setattr(EngineSubject, "tell", lambda _, *texts: told.extend(texts))
    outcome = bench.tune(metric="max_abs", tolerance=1e-9)
    assert any(not trial.passed for trial in outcome.trials)
    assert "the errors of single ops are not known: no kernel for a switch" in told


def test_the_journal_says_what_was_measured_and_why(bench: Bench) -> None:
    worst = deviation_of_all_low(bench)
    outcome = bench.tune(metric="max_abs", tolerance=0.3 * worst)
    journal = outcome.findings.journal
    evaluated = [step.plan for step in journal if step.what == "evaluation"]
    assert evaluated == [t.name for t in outcome.trials]
    raced = [step.plan for step in journal if step.what == "race"]
    assert {*evaluated} <= {*raced}
    assert all(0 <= step.chance <= 1 and step.gain < 1 for step in journal)
    written = outcome.to_dict()["journal"]
    assert [step["what"] for step in written[:2]] == ["fp32", "race"]
    assert {step.what for step in journal if not step.plan} <= {
        "fp32",
        "errors of ops",
        "more plans",
    }
    assert journal[-1].plan in evaluated
    assert journal[-1].text.startswith(f"the search ends with {journal[-1].plan}: ")
    assert journal[0].text == f"fp32: 0; a plan passes from {0.3 * worst:.6g} down"
    assert re.match(
        r"benchmark of .*, worth [\d.]+ \(would save \d+\.\d% ± \d+% of the time,"
        r" chance to pass \d+%.*\): took .* s, x\d",
        journal[1].text,
    )


def answering(*metrics: float) -> EvalFunction:
    """A metric of 1 for fp32, then these, one for each evaluation; the last for the rest."""
    calls: list[Run] = []

    def score(run: Run) -> float:
        if run_once(run):
            calls.append(run)
        number = len(calls) - BASELINE - 1
        return 1.0 if number < 0 else metrics[min(number, len(metrics) - 1)]

    return score


def test_a_plan_that_passed_is_not_lost(bench: Bench) -> None:
    """Where all that is tried after it misses."""
    outcome = bench.tune(evaluate=answering(0.0, 1.0, 0.0), max_trials=5)
    assert [t.passed for t in outcome.trials][:3] == [False, True, False]
    assert outcome.improved
    assert outcome.plan.digest == outcome.trials[1].key.plan


def test_where_corrected_plans_miss_those_without_corrections_are_tried(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a corrected plan is less, and its metric may be worse all the same."""
    made: list[Proposal] = []

    def corrected(corrections: Corrections, loop: Loop) -> list[Proposal]:
        best = loop.best
        assert best is not None, "they are corrected to beat what was found without"
        if not made:
            belief = loop.belief
            other = lowered_by_one(belief.planner, belief.analysis, best.plan)[0]
            made.append(replace(other, time_s=best.predicted_cost / 2, error=best.error / 4))
            corrections.before[other.plan.digest] = best.plan
        return made

    monkeypatch.setattr(tuning, "corrected", corrected)
    outcome = bench.tune(evaluate=answering(0.0, 1.0, 0.0), max_trials=8)
    assert len(made) == 1
    assert {t.key.plan: t.passed for t in outcome.trials}[made[0].plan.digest] is False
    assert outcome.improved
    assert outcome.plan.digest != made[0].plan.digest


@pytest.fixture
def branches(bench: Bench) -> Bench:
    """Two branches of a model, each with a product."""
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(np.eye(8, dtype=np.float32), "w0"),
        numpy_helper.from_array(np.eye(8, dtype=np.float32), "w1"),
        numpy_helper.from_array(rng.standard_normal((1, 8)).astype(np.float32) / 64, "b"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"], "fine"),
        helper.make_node("Add", ["a", "b"], ["y"], "fine_bias"),
        helper.make_node("MatMul", ["z", "w1"], ["huge"], "huge"),
    ]
    made = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8])
        for name in ("x", "z", "y", "huge")
    ]
    graph = helper.make_graph(nodes, "net", made[:2], made[2:], weights)
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    onnx.save(model, bench.model)
    return bench


def test_a_single_unit_is_found_that_no_step_of_the_frontier_has_alone(
    branches: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every plan that is proposed lowers the op that the metric does not bear."""

    first: list[Array] = []

    def evaluate(run: Run) -> float:
        (y, *_) = run(dict.fromkeys("xz", np.ones((2, 8), np.float32))).values()
        first.append(y)
        return float(np.array_equal(y, first[0]))

    def measured(_: object, plan: Plan) -> float:
        return 0.0 if plan.formats["huge"] is Format.FP16 else 1.0

    monkeypatch.setattr(PlanModels, "evaluate", measured)
    every = tuning.propose

    def all_but_it_alone(*args: Any, **given: Any) -> list[Any]:
        found = every(*args, **given)
        return [p for p in found if p.plan.formats["huge"] is Format.FP16]

    monkeypatch.setattr(tuning, "propose", all_but_it_alone)
    monkeypatch.setattr(proposers, "between", lambda *_, **__: [])
    monkeypatch.setattr(loop, "near", lambda *_, **__: [])
    without = branches.tune(evaluate=evaluate)
    assert not without.improved
    assert "--max-trials" in without.why
    found = branches.tune(evaluate=evaluate, max_trials=20)
    assert found.improved
    assert found.plan.formats["huge"] is Format.FP32
    assert found.plan.formats["fine"] is Format.FP16
    assert found.evaluations <= 21
    names = {c.plan.digest: c.name for c in found.findings.candidates}
    assert names[found.plan.digest].startswith("with one")


def test_one_unit_more_is_lowered_where_there_is_budget(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the plan found, unit by unit, to all that may be low."""
    every = tuning.propose
    monkeypatch.setattr(tuning, "propose", lambda *a, **k: every(*a, **k)[:2])
    monkeypatch.setattr(tuning, "lowest", lambda *_, **__: [])
    monkeypatch.setattr(proposers, "between", lambda *_, **__: [])
    monkeypatch.setattr(loop, "near", lambda *_, **__: [])
    first = bench.tune(max_trials=1)
    more = bench.tune(max_trials=20)
    assert first.improved
    assert more.speedup > 1.03 * first.speedup
    low = [sum(f is Format.FP16 for f in o.plan.formats.values()) for o in (first, more)]
    assert low[0] < low[1]


def test_an_op_that_the_engine_refuses_low_keeps_fp32_and_the_search_goes_on(
    bench: Bench,
) -> None:
    outcome = bench.tune(engine=replace(bench.engine, refuses_low="middle"))
    assert outcome.improved
    formats = outcome.plan.formats
    assert formats["middle"] is Format.FP32
    assert Format.FP16 in formats.values()
    assert outcome.plan.keep_ops
    assert "no op is replaced by another" in outcome.why
    said = "'middle' keeps fp32: planned in fp16, "
    (note,) = (note for note in outcome.warnings if note.startswith(said))
    assert "no kernel for node 'middle'" in note


def test_where_the_engine_refuses_all_plans_its_first_words_are_told(bench: Bench) -> None:
    outcome = bench.tune(engine=replace(bench.engine, refuses_low="any"))
    assert not outcome.improved
    assert "no plan can be judged: no kernel for node 'any'" in outcome.why


def retrained(model: Path, to: Path) -> Path:
    """The model with weights that differ somewhat and other names of its nodes."""
    proto, draw = onnx.load(model), np.random.default_rng(2)
    for number, node in enumerate(proto.graph.node):
        node.name = f"op{number}"
    for weight in proto.graph.initializer:
        array = numpy_helper.to_array(weight)
        moved = array * (1 + 1e-3 * draw.standard_normal(array.shape))
        weight.CopyFrom(numpy_helper.from_array(moved.astype(np.float32), weight.name))
    onnx.save(proto, to)
    return to


def between_all_and_none(bench: Bench) -> float:
    """A tolerance that a mix of formats keeps, and the lowest plan does not."""
    return 0.9 * deviation_of_all_low(bench)


def test_a_plan_to_start_from_saves_evaluations(bench: Bench, tmp_path: Path) -> None:
    tolerance = between_all_and_none(bench)
    plain = bench.tune(metric="max_abs", tolerance=tolerance)
    assert plain.improved, plain.why
    again = bench.tune(metric="max_abs", tolerance=tolerance, start=plain.plan)
    assert again.improved, again.why
    assert again.trials[0].name == "the plan to start from"
    assert again.trials[0].passed
    assert again.evaluations <= plain.evaluations
    new = replace(bench, model=retrained(bench.model, tmp_path / "new.onnx"))
    version = new.tune(metric="max_abs", tolerance=tolerance, start=plain.plan)
    assert version.improved, version.why
    assert version.plan.formats.keys() == {f"op{n}" for n in range(7)}
    assert any("7 of its 7 ops are here; 7 by other names" in w for w in version.warnings)


def test_a_start_on_a_rewired_model_says_so(bench: Bench, tmp_path: Path) -> None:
    data = tmp_path / "gate.npz"
    draw = np.random.default_rng(0).standard_normal
    np.savez(data, x=draw((16, 8)).astype(np.float32))
    weight = numpy_helper.from_array(draw((8, 16)).astype(np.float32), "w")
    versions: list[Bench] = []
    for gate in ("Sub(f, g)", "Sub(g, f)"):
        model = onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["" : 18]> net (float[n,8] x) => (float[n,8] y) {'
            " [product] p = MatMul(x, w) [halves] f, g = Split<axis = 1, num_outputs = 2>(p)"
            f" [gate] y = {gate} }}"
        )
        model.graph.initializer.append(weight)
        onnx.save(model, path := tmp_path / f"version{len(versions)}.onnx")
        versions.append(replace(bench, model=path, data=data))
    plan = versions[0].tune(metric="cosine").plan
    again, other = (one.tune(metric="cosine", start=plan) for one in versions)
    told = "attributes or inputs: 1 (gate)"
    assert [any(told in w for w in one.warnings) for one in (again, other)] == [False, True]


def test_a_start_that_misses_is_no_result(bench: Bench) -> None:
    lowest = bench.tune(metric="max_abs", tolerance=10.0).plan
    tolerance = between_all_and_none(bench)
    outcome = bench.tune(metric="max_abs", tolerance=tolerance, start=lowest)
    assert not outcome.trials[0].passed
    assert outcome.plan.formats != lowest.formats
    assert outcome.improved == bench.tune(metric="max_abs", tolerance=tolerance).improved


def test_the_plan_of_another_model_is_no_start(bench: Bench, tmp_path: Path) -> None:
    plan = bench.tune().plan
    other = tmp_path / "other.onnx"
    weight = numpy_helper.from_array(np.ones((3, 3), np.float32), "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "product")
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 3, 8, 3]) for n in "xy"]
    graph = helper.make_graph([node], "other", ports[:1], ports[1:], [weight])
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), other)
    data = tmp_path / "other.npz"
    x = np.random.default_rng(0).standard_normal((16, 3, 8, 3)).astype(np.float32)
    np.savez(data, x=x)
    with pytest.raises(ModelError, match=r"made for another model: 0 of its 7 ops.*start, "):
        replace(bench, model=other, data=data).tune(metric="cosine", start=plan)


def test_sensitivities_are_measured_once(bench: Bench, tmp_path: Path) -> None:
    study = Study(tmp_path / "study.db")
    first = bench.tune(study=study, max_trials=3)  # counted: they are measured at once
    assert (first.probes > 0, first.reused_sensitivities) == (True, ())
    # Another tolerance and another objective ask for the same errors.
    for other in (
        bench.tune(study=study, tolerance=0.2),
        bench.tune(study=Study(study.path), objective=Objective.SIZE),
    ):
        assert (other.probes, other.reused_sensitivities) == (0, ("fp16",))
    assert other.findings.sensitivities[0].error == pytest.approx(
        first.findings.sensitivities[0].error
    )
    new = replace(bench, model=retrained(bench.model, tmp_path / "new.onnx"))
    assert new.tune(study=study).reused_sensitivities == ()
    x = np.random.default_rng(9).standard_normal((40, 3, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "more.npz", x=x, label=np.zeros(40, np.int64))
    moved = replace(bench, data=tmp_path / "more.npz")
    assert moved.tune(study=study, metric="cosine").reused_sensitivities == ()
    assert bench.tune(study=study, policy="auto:bf16").reused_sensitivities == ()
