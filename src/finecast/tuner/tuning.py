"""From a model, data and a criterion to the fastest plan that keeps it.

Laws: the result never misses the criterion and is never slower than the fp32 model in the
same engine; where nothing helps it says so, and why.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Final

from finecast.edits import cast_count
from finecast.engines.base import Engine, Feeds, Session
from finecast.engines.loading import load_model
from finecast.engines.probe import speed_of
from finecast.errors import EngineError, ModelError
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import OnnxFile, Prepared
from finecast.measure.criterion import Criterion
from finecast.measure.observe import first_nonfinite, observe
from finecast.measure.timing import Latency, latency, ratio
from finecast.plan import Plan
from finecast.policy import Policy, Scope
from finecast.progress import Progress, silent
from finecast.rules import UserRule
from finecast.sensitivity import squared_error
from finecast.tuner.analysis import (
    Planner,
    make_planner,
    measured_cost,
    profile_ends,
    worthwhile,
)
from finecast.tuner.conversion import kept_notes
from finecast.tuner.proposing import (
    Proposal,
    find_units,
    lowest,
    probe_sensitivity,
    probes,
    propose,
)
from finecast.tuner.search import Candidate, chain
from finecast.tuner.study import Study, Trial
from finecast.tuner.trials import Trials
from finecast.tuner.truth import baseline_of
from finecast.tuner.workload import Workload, run_all, thinned

# A tuned model must win by more than interleaved medians wander on a quiet machine.
_MIN_SPEEDUP: Final = 1.02
_FINAL_TIME_S: Final = 4.0
_RANK_TIME_S: Final = 3.0


class Verdict(Enum):
    """How a tuning ended."""

    IMPROVED = "improved"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Metric, latency and size of one model."""

    metric: float
    latency_s: float
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What tuning found; ``tuned`` and ``plan`` are those of fp32 where it is unchanged.

    The errors are relative errors of the tuned model's outputs against fp32: what the
    sensitivities added up to, and what the engine gave on the timing feeds. ``target`` is the
    device where accuracy was emulated and times are modelled; empty where all was measured.
    ``warnings`` are of what makes the answer weak: data that says little, rules that judge
    nothing. ``reused`` counts the trials that an earlier run made. ``stale`` are files at the
    output's place that were there before and that this run did not replace.
    """

    verdict: Verdict
    why: str
    baseline: Measured
    tuned: Measured
    speedup: float
    speedup_spread: float
    plan: Plan
    casts: int
    trials: tuple[Trial, ...]
    evaluations: int
    seconds: float
    probes: int
    predicted_error: float = 0.0
    measured_error: float = 0.0
    target: str = ""
    warnings: tuple[str, ...] = ()
    reused: int = 0
    stale: tuple[Path, ...] = ()


def tune(
    file: OnnxFile,
    workload: Workload,
    criterion: Criterion,
    policy: Policy,
    engine: Engine,
    *,
    reference: Session | None = None,
    user_rules: tuple[tuple[str, UserRule], ...] = (),
    truth: Session | None = None,
    study: Study | None = None,
    progress: Progress = silent,
) -> Outcome:
    """Find the fastest plan that keeps ``criterion`` on all of the workload's data.

    ``reference`` is the fp32 model, where it is loaded in ``engine`` already; ``truth`` is the
    model whose accuracy is to be kept, where that is another.

    Raises:
        ModelError: If the fp32 model gives NaN, or the model cannot be converted.
        EngineError: If the engine cannot run the fp32 model.
    """
    session = reference or engine.load(file.path)
    tuning = _Tuning(
        file, workload, criterion, policy, engine, user_rules, session, truth, study, progress
    )
    return tuning.run()


class _Tuning:
    def __init__(
        self,
        file: OnnxFile,
        workload: Workload,
        criterion: Criterion,
        policy: Policy,
        engine: Engine,
        rules: tuple[tuple[str, UserRule], ...],
        reference: Session,
        truth: Session | None,
        study: Study | None,
        progress: Progress,
    ) -> None:
        self.file = file
        self.workload = workload
        self.criterion = criterion
        self.policy, self.left_out = worthwhile(policy, engine, rules)
        self.rules = rules
        self.engine = engine
        self.study = study
        self.progress = progress
        self.start = time.perf_counter()
        self.reference = reference
        self.truth = truth
        self.probes = 0

    def run(self) -> Outcome:
        prepared = frontend.prepare(self.file, self.policy)  # a slip in a name shows here
        self.kept = tuple(kept_notes(prepared.graph, self.policy))
        self.progress("baseline", 0, 1)
        baseline = self._baseline()
        self.criterion.check(baseline, self.workload.worst)
        self.trials = Trials(
            file=self.file,
            workload=self.workload,
            criterion=self.criterion,
            baseline=baseline,
            engine=self.engine.name,
            measure=self._evaluate,
            study=self.study,
            progress=self.progress,
        )
        self.progress("baseline", 1, 1)
        timing = self.workload.timing()
        planner = self._planner(prepared)
        if all(len(p.formats) == 1 for p in planner.permissions.values()):
            return self._unchanged(planner, timing, "the rules leave no op a lower format")
        try:
            proposals = self._proposals(planner, timing)
        except EngineError as error:
            why = f"{self.engine.name} cannot run the lowest plan: {error.what}"
            return self._unchanged(planner, timing, why)
        candidates, baseline_s = self._rank(proposals, timing)
        chained = chain(candidates, baseline_s)
        if not chained:
            fastest = min((c.latency_s for c in candidates), default=math.inf)
            why = (
                f"no plan is faster here: the fastest takes {1e3 * fastest:.3g} ms,"
                f" fp32 {1e3 * baseline_s:.3g} ms{self._format_speed()}"
            )
            return self._unchanged(planner, timing, why)
        found = self.trials.search(chained)
        if found is None:
            why = self.trials.none_passes(len(candidates))
            return self._unchanged(planner, timing, why)
        return self._finish(planner, found, timing)

    def _baseline(self) -> float:
        value = baseline_of(self.workload, self.criterion, self.reference, self.truth)
        if math.isnan(value):
            raise ModelError(
                f"the fp32 model's metric is NaN{self._first_nan()}",
                where=self.file.name,
                fix="check data and metric with the fp32 model first",
            )
        return value

    def _first_nan(self) -> str:
        """Name the op that first gives NaN or Inf in fp32, if one can be seen."""
        prepared = frontend.prepare(self.file, Policy(scope=Scope.NONE))
        facts = observe(prepared, lambda: islice(self.workload.calibration(), 1))
        node = first_nonfinite(prepared.graph, facts)
        return f"; the first op to give NaN or Inf is {node!r}" if node else ""

    def _planner(self, prepared: Prepared) -> Planner:
        facts = observe(
            prepared,
            self.workload.calibration,
            on_step=lambda done, total: self.progress("calibration", done, total),
        )
        self.facts = facts
        return make_planner(
            prepared,
            self.policy,
            self.engine,
            facts=facts,
            user_rules=self.rules,
            measured=True,
        )

    def _proposals(self, planner: Planner, timing: Sequence[Feeds]) -> list[Proposal]:
        self.progress("profile", 0, 1)
        profiles = profile_ends(planner, timing[0])
        cost = measured_cost(planner.graph, profiles, self.engine, self.facts)
        self.progress("profile", 1, 1)
        units, points = find_units(planner, profiles)
        rounded = probe_sensitivity(
            planner,
            points,
            [thinned(next(iter(self.workload.calibration())), self.reference.inputs)],
            self.progress,
        )
        self.probes = probes(rounded)
        proposals = propose(planner, units, rounded, cost)
        kept = (p for p in proposals if p.plan.lowers)
        return [*kept, *lowest(planner, rounded, profiles.low_s)]

    def _rank(
        self, proposals: Sequence[Proposal], timing: Sequence[Feeds]
    ) -> tuple[list[Candidate], float]:
        """Time every proposal, interleaved with fp32: predictions only choose which."""
        unique = {p.plan.digest: p for p in reversed(proposals)}
        sessions: dict[str, Session] = {"": self.reference}
        casts: dict[str, int] = {}
        for done, (digest, proposal) in enumerate(unique.items()):
            applied = frontend.apply(self.file, proposal.plan)
            casts[digest] = cast_count(applied.graph, applied.edits)
            try:
                sessions[digest] = load_model(self.engine, applied.model)
            except EngineError:
                continue  # a mix that the engine has no kernels for is no candidate
            self.progress("convert", done + 1, len(unique))
        times = _interleaved(sessions, timing, _RANK_TIME_S)
        candidates = [
            Candidate(
                name=p.name,
                plan=p.plan,
                error=p.error,
                latency_s=times[digest].median_s,
                casts=casts[digest],
            )
            for digest, p in unique.items()
            if digest in times
        ]
        self.progress("timing", 1, 1)
        return candidates, times[""].median_s

    def _evaluate(self, plan: Plan) -> float:
        """The metric of the plan's model on all data."""
        session = load_model(self.engine, frontend.apply(self.file, plan).model)
        return self.workload.evaluate(session, self.truth or self.reference)

    def _format_speed(self) -> str:
        """What the engine makes of the formats on this device, by probing."""
        texts = (speed_of(self.engine, fmt).text for fmt in self.policy.formats)
        return "; ".join(("", *texts, *self.left_out))

    def _finish(self, planner: Planner, found: Candidate, timing: Sequence[Feeds]) -> Outcome:
        applied = frontend.apply(self.file, found.plan)
        sessions = {"": self.reference, "tuned": load_model(self.engine, applied.model)}
        errors = [
            squared_error(
                list(sessions["tuned"].run(f).values()), list(self.reference.run(f).values())
            )
            for f in timing
        ]
        times = _interleaved(sessions, timing, _FINAL_TIME_S)
        won = ratio(times[""], times["tuned"])
        if won.median < _MIN_SPEEDUP:
            why = f"the plan {found.name} is not faster: {won.median:.3g}x fp32's speed"
            return self._unchanged(planner, timing, why)
        baseline = Measured(
            metric=self.trials.baseline,
            latency_s=times[""].median_s,
            size_bytes=self.file.size_bytes,
        )
        tuned = Measured(
            metric=self.trials.metric(found.plan),
            latency_s=times["tuned"].median_s,
            size_bytes=frontend.size_bytes(applied.model),
        )
        return self._outcome(
            Verdict.IMPROVED,
            "; ".join((f"{found.name} keeps the criterion", *self.left_out)),
            (baseline, tuned),
            found.plan,
            casts=found.casts,
            speedup=won.median,
            spread=won.spread,
            errors=(math.sqrt(found.error), math.sqrt(sum(errors) / len(errors))),
        )

    def _unchanged(self, planner: Planner, timing: Sequence[Feeds], why: str) -> Outcome:
        times = _interleaved({"": self.reference}, timing, 0.5)
        same = Measured(
            metric=self.trials.baseline,
            latency_s=times[""].median_s,
            size_bytes=self.file.size_bytes,
        )
        plan = planner.unchanged(why)
        return self._outcome(Verdict.UNCHANGED, why, (same, same), plan, casts=0)

    def _outcome(
        self,
        verdict: Verdict,
        why: str,
        ends: tuple[Measured, Measured],
        plan: Plan,
        *,
        casts: int,
        speedup: float = 1.0,
        spread: float = 0.0,
        errors: tuple[float, float] = (0.0, 0.0),
    ) -> Outcome:
        return Outcome(
            verdict=verdict,
            why=why,
            baseline=ends[0],
            tuned=ends[1],
            speedup=speedup,
            speedup_spread=spread,
            plan=plan,
            casts=casts,
            trials=tuple(self.trials.tried.values()),
            evaluations=self.trials.evaluations,
            seconds=time.perf_counter() - self.start,
            probes=self.probes,
            reused=len(self.trials.reused),
            predicted_error=errors[0],
            measured_error=errors[1],
            warnings=self.kept,
        )


def _interleaved(
    sessions: Mapping[str, Session], timing: Sequence[Feeds], seconds: float
) -> dict[str, Latency]:
    def call(session: Session) -> None:
        run_all(session, timing)

    callables = {name: (lambda s=session: call(s)) for name, session in sessions.items()}
    return latency(callables, min_time_s=seconds, repeats=7, warmup=3)
