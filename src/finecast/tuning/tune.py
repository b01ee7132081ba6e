"""From a model, data and a criterion to the fastest plan that meets the criterion.

Laws: the result never misses the criterion and is never slower than the fp32 model run in
the same way; the winner was evaluated and timed again in this run; where no plan helps, the
outcome says so, and why. For a device that is not here, times are modelled and accuracy is
that of its emulation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from finecast.data.workload import Workload
from finecast.engines.probe import drop_slow_formats
from finecast.errors import EngineError, Unfit, WrongNumbersError
from finecast.graph import Node
from finecast.measure.racing import ANCHOR, Effort
from finecast.measure.timing import now_s, pass_over
from finecast.native.subject import Built, Examined, Hinted, Subject, UserRules
from finecast.numbers.formats import Format
from finecast.numbers.thresholds import MODELLED_GAIN, SAME_TIME
from finecast.planning.placing import place
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, Proposal
from finecast.planning.proposing import (
    between,
    lowered_by_one,
    lowest,
    near,
    predicted_cost,
    propose,
    raised_by_one,
    stated,
)
from finecast.processes.memory import loaded_bytes, most_loaded_bytes, packed
from finecast.progress import Notice, Phases, Progress, silent
from finecast.rules.policy import Policy
from finecast.tuning import measuring
from finecast.tuning.certifying import certifier_of
from finecast.tuning.conclusion import Conclusion, last_race
from finecast.tuning.executor import Executor, LocalExecutor, LostTrialError
from finecast.tuning.findings import findings
from finecast.tuning.goal import Budget, Goal
from finecast.tuning.hint import (
    coded_over_hints,
    hinted_proposals,
    stated_by_hint,
    with_hinted_errors,
    with_hints,
)
from finecast.tuning.kv_cache import KvCache, kv_caches, with_kv_caches
from finecast.tuning.measuring import Measurements, Measuring
from finecast.tuning.probing import Probing
from finecast.tuning.result import Result
from finecast.tuning.search import (
    Candidate,
    Corrections,
    as_fast_as_finer,
    chain,
    undecided,
    worth_timing,
)
from finecast.tuning.trials import Trials, nan_baseline

# A plan may miss the criterion if its predicted output error is above this share of the error
# that the criterion is expected to allow.
_NEARLY: Final = 0.8
# A plan is not adjusted if its error is then still predicted to be above this many times the
# allowed one.
_FAR: Final = 1.5
# Adjustments are taken to leave at least this share of a plan's squared error, a tenth of the
# error itself.
_LEAST_LEFT: Final = 0.01
# Plans that are aimed at the error that is allowed, one after the other: the share of that
# error that each is predicted to have.
_AIMS: Final = (0.98, 0.98)
# Searches by probes, each of which ends in a trial that tells better what is allowed.
_SEARCHES: Final = 3
# Most further steps of the frontier that become candidates where the first ones do not settle
# the search. Bisection evaluates three or four of them.
_MORE_STEPS: Final = 7
# Uncertainty of predicted costs that the search reckons with: plans within about 14% of the
# one found race with it. If that one gains nothing, all plans race.
_PREDICTED: Final = 0.05
# Plans that are predicted to take at most so many times as long as the fastest race first.
# Predictions are off by some ten percent for either of two plans.
_NEARLY_AS_FAST: Final = 1.15
# Where no plan is predicted to gain, one that is predicted to take this many times as long as
# fp32 is not compiled to be timed. Sums of single kernels' times are off by some ten percent.
_HOPELESS: Final = 1.5
# What a search takes after the rules have judged: this many evaluations of all data, this many
# times as long as it took to load the model and to observe its values (plans are compiled and
# roundings are probed), and its races: some ten rounds of eight models, and longer ones of the
# last few. To import libraries takes seconds, once. That is rough: a range of 1.6 times to
# either side is told, where it is long.
_EVALUATIONS: Final = 3
_MODELS: Final = 3
_IMPORTS_S: Final = 2.0
_RACES_S: Final = 5.0
_CALLS: Final = 100
_WITHIN: Final = 1.6
_LONG_S: Final = 30.0
# Where a format has more ops than this, what all of them lose together is measured: the error
# of each may then not matter.
_MANY: Final = 160
# Ops that keep fp32 as the engine computes them wrongly, one after the other.
_MOST_WRONG: Final = 4


def tune(
    subject: Subject,
    workload: Workload,
    goal: Goal,
    policy: Policy,
    *,
    user_rules: UserRules = (),
    executor: Executor | None = None,
    start: Plan | None = None,
    progress: Progress = silent,
) -> Result:
    """Find the fastest plan that keeps ``goal`` on all of the workload's data.

    Plans are evaluated by ``executor``; without one, in this process. Trials are kept in the
    subject's study.

    A plan to ``start`` from, of this model or of another version of it, is tried first. If it
    keeps the goal, only faster ones are tried.

    Raises:
        UsageError: If the policy does not fit the model or the device.
        ModelError: If the fp32 model gives NaN, or the model cannot be converted, or the plan
            to start from is of another model.
        EngineError: If the fp32 model cannot be run.
    """
    budget, progress = Budget(goal=goal), Phases(progress, "load", goal.start_s)
    workload = goal.objective.timed(workload)
    measuring = Measuring(
        objective=goal.objective,
        subject=subject,
        workload=workload,
        racer=None if executor is None else executor.racer,
    )
    measuring.check()
    executor = executor or LocalExecutor(criterion=goal.criterion, measuring=measuring)
    untried: tuple[str, ...] = ()
    if policy.io_state:
        policy = replace(policy, state=workload.state)
    elif workload.state and not policy.retypes_ports:
        untried = ("state that is carried keeps its type: --io state has it decided, too",)
    if policy.open_formats:
        untried += tuple(filter(None, (subject.untried,)))
        formats = policy.formats if policy.by_hint else subject.formats  # a hint has one
        policy = replace(policy, formats=formats, open_formats=False)
    subject.check_formats(policy)
    subject.model.check_policy(policy)  # refuses a misspelt name before any long work
    progress("baseline", 0, 1)
    baseline = _baseline(subject, workload, executor)
    goal.criterion.check(baseline, workload.worst)
    certifier = certifier_of(goal.criterion, baseline, workload.groups)
    if certifier is not None:
        progress(Notice(certifier.expectation), 1, 1)
    progress("baseline", 1, 1)
    narrowed, left_out = policy, ()
    if goal.objective.of_time:
        progress("format speeds", 0, 1)
        narrowed, left_out = drop_slow_formats(policy, subject.speed, user_rules)
    progress("rules", 0, 1)

    def examine(policy: Policy) -> Examined:
        return subject.examine(policy, user_rules, workload, progress)

    examined = examine(narrowed)
    _tell_time(subject, workload, progress)
    tuning = _Tuning(
        subject=subject,
        examine=examine,
        workload=workload,
        executor=executor,
        left_out=(*left_out, *untried),
        progress=progress,
        measuring=measuring,
        examined=examined,
        start={} if start is None else _placed(start, subject, examined.planner),
        corrections=Corrections.of(measuring, examined, policy),
        trials=Trials(
            model=subject.model.digest,
            workload=workload,
            baseline=baseline,
            certifier=certifier,
            runner=goal.objective.keyed(subject.runner),
            study=subject.study,
            progress=progress,
            budget=budget,
        ),
    )
    outcome = tuning.run()
    phases = progress.seconds()
    return replace(outcome, phases=phases, seconds=sum(phases.values()))


def _tell_time(subject: Subject, workload: Workload, progress: Phases) -> None:
    """Tell how long the search takes in all, if that is long.

    On an emulated device nearly all of the time goes into runs of the emulator for
    sensitivities, which take many times as long as fp32's. Their progress tells their number.
    """
    if subject.target:
        return
    spent = progress.seconds()
    all_s, evaluation_s = sum(spent.values()), spent.get("baseline", 0.0)
    races_s = _RACES_S
    if _CALLS * evaluation_s > _RACES_S:
        start = now_s()
        pass_over(subject.reference, workload.timing())()
        races_s = max(_RACES_S, _CALLS * (now_s() - start))
    prepared_s = max(all_s - evaluation_s - _IMPORTS_S, 0.0)
    all_s += _EVALUATIONS * evaluation_s + _MODELS * prepared_s + races_s
    if all_s >= _LONG_S:
        least, most = (_rounded(s) for s in (all_s / _WITHIN, all_s * _WITHIN))
        progress(Notice(f"this takes {least} to {most} in all, as it looks now"), 0, 1)


def _rounded(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{round(seconds, -1):.0f} s"


def _placed(start: Plan, subject: Subject, planner: Planner) -> Mapping[str, Format]:
    """The formats, by node name, of a plan of this model or of another version of it.

    Raises:
        ModelError: If it is the plan of another model.
    """
    placement = place(start, planner.graph, planner.opset)
    placement.check(where=f"--start, {subject.model.name}")
    if start.model != planner.graph.digest:
        subject.tell(f"the plan to start from is {placement.note}")
    return placement.plan.formats


def _named_in(text: str, nodes: Iterable[Node]) -> list[Node]:
    """The nodes that an engine's message names, or whose native kind it names.

    Engines give ops that they made themselves the kind and a number: ``Swish_12``.
    """
    words = {word.strip(".,:;'\"()[]") for word in text.split()}
    kinds = {re.sub(r"_\d+$", "", word) for word in words}
    return [n for n in nodes if n.name in words or n.native.rpartition("::")[2] in kinds]


def _baseline(subject: Subject, workload: Workload, executor: Executor) -> float:
    value = executor.baseline(workload)
    if math.isnan(value):
        first = partial(subject.first_nan, workload)
        raise nan_baseline(subject.model.name, workload, first)
    return value


@dataclass(slots=True, kw_only=True)
class _Tuning:
    """The state of one search.

    Attributes:
        executor: Evaluates models on all data.
        examine: Lets the rules judge the subject's ops under a policy.
        start: Formats by node name of the plan to start from; empty for none.
        started: That plan on this model.
        left_out: Formats and rewritings that are not tried, and why.
        built: Models of plans by the plan's digest, as long as they may still be chosen.
        candidates: Every plan that was raced or predicted to be fast.
        fp32: The cost of the fp32 model in the first race, by the objective; predicted
            before any race.
        predicting: Whether plans are ranked by predicted costs. Where each costs a
            compilation, only plans that keep the criterion are then compiled.
        hints: Models that stand beside the result, by name: what the engine lowers by itself.
        hinted: Digests of the plans of what it lowers.
        frontier: The first steps of the frontier, those too slow to be raced among them.
        waiting: Proposals that race only if those that raced first gain too little.
        caches: What each format of a KV cache that the engine keeps saves and loses.
        dropped: Digests of plans whose models do not run as planned; they race once.
    """

    subject: Subject
    workload: Workload
    executor: Executor
    examine: Callable[[Policy], Examined]
    left_out: tuple[str, ...]
    examined: Examined
    corrections: Corrections
    trials: Trials
    measuring: Measuring
    progress: Phases
    start: Mapping[str, Format] = field(default_factory=dict[str, Format])
    started: Proposal | None = None
    built: dict[str, Built] = field(default_factory=dict[str, Built])
    candidates: list[Candidate] = field(default_factory=list[Candidate])
    analysis: Analysis | None = None
    fp32: float | None = None
    predicting: bool = False
    hints: dict[str, Built] = field(default_factory=dict[str, Built])
    hinted: set[str] = field(default_factory=set[str])
    frontier: list[Proposal] = field(default_factory=list[Proposal])
    waiting: Sequence[Proposal] = ()
    caches: Sequence[KvCache] = ()
    dropped: set[str] = field(default_factory=set[str])

    def run(self) -> Result:
        if not self.examined.planner.is_free:
            return self._unchanged("the rules leave no op a lower format")
        try:
            proposals = self._right_proposals()
        except EngineError as error:
            return self._unchanged(f"no plan can be judged: {error.what}")
        if not proposals:
            why = "no plan lowers an op that computes: there is nothing to gain"
            return self._unchanged(why)
        compiles, objective = self.subject.compiles, self.measuring.objective
        self.predicting = compiles and objective.of_latency
        while (outcome := self._searched(proposals)) is None:
            self._keep()
            proposals = self._unsettled(proposals)
            if not proposals:
                return self._unchanged(self._none_better)
        return outcome

    def _unsettled(self, proposals: Sequence[Proposal]) -> list[Proposal]:
        """What may gain enough after all, where the search so far found nothing that does.

        Each of these costs a compilation. Plans that raced and gained too little are left out;
        if none raced, so are those that are predicted to be far slower than fp32.
        """
        assert self.analysis is not None
        assert self.fp32 is not None
        if not self.predicting:  # some raced
            self.candidates = [c for c in self.candidates if c.timed]
            raced = {c.plan.digest for c in self.candidates}
            return [p for p in self.waiting or proposals if p.plan.digest not in raced]
        price = partial(predicted_cost, self.examined.planner, self.analysis)
        self.candidates = [replace(c, cost=price(c.plan)) for c in self.candidates]
        limit = _HOPELESS * self.fp32
        near = {c.plan.digest for c in self.candidates if c.cost <= limit}
        if near:
            self.predicting, self.fp32, self.candidates = False, None, []
        return [p for p in proposals if p.plan.digest in near]

    def _searched(self, proposals: Sequence[Proposal]) -> Result | None:
        """The outcome of one search among ``proposals`` and what follows from them.

        None where no plan so found gains enough, and not all raced.
        """
        alone = self._fastest_misses(proposals)
        first, self.waiting = self._fastest_first(proposals)
        candidates, fp32 = self._rank(first)
        chained = chain(candidates, fp32, self._min_speedup)
        tried = self.trials.first(chained)
        missed = tried is not None and self.trials.misses(tried, self._evaluate)
        if missed or tried is None:
            finer = self.waiting if tried is None else self._finer(tried.error)
            candidates += self._rank(finer)[0] if finer else []
            chained = chain(candidates, fp32, self._min_speedup)
        tried = self.trials.first(chained)
        if tried is None:
            if self.predicting:
                return None
            return self._unchanged(self._none_better)
        if alone or missed or self.trials.misses(tried, self._evaluate):
            candidates += self._near()
            chained = chain(candidates, fp32, self._min_speedup)
        chained = self._clearly_faster(chained, tried)
        incumbent = self._search(chained)
        incumbent = self._waited(candidates, incumbent, fp32)
        incumbent = self._closer(candidates, incumbent, fp32)
        finer = self._refine(chained, incumbent)
        if finer:
            candidates += finer
            incumbent = self._faster(finer, incumbent, fp32)
        corrected = self._corrected(candidates, incumbent)
        if corrected:
            candidates += corrected
            incumbent = self._faster(corrected, incumbent, fp32)
        over = self._over_hint(candidates, incumbent)
        if over:
            candidates += over
            incumbent = self._faster(over, incumbent, fp32)
        singles, incumbent = self._one_by_one(candidates, incumbent)
        if incumbent is None:
            why = self.trials.none_passes(len(candidates) + singles)
            if self._goal.is_unlimited:
                why += "; with --max-trials or --timeout single ops are tried, too"
            return self._unchanged(why)
        return self._settled(incumbent)

    def _clearly_faster(
        self, chained: Sequence[Candidate], tried: Candidate
    ) -> Sequence[Candidate]:
        """Where a plan was given to start from and the first one passed: it, and faster ones.

        To evaluate a plan that may be as fast, within the spread of costs, gains nothing.
        """
        if self.started is None or not self.trials.has_passed(tried):
            return chained
        self.candidates = [
            c for c in self.candidates if c is tried or c.most * SAME_TIME < tried.least
        ]
        return [c for c in chained if c in self.candidates]

    def _fastest_misses(self, proposals: Sequence[Proposal]) -> bool:
        """Whether the fastest of the plans predicted to be so fails, before others race.

        It is mostly the first that is tried anyway. Where it fails, plans that are predicted
        to fail, too, are not compiled to be raced. It races with the others later, so that a
        few rounds do.
        """
        of_time = self.measuring.objective.of_time
        races = of_time and not (self.predicting or self.subject.target or self.start)
        # Within a budget a trial is worth more than a compilation.
        if not races or not self._goal.is_unlimited or self.analysis is None:
            return False
        price = partial(predicted_cost, self.examined.planner, self.analysis)
        limit = SAME_TIME * min((p.time_s for p in self.frontier), default=0.0)
        known = (p for p in proposals if math.isfinite(p.time_s))
        alike = self._alike()
        fastest = [p for p in known if id(p) not in alike and price(p.plan) <= limit]
        if not fastest or len(fastest) == len(proposals):
            return False
        ranked, fp32 = self._rank(fastest, measuring.GLANCE)
        tried = self.trials.first(chain(ranked, fp32, self._min_speedup))
        return tried is not None and self.trials.misses(tried, self._evaluate)

    def _fastest_first(
        self, proposals: Sequence[Proposal]
    ) -> tuple[Sequence[Proposal], Sequence[Proposal]]:
        """Proposals that race first, and those that race only if the fastest of these fails.

        To build, load and time a model takes far longer than to predict its time. If the
        fastest plan keeps the criterion, none that is predicted to be much slower is chosen;
        so it is with a plan to start from. Where one failed and its metric tells which error
        is allowed, it is the fastest one of no more error that counts, and plans far above
        that error wait, too. What a hint lowers has no predicted time, and races; so does a
        plan that was tried, as its model is loaded.
        """
        if self.predicting or self.analysis is None:
            return proposals, ()
        price = partial(predicted_cost, self.examined.planner, self.analysis)
        costs = [p.time_s if math.isfinite(p.time_s) else price(p.plan) for p in proposals]
        both = [*zip(proposals, costs, strict=True)]
        allowed, most = self.trials.allowed_error(), math.inf
        counts = [c for p, c in both if p is self.started]
        if not counts and allowed is not None:
            counts = [c for p, c in both if p.error <= allowed]
            most = _FAR**2 * allowed if counts else math.inf
        limit = _NEARLY_AS_FAST * min(counts or costs)
        alike = self._alike()
        first, later = list[Proposal](), list[Proposal]()
        for one, cost in both:
            fine = one.error <= most or not math.isfinite(one.time_s)
            now = cost <= limit and fine and id(one) not in alike
            (first if now or one.plan.digest in self.trials.tried else later).append(one)
        return first, later

    def _alike(self) -> set[int]:
        """Identities of steps that are predicted as fast as a more accurate one."""
        return {id(step) for step in as_fast_as_finer(self.frontier)}

    def _finer(self, missed: float) -> Sequence[Proposal]:
        """Waiting proposals that race after the plan of error ``missed`` failed.

        All that are more accurate, where it is not known which error is allowed.
        """
        left = [p for p in self.waiting if p.error < missed]
        allowed = self.trials.allowed_error()
        told = allowed is not None and any(p.error <= allowed for p in left)
        return self._fastest_first(left)[0] if told else left

    def _waited(
        self, candidates: list[Candidate], incumbent: Candidate | None, fp32: float
    ) -> Candidate | None:
        """The fastest plan that passes after those that waited, as trials tell which may pass.

        New candidates are added to ``candidates``.
        """
        while (
            self.waiting and (missed := self.trials.least_missed) and self.trials.may_go_on()
        ):
            limit, raced = self._limit(incumbent), {c.plan.digest for c in self.candidates}
            least = 0.0 if incumbent is None else incumbent.error
            left = [p for p in self.waiting if least < p.error < missed and p.time_s < limit]
            left = [p for p in left if p.plan.digest not in raced]
            more = self._finer(missed) if left else ()
            fresh = [p for p in more if p in left]
            if not fresh:
                break
            self.waiting = [p for p in self.waiting if p not in fresh]
            ranked = self._rank(fresh)[0]
            candidates += ranked
            incumbent = self._faster(ranked, incumbent, fp32)
        return incumbent

    def _settled(self, incumbent: Candidate) -> Result | None:
        """The outcome of the last race, between ``incumbent`` and plans that may be better.

        None if the best plan of that race gains too little, and others never raced.
        """
        assert self.fp32 is not None
        unproven = self.trials.certify()
        if unproven:
            held = [c for c in self.candidates if self.trials.has_passed(c)]
            if not held:
                return self._unchanged(f"no plan is certified: {unproven}")
            incumbent = min(held, key=lambda c: c.cost)
            if incumbent.plan.digest not in self.built:  # a faster one was to be chosen
                self.built[incumbent.plan.digest] = self.subject.model.build(incumbent.plan)

        races: list[Measurements] = []
        evaluation_s = self.progress.seconds().get("baseline", 0.0)

        def race(racing: Sequence[Candidate]) -> Measurements:
            sizes = {c.plan.digest: self._bytes_of(c.plan.digest) for c in racing}
            fitting = packed(sizes, self._room)[0]
            errors = {c.plan.digest: c.error for c in racing if c.plan.digest in fitting}
            effort = replace(
                measuring.FINAL,
                settle_s=max(measuring.FINAL.settle_s, evaluation_s),
                errors=errors,
                sure=racing[0].plan.digest,
            )
            self._make_room(errors)
            models = {digest: self.built[digest] for digest in errors}
            races.append(self._conclusion.race(models, effort))
            return races[-1]

        loaded = [c for c in self.candidates if c.plan.digest in self.built]
        if self.predicting:  # of those predicted to be equally fast one is compiled
            loaded = chain(loaded, self.fp32, self._min_speedup)
        best, measurements = last_race(
            incumbent,
            loaded,
            fp32=self.fp32,
            trials=self.trials,
            evaluate=self._evaluate,
            race=race,
            error=lambda c: self.measuring.output_error(self.built[c.plan.digest]) ** 2,
        )
        better = self._as_the_hint(best, measurements)
        if better is not best:
            return self._settled(better)
        gain = measurements.costs.speed(best.plan.digest).median
        goes_on = gain < self._goal.min_speedup and (self.predicting or self.waiting)
        for measured in races if self.predicting or goes_on else ():
            self._time(measured)
        if goes_on:
            return None
        self._keep(best)
        gains, built = self.corrections.gained(best.plan), self.built[best.plan.digest]
        return self._conclusion.improved(best, built, measurements, gains)

    def _as_the_hint(self, best: Candidate, measurements: Measurements) -> Candidate:
        """The best plan after those of what the hint lowers, if the hint alone is faster.

        They wait where they are predicted to be slow: no prediction knows what an engine
        spares under its own hint.
        """
        costs, name = measurements.costs, best.plan.digest
        hints = [n for n, one in self.hints.items() if isinstance(one, Hinted)]
        faster = any(costs.between(n, name).high < 1 for n in hints if n in costs.names)
        fresh = [p for p in self.waiting if p.plan.digest in self.hinted] if faster else []
        if not fresh or not self.trials.may_go_on():
            return best
        self.waiting = [p for p in self.waiting if p not in fresh]
        ranked, fp32 = self._rank(fresh)
        return self._faster(ranked, best, fp32) or best

    def _unchanged(self, why: str) -> Result:
        self._keep()
        return self._conclusion.unchanged(why)

    def _keep(self, *candidates: Candidate) -> None:
        """Unload the models of all other candidates."""
        kept = {c.plan.digest for c in candidates}
        for digest in [d for d in self.built if d not in kept]:
            self.built.pop(digest).release()

    @property
    def _none_better(self) -> str:
        """Text: why no candidate gains enough."""
        assert self.fp32 is not None
        return self._conclusion.none_better(self.candidates, self.fp32)

    @property
    def _conclusion(self) -> Conclusion:
        return Conclusion(
            subject=self.subject,
            workload=self.workload,
            executor=self.executor,
            planner=self.examined.planner,
            analysis=self.analysis,
            trials=self.trials,
            measuring=self.measuring,
            hints=self.hints,
            left_out=self.left_out,
            findings=findings(
                self.examined,
                self.analysis,
                self.frontier,
                self.candidates,
                None if self.predicting else self.fp32,
                self.trials.tried,
                self.measuring.errors,
            ),
        )

    @property
    def _goal(self) -> Goal:
        return self.trials.budget.goal

    @property
    def _min_speedup(self) -> float:
        """The speedup that a candidate has to have; if predicted, half of the gain."""
        least = self._goal.min_speedup
        return (1 + least) / 2 if self.predicting else least

    def _search(
        self, chained: Sequence[Candidate], incumbent: Candidate | None = None
    ) -> Candidate | None:
        """The fastest of ``chained`` that passes, or ``incumbent`` where none does.

        Law: none that passed before is faster. The chain may lack a plan that passed, where
        one of less predicted error took its place, and fails. Models of plans that cannot be
        chosen any more are unloaded.
        """
        passed = [c for c in self.candidates if self.trials.has_passed(c)]
        kept = (
            *undecided(self.candidates),
            *chained,
            *passed,
            *([incumbent] if incumbent else ()),
        )
        self._keep(*kept)
        incumbent = self.trials.search(chained, self._evaluate) or incumbent
        assert self.fp32 is not None
        limit = self.fp32 / self._min_speedup
        if incumbent is not None:
            limit = min(limit, incumbent.cost / self._least_gain)
        faster = [c for c in passed if c.cost < limit and c.plan.digest in self.built]
        fastest = sorted(faster, key=lambda c: c.cost)[:1]
        return self.trials.search(fastest, self._evaluate) or incumbent

    def _faster(
        self, candidates: Sequence[Candidate], incumbent: Candidate | None, fp32: float
    ) -> Candidate | None:
        """The fastest of ``candidates`` that passes and beats ``incumbent``, or that one."""
        limit = (fp32, self._min_speedup)
        if incumbent is not None:
            limit = (incumbent.cost, self._least_gain)
        return self._search(chain(candidates, *limit), incumbent)

    def _corrected(
        self, candidates: Sequence[Candidate], incumbent: Candidate | None
    ) -> list[Candidate]:
        """Candidates with corrected biases, where faster plans with codes missed.

        What the correction gains is measured on the most accurate plan that missed; where that
        is no more than noise, no plan is corrected. Those that are corrected are plans whose
        error then meets the criterion, and candidates near the allowed error, as far as they
        are predicted to be faster than ``incumbent``.
        """
        analysis, corrections = self.analysis, self.corrections
        if any(c.plan.adjustments for c in candidates):
            return []
        coded = [c for c in self.trials.missed(candidates, incumbent) if c.plan.encodings]
        if not coded or analysis is None or not self.trials.may_go_on():
            return []
        nearest = min(coded, key=lambda c: c.error)
        allowed = self.trials.allowed_error() or nearest.error
        if not self._any_within(allowed, allowed / _LEAST_LEFT, candidates):
            return []
        self.progress("adjusting", 0, 1)
        gain = corrections.gain(nearest.plan)
        if gain is None or not gain.gains:
            return []
        # What a plan may have that is then corrected.
        before = allowed / gain.share if gain.share else math.inf
        least, most = _NEARLY**2 * allowed, _FAR**2 * before
        cost = math.inf if incumbent is None else incumbent.cost / self._least_gain
        about = [c for c in candidates if c.plan.encodings and least < c.error <= most]
        fresh, limit = near(self.examined.planner, analysis, before), self._limit(incumbent)
        wanted = [
            *(p for p in fresh if p.time_s < limit),
            *(c.proposal for c in about if c.cost < cost),
        ]
        return self._rank(corrections.proposals(wanted, gain))[0]

    def _any_within(self, least: float, most: float, candidates: Sequence[Candidate]) -> bool:
        """Whether a known plan, or one between steps of the frontier, has such an error.

        Where plans far below the allowed error are followed by plans far above it, there is
        none that an adjustment could make pass, and what adjustments gain is not measured.
        """
        assert self.analysis is not None
        known = (*self.frontier, *candidates)
        return any(_NEARLY**2 * least < one.error <= most for one in known) or bool(
            near(self.examined.planner, self.analysis, most, (1.0,))
        )

    def _over_hint(
        self, candidates: Sequence[Candidate], incumbent: Candidate | None
    ) -> list[Candidate]:
        """The codes of the plan found, and in all other ops what the engine's hint lowers.

        If it has no codes, those of the fastest plan with codes that no miss speaks against.
        Casts around codes may cost more than they gain; under the hint the engine fuses its
        own.
        """
        missed = (c.error for c in self.trials.missed(candidates, None))
        least = min(missed, default=math.inf)
        among = [incumbent] if incumbent and incumbent.plan.encodings else candidates
        coded = [c for c in among if c.plan.encodings and c.error < least]
        if not coded or self.analysis is None or not self.trials.may_go_on():
            return []
        planner, analysis = self.examined.planner, self.analysis
        best = min(coded, key=lambda c: c.cost)
        plans = coded_over_hints(self.subject, best.plan, self.hints.values())
        self.corrections.restated(best.plan, plans)
        known = {c.plan.digest for c in self.candidates}
        proposals = [
            stated_by_hint(planner, analysis, f"{best.name}, over the hint", plan)
            for plan in plans
            if plan.digest not in known
        ]
        return self._rank(proposals)[0] if proposals else []

    def _near(self) -> list[Candidate]:
        """Candidates of the error that the criterion is expected to allow, after a miss.

        From one step of the frontier to the next the error may jump from far above the
        allowed one to far below it.
        """
        allowed = self.trials.allowed_error()
        if allowed is None or self.analysis is None or not self.trials.may_go_on():
            return []
        proposals = near(self.examined.planner, self.analysis, allowed)
        fresh = [p for p in proposals if p.plan.digest not in self.built]
        return self._rank(fresh)[0] if fresh else []

    def _closer(
        self, candidates: list[Candidate], incumbent: Candidate | None, fp32: float
    ) -> Candidate | None:
        """The fastest plan after a few more, each aimed at the error that is allowed.

        Each trial tells better what is allowed and how far predictions are off. Plans that
        are not predicted to be faster than ``incumbent`` are not tried. New candidates are
        added to ``candidates``.
        """
        planner, analysis = self.examined.planner, self.analysis
        if analysis is None:
            return incumbent
        aims = set[float]()
        for share in _AIMS:
            allowed = self.trials.allowed_error()
            if allowed is None or not self.trials.may_go_on():
                break
            if share**2 * allowed in aims:  # no trial has told more since
                continue
            aims.add(share**2 * allowed)
            limit = self._limit(incumbent)
            known = {c.plan.digest for c in self.candidates}
            aimed = near(planner, analysis, allowed, (share,))
            fresh = [p for p in aimed if p.time_s < limit and p.plan.digest not in known]
            if fresh:
                ranked = self._rank(fresh)[0]
                candidates += ranked
                incumbent = self._faster(ranked, incumbent, fp32)
        return self._probed(candidates, incumbent, fp32) if self.subject.target else incumbent

    def _probed(
        self, candidates: list[Candidate], incumbent: Candidate | None, fp32: float
    ) -> Candidate | None:
        """The fastest plan after some of which runs on calibration data say that they pass.

        For modelled devices, where such a run takes no compilation and no race.
        """
        assert self.analysis is not None

        def error(plan: Plan) -> float:
            return self.measuring.plan_error(plan) ** 2

        probing = Probing(planner=self.examined.planner, analysis=self.analysis, error=error)
        for done in range(_SEARCHES):
            tried = [c.plan for c in self.candidates if c.plan.digest in self.trials.tried]
            known = [(plan, error(plan)) for plan in tried]
            allowed = self.trials.allowed_error({plan.digest: e for plan, e in known})
            if not allowed or not self.trials.may_go_on():
                break
            self.progress("probing plans", done, _SEARCHES)
            better = probing.fastest(allowed, known, self._limit(incumbent))
            if better is None:
                break
            ranked = self._rank([better])[0]
            candidates += ranked
            incumbent = self._faster(ranked, incumbent, fp32)
        return incumbent

    @property
    def _least_gain(self) -> float:
        """The ratio by which a plan has to be faster than the one found.

        Modelled times have no noise.
        """
        return MODELLED_GAIN if self.subject.target else SAME_TIME

    def _limit(self, incumbent: Candidate | None) -> float:
        """The predicted cost below which a plan is faster than ``incumbent``."""
        if incumbent is None or self.analysis is None:
            return math.inf
        cost = predicted_cost(self.examined.planner, self.analysis, incumbent.plan)
        return cost / self._least_gain

    def _refine(
        self, chained: Sequence[Candidate], incumbent: Candidate | None
    ) -> list[Candidate]:
        """Candidates between the plan found and the next faster one, which misses.

        At first only some steps of the frontier are candidates. The steps between them are
        tried, too, where none of the first ones passes or the user's budget has room.
        """
        tried = [c for c in chained if incumbent is None or c.error > incumbent.error]
        if not tried or self.analysis is None or not self.trials.may_go_on():
            return []
        if incumbent is not None and not self._goal.goes_on:
            return []
        errors = (0.0 if incumbent is None else incumbent.error, tried[-1].error)
        proposals = between(self.examined.planner, self.analysis, errors, most=_MORE_STEPS)
        return self._rank(proposals)[0] if proposals else []

    def _one_by_one(
        self, candidates: Sequence[Candidate], incumbent: Candidate | None
    ) -> tuple[int, Candidate | None]:
        """Try changes of single units while the user's budget lasts.

        From a plan that passes, one more unit is lowered. Where none passes, one unit of the
        plan nearest to the criterion is raised, and single units are lowered alone: a unit
        whose predicted error is small may be what fails the metric. The best plan so tried is
        changed next.

        Returns:
            The number of plans that were built, and the fastest plan that passes.
        """
        made, at = 0, incumbent
        tried = {c.plan.digest for c in candidates}
        while self._goal.goes_on and self.trials.may_go_on():
            at = at or self.trials.nearest(candidates)
            fresh = [p for p in self._singles(at, incumbent) if p.plan.digest not in tried]
            if not fresh:
                break
            tried |= {p.plan.digest for p in fresh}
            self._keep(*([incumbent] if incumbent else ()))
            ranked, fp32 = self._rank(fresh)
            made += len(ranked)
            limit = (
                fp32 / self._min_speedup if incumbent is None else incumbent.cost / SAME_TIME
            )
            faster = sorted((c for c in ranked if c.cost < limit), key=lambda c: c.cost)
            passed = self._first_passing(faster)
            if passed is None and incumbent is not None:
                break
            incumbent, at = passed, passed or self.trials.nearest(faster) or at
        return made, incumbent

    def _singles(self, at: Candidate | None, incumbent: Candidate | None) -> list[Proposal]:
        planner, analysis = self.examined.planner, self.analysis
        if analysis is None or at is None:
            return []
        if incumbent is not None:
            return lowered_by_one(planner, analysis, incumbent.plan)
        alone = planner.highest()
        return [
            *raised_by_one(planner, analysis, at.plan),
            *lowered_by_one(planner, analysis, alone),
        ]

    def _first_passing(self, candidates: Sequence[Candidate]) -> Candidate | None:
        return next((c for c in candidates if self.trials.search([c], self._evaluate)), None)

    def _right_proposals(self) -> list[Proposal]:
        """The first plans, without ops in low formats that the engine computes wrongly.

        Raises:
            EngineError: If no plan can be judged.
        """
        for _ in range(_MOST_WRONG):
            try:
                return self._accepted_proposals()
            except WrongNumbersError as error:
                self._leave_out(error.unfit)
        raise EngineError("the engine computes ever more low ops wrongly")

    def _judge_by(self, policy: Policy) -> None:
        """Let the rules judge the ops anew, by another policy."""
        self.examined = self.examine(policy)
        self.corrections = Corrections.of(self.measuring, self.examined, policy)

    def _leave_out(self, unfit: Unfit) -> None:
        """Let ops keep out of formats in which the engine does not run them as planned."""
        self.examined = self.examined.without(unfit)
        policy = self.examined.planner.policy
        self.corrections = Corrections.of(self.measuring, self.examined, policy)

    def _accepted_proposals(self) -> list[Proposal]:
        """The first plans, under the first policy whose lowest plans the engine runs.

        Where it refuses those of the user's policy, all ops are stated as the model has them;
        and then the ops that its message names keep fp32, too.

        Raises:
            EngineError: If it refuses them all; the first error.
        """
        try:
            return self._proposals()
        except EngineError as error:
            refused = error
        first = self.examined, self.corrections
        policy = self.examined.planner.policy
        named = _named_in(refused.what, self.examined.planner.graph.float_nodes)
        text = f"the engine refuses plans as they are usually stated ({refused.what})"
        plain = f"{text}: no op is replaced by another"
        if not policy.keep_ops:
            self._judge_by(replace(policy, keep_ops=True))
            with suppress(EngineError):
                first_proposals = self._proposals()
                self.left_out += (plain,)
                return first_proposals
        if named:
            does = f"does not run the model with it: {refused.what}"
            with suppress(EngineError):
                for fmt in policy.formats:
                    self._leave_out({node.name: (fmt.label, does) for node in named})
                first_proposals = self._proposals()
                self.left_out += () if policy.keep_ops else (plain,)
                return first_proposals
        self.examined, self.corrections = first
        raise refused

    def _proposals(self) -> list[Proposal]:
        planner = self.examined.planner
        of_time = self.measuring.objective.of_time
        lost = self._lost() if self.examined.measures_lowest else {}
        analysed = self.examined.analysis(of_time=of_time, lost=lost)
        analysis = self.measuring.priced(planner, analysed)
        self.analysis = analysis
        self.progress("plans", 0, 1)
        proposals = propose(planner, analysis, max_steps=self.subject.max_steps)
        self.frontier = proposals
        near = worth_timing(proposals, self._min_speedup)
        self.hints, hinted = hinted_proposals(self.subject, planner, analysis)
        self.hinted = {p.plan.digest for p in hinted}
        slowest = max((p.time_s for p in proposals), default=0.0)
        self.caches = kv_caches(self.measuring, planner, slowest)
        first_proposals = (
            *self._started(analysis),
            *hinted,
            *near,
            *lowest(planner, analysis),
        )
        exact = [p for p in proposals if not p.plan.lowers]
        first_proposals += (*with_kv_caches(exact, self.caches),)
        return [p for p in first_proposals if p.plan.lowers]

    def _lost(self) -> dict[Format, float]:
        """The share of what may be lost that is lost by all ops in a format without scales.

        An evaluation of such a plan costs less than to round each of many ops alone, but for
        a user who counts evaluations: the plans' own come first.
        """
        lost_shares: dict[Format, float] = {}
        planner, trials = self.examined.planner, self.trials
        if self._goal.max_trials is not None:
            return lost_shares
        for fmt in (f for f in planner.policy.formats if not f.has_scales):
            plan = planner.lowest(fmt)
            many = sum(f is fmt for f in plan.formats.values()) > _MANY
            if not many or not trials.may_go_on():
                continue
            self.progress("evaluation", 0, 1)
            with suppress(EngineError):  # a lost trial among them
                self.built[plan.digest] = self.subject.model.build(plan)
                lost_shares[fmt] = trials.share_lost(plan, self._evaluate)
        return lost_shares

    def _started(self, analysis: Analysis) -> list[Proposal]:
        """The plan to start from, whose error is then expected to pass."""
        planner, given = self.examined.planner, self.start
        if not given:
            return []
        formats = {n.id: given[n.name] for n in planner.graph.nodes if n.name in given}
        made = stated(planner, analysis, formats, "the plan to start from")
        self.started = made
        self.trials.expected = made.error if made.plan.lowers else None
        return [made]

    def _rank(
        self, proposals: Sequence[Proposal], how: Effort | None = None
    ) -> tuple[list[Candidate], float]:
        """Candidates from the cost of every proposal, and the cost of fp32.

        As the machine's load changes between races, measured costs are relative to the fp32
        model of the same race, times its cost in the first race.
        """
        stated = with_hints(self.subject, with_kv_caches(proposals, self.caches))
        unique = {p.plan.digest: p for p in reversed(stated)}
        unique = {digest: p for digest, p in unique.items() if digest not in self.dropped}
        if not unique and self.fp32 is not None:
            return [], self.fp32
        for done, (digest, proposal) in enumerate(unique.items()):
            self.progress("convert", done, len(unique))
            if digest not in self.built:
                self.built[digest] = self.subject.model.build(proposal.plan)
        if self.predicting:
            return self._predicted(unique)
        groups = self._groups(unique)
        candidates = [one for group in groups for one in self._raced(group, how)]
        self.candidates = [c for c in self.candidates if c.plan.digest not in unique]
        self.candidates += candidates
        self.progress("timing", 1, 1)
        assert self.fp32 is not None
        return candidates, self.fp32

    def _raced(
        self, unique: Mapping[str, Proposal], how: Effort | None = None
    ) -> list[Candidate]:
        """Candidates from one race of these proposals beside fp32."""
        self._make_room(unique)
        models = {digest: self.built[digest] for digest in unique}
        errors = {digest: p.error for digest, p in unique.items()}
        how = self.trials.budget.within(how or measuring.RANKING)
        effort = replace(how, limit=1 / self._min_speedup, errors=errors)
        self.progress("timing", 0, 1)
        measurements = self.measuring.measure(
            models, effort, self.examined.planner, self.analysis
        )
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

    def _make_room(self, wanted: Collection[str]) -> None:
        """Unload other models, if they and those of ``wanted`` do not fit into memory."""
        loaded = {digest for digest, one in self.built.items() if one.loaded is not None}
        if not self._fits({*wanted, *loaded}):
            for digest in loaded - {*wanted}:
                self.built[digest].release()

    def _fits(self, digests: Collection[str]) -> bool:
        """Whether the models of these plans can be loaded at once, beside fp32."""
        return sum(map(self._bytes_of, digests)) <= self._room

    def _bytes_of(self, digest: str) -> int:
        return self._loaded_bytes(self.built[digest].size_bytes)

    def _loaded_bytes(self, size: int) -> int:
        """What a model of ``size`` counts as when it is loaded; as fp32 if the size is 0."""
        ops = len(self.examined.planner.graph.nodes)
        return loaded_bytes(size or self.subject.model.size_bytes, ops)

    @property
    def _room(self) -> int:
        """Bytes that models may take that are loaded beside fp32."""
        return most_loaded_bytes() - self._loaded_bytes(0)

    def _predicted(self, unique: Mapping[str, Proposal]) -> tuple[list[Candidate], float]:
        """Candidates with predicted costs, and that of fp32.

        A plan without a predicted cost counts as the fastest: all is low in it.
        """
        fastest = min(p.time_s for p in (*self.frontier, *unique.values()))
        self.fp32 = max(p.time_s for p in self.frontier)
        candidates = [
            Candidate(
                name=p.name,
                plan=p.plan,
                error=p.error,
                cost=(time_s := p.time_s if math.isfinite(p.time_s) else fastest),
                latency_s=time_s,
                casts=self.built[digest].casts,
                spread=_PREDICTED,
                predicted_cost=p.time_s,
                timed=False,
            )
            for digest, p in unique.items()
        ]
        self.candidates += candidates
        return candidates, self.fp32

    def _time(self, measurements: Measurements) -> None:
        """Give predicted candidates the costs of a race; scale those that were not in it."""
        assert self.fp32 is not None
        fp32 = measurements.costs.latency_s(ANCHOR)
        scale = fp32 / self.fp32
        self.candidates = [
            replace(
                c,
                cost=fp32 * measurements.costs.slowdown(c.plan.digest).median,
                latency_s=measurements.times.latency_s(c.plan.digest),
                timed=True,
            )
            if c.plan.digest in measurements.costs.names
            else replace(c, cost=scale * c.cost)
            for c in self.candidates
        ]
        self.fp32, self.predicting = fp32, False

    def _evaluate(self, plan: Plan) -> float:
        """The metric of the plan's model on all data.

        Raises:
            LostTrialError: If the process that evaluates dies, or the model is wrong in a way
                that the metric does not show.
        """
        self._make_room({plan.digest})
        built = self.built[plan.digest]
        evaluation = self.executor.evaluate(built)
        self.measuring.errors[plan.digest] = evaluation.error
        try:
            if self.trials.passing(evaluation.metric):  # to check costs a compilation
                self.subject.check(built, self.measuring.exact())
        except EngineError as error:
            raise LostTrialError(f"is not made: {error.what}") from error
        return evaluation.metric
