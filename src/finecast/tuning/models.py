"""The models of plans in one search: built, loaded as memory allows, raced and evaluated."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from finecast.errors import EngineError
from finecast.measure.racing import ANCHOR
from finecast.native.subject import Built, Subject
from finecast.numbers.thresholds import SAME_TIME
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, Proposal
from finecast.planning.proposing import predicted_cost, sharpened
from finecast.processes.memory import loaded_bytes, most_loaded_bytes, packed
from finecast.progress import Progress
from finecast.tuning import measuring
from finecast.tuning.executor import Executor, LostTrialError
from finecast.tuning.goal import Objective
from finecast.tuning.hint import with_hinted_errors, with_hints
from finecast.tuning.kv_cache import KvCache, with_kv_caches
from finecast.tuning.measuring import Measurements, Measuring
from finecast.tuning.search import Candidate
from finecast.tuning.size import SizeBound
from finecast.tuning.trials import Trials


@dataclass(slots=True, kw_only=True)
class PlanModels:
    """The models of one search's plans, and what was measured of them.

    Attributes:
        subject: What is tuned.
        measuring: Measures by the objective.
        executor: Evaluates models on all data.
        trials: Judges evaluations.
        progress: Told of each step.
        planner: Makes the plans, as the rules judge now.
        analysis: What is predicted of plans; None before it was made.
        fp32: The cost of the fp32 model in the first race, by the objective; predicted
            before any race.
        predicting: Whether plans are ranked by predicted costs. Where each costs a
            compilation, only plans that keep the criterion are then compiled.
        exact_s: The predicted cost of the fp32 model.
        built: Models by the plan's digest, as long as they may still be chosen.
        candidates: Every plan that was raced or predicted to be fast.
        caches: What each format of a KV cache that the engine keeps saves and loses.
        dropped: Digests of plans whose models do not run as planned; they race once. Those
            that exceed the bound on size never do.
        bound: The bound on size; None for none.
    """

    subject: Subject
    measuring: Measuring
    executor: Executor
    trials: Trials
    progress: Progress
    planner: Planner
    analysis: Analysis | None = None
    fp32: float | None = None
    exact_s: float = math.nan
    predicting: bool = False
    built: dict[str, Built] = field(default_factory=dict[str, Built])
    candidates: list[Candidate] = field(default_factory=list[Candidate])
    caches: Sequence[KvCache] = ()
    dropped: set[str] = field(default_factory=set[str])
    bound: SizeBound | None = None

    @property
    def min_speedup(self) -> float:
        """The speedup that a candidate needs; if predicted, half of the gain asked for."""
        least = self.trials.budget.goal.min_speedup
        return (1 + least) / 2 if self.predicting and least > 1 else least

    def rank(self, proposals: Sequence[Proposal]) -> list[Candidate]:
        """Candidates from the cost of every proposal.

        Each is also stated by the engine's hint and with lower KV caches, where that is
        possible. As the machine's load changes between races, measured costs are relative to
        the fp32 model of the same race, times its cost in the first race.
        """
        stated = with_hints(self.subject, with_kv_caches(proposals, self.caches))
        unique = {p.plan.digest: p for p in reversed(stated)}
        unique = {digest: p for digest, p in unique.items() if digest not in self.dropped}
        for done, proposal in enumerate(unique.values()):
            self.progress("convert", done, len(unique))
            self.build(proposal.plan)
        if self.bound is not None:
            large = {d for d in unique if not self.bound.keeps(self.built[d])}
            self.dropped |= large
            unique = {d: p for d, p in unique.items() if d not in large}
        if not unique:
            return []
        if self.predicting:
            candidates = self._predicted(unique)
        else:
            candidates = [c for group in self._groups(unique) for c in self._raced(group)]
            self.progress("timing", 1, 1)
        self.candidates = [c for c in self.candidates if c.plan.digest not in unique]
        self.candidates += candidates
        return candidates

    def sharpen(self, analysis: Analysis) -> None:
        """Take the errors of single ops: plans get their errors and reasons by these."""
        before, self.analysis = self.analysis, analysis
        assert before is not None
        sharper = partial(sharpened, self.planner, before, analysis)
        proposals = {c.plan.digest: sharper(c.proposal) for c in self.candidates}
        self.candidates = [
            replace(
                c, plan=proposals[c.plan.digest].plan, error=proposals[c.plan.digest].error
            )
            for c in self.candidates
        ]
        for digest, proposal in proposals.items():
            if digest in self.trials.errors:
                self.trials.errors[digest] = proposal.error
            if digest in self.built:
                self.built[digest].plan = proposal.plan

    def build(self, plan: Plan) -> Built:
        """The model of a plan, built once."""
        if plan.digest not in self.built:
            self.built[plan.digest] = self.subject.model.build(plan)
        return self.built[plan.digest]

    def _raced(self, unique: Mapping[str, Proposal]) -> list[Candidate]:
        """Candidates from one race of these proposals beside fp32."""
        self.make_room(unique)
        models = {digest: self.built[digest] for digest in unique}
        errors = {digest: p.error for digest, p in unique.items()}
        goal = self.trials.budget.goal
        how = self.trials.budget.within(measuring.RANKING)
        effort = replace(how, limit=1 / goal.min_speedup, errors=errors)
        self.progress("timing", 0, 1)
        measurements = self.measuring.measure(models, effort, self.planner, self.analysis)
        if self.fp32 is None:
            self.fp32 = measurements.costs.latency_s(ANCHOR)
        fp32_s = measurements.times.latency(ANCHOR).median_s
        raced = {d: models[d] for d in measurements.times.names if d in models}
        self.dropped |= models.keys() - raced.keys()
        unique = with_hinted_errors(unique, raced, self.measuring.output_error)
        return [
            Candidate(
                name=p.name,
                plan=p.plan,
                error=p.error,
                cost=self.fp32 * measurements.costs.slowdown(digest).median,
                latency_s=fp32_s * measurements.times.slowdown(digest).median,
                casts=self.built[digest].casts,
                spread=measurements.costs.slowdown(digest).spread,
                predicted_cost=p.time_s,
            )
            for digest, p in unique.items()
            # The engine may lack kernels for a mix of formats.
            if digest in measurements.costs.names
        ]

    def _predicted(self, unique: Mapping[str, Proposal]) -> list[Candidate]:
        """Candidates with predicted costs."""
        assert self.analysis is not None
        self.fp32 = self.exact_s
        return [
            Candidate(
                name=p.name,
                plan=p.plan,
                error=p.error,
                cost=(
                    time_s := p.time_s
                    if math.isfinite(p.time_s)
                    else predicted_cost(self.planner, self.analysis, p.plan)
                ),
                latency_s=time_s,
                casts=self.built[digest].casts,
                spread=SAME_TIME - 1,  # what is about as fast is compiled, too
                predicted_cost=p.time_s,
                timed=False,
            )
            for digest, p in unique.items()
        ]

    def take_times(self, measurements: Measurements) -> None:
        """Give predicted candidates the costs of a race; scale those that were not in it."""
        assert self.fp32 is not None
        fp32 = measurements.costs.latency_s(ANCHOR)
        scale = fp32 / self.fp32
        self.candidates = [
            replace(
                c,
                cost=fp32 * measurements.costs.slowdown(c.plan.digest).median,
                spread=measurements.costs.slowdown(c.plan.digest).spread,
                latency_s=measurements.times.latency_s(c.plan.digest),
                timed=True,
            )
            if c.plan.digest in measurements.costs.names
            else replace(c, cost=scale * c.cost)
            for c in self.candidates
        ]
        self.fp32, self.predicting = fp32, False

    def evaluate(self, plan: Plan) -> float:
        """The metric of the plan's model on all data.

        Raises:
            LostTrialError: If the process that evaluates dies, or the model is wrong in a way
                that the metric does not show.
        """
        built = self.build(plan)
        self.make_room({plan.digest})
        evaluation = self.executor.evaluate(built)
        self.measuring.errors[plan.digest] = evaluation.error
        try:
            if self.trials.passing(evaluation.metric):  # to check costs a compilation
                self.subject.check(built, self.measuring.exact())
        except EngineError as error:
            raise LostTrialError(f"is not made: {error.what}") from error
        return evaluation.metric

    @property
    def errors_are_cheap(self) -> bool:
        """Whether the output error of a plan that raced takes little more than a call.

        On an emulated device a run takes as long as an evaluation, and what was timed with
        many requests in flight is loaded anew for one.
        """
        objective = self.measuring.objective
        return not self.subject.target and objective is not Objective.THROUGHPUT

    def error(self, candidate: Candidate) -> float:
        """The relative error of the outputs of a plan's model on the timed feeds."""
        return self.measuring.output_error(self.build(candidate.plan))

    def keep(self, *candidates: Candidate) -> None:
        """Unload the models of all other candidates."""
        kept = {c.plan.digest for c in candidates}
        for digest in [d for d in self.built if d not in kept]:
            self.built.pop(digest).release()

    def fitting(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """The first of ``candidates``, as many as can be loaded at once.

        Others are unloaded where there is no room beside these.
        """
        sizes = {c.plan.digest: self._bytes_of(c.plan.digest) for c in candidates}
        fitting = packed(sizes, self._room)[0]
        self.make_room(fitting)
        return [c for c in candidates if c.plan.digest in fitting]

    def make_room(self, wanted: Collection[str]) -> None:
        """Unload other models, if they and those of ``wanted`` do not fit into memory."""
        loaded = {digest for digest, one in self.built.items() if one.loaded is not None}
        if not self._fits({*wanted, *loaded}):
            for digest in loaded - {*wanted}:
                self.built[digest].release()

    def _groups(self, unique: Mapping[str, Proposal]) -> list[dict[str, Proposal]]:
        """The proposals in as many races as memory needs, those predicted to be fast first.

        A step whose time is not predicted has all ops low, and counts as the fastest.
        """
        if self._fits(unique):
            return [{**unique}]
        known = {digest: one.time_s for digest, one in unique.items()}
        order = sorted(known, key=lambda d: known[d] if math.isfinite(known[d]) else 0.0)
        sizes = {digest: self._bytes_of(digest) for digest in order}
        return [{d: unique[d] for d in group} for group in packed(sizes, self._room)]

    def _fits(self, digests: Collection[str]) -> bool:
        """Whether the models of these plans can be loaded at once, beside fp32."""
        return sum(map(self._bytes_of, digests)) <= self._room

    def _bytes_of(self, digest: str) -> int:
        return self._loaded_bytes(self.built[digest].size_bytes)

    def _loaded_bytes(self, size: int) -> int:
        """What a model of ``size`` counts as when it is loaded; as fp32 if the size is 0."""
        ops = len(self.planner.graph.nodes)
        return loaded_bytes(size or self.subject.model.size_bytes, ops)

    @property
    def _room(self) -> int:
        """Bytes that models may take that are loaded beside fp32."""
        return most_loaded_bytes() - self._loaded_bytes(0)
