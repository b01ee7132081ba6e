"""From a model, data and a criterion to the fastest plan that meets the criterion.

Laws: the result never misses the criterion and is never slower than the fp32 model run in
the same way; the winner was evaluated and timed again in this run; where no plan helps, the
outcome says so, and why. For a device that is not here, times are modelled and accuracy is
that of its emulation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from finecast.data.workload import Workload
from finecast.engines.probe import drop_slow_formats
from finecast.errors import EngineError, Unfit, WrongNumbersError
from finecast.graph import Node
from finecast.native.conversion_notes import commonest_verdict
from finecast.native.orders import OrderSpread
from finecast.native.subject import Built, Examined, Hinted, Subject, UserRules
from finecast.numbers.formats import Format
from finecast.numbers.thresholds import MODELLED_GAIN, SAME_TIME
from finecast.planning.placing import place
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, Proposal
from finecast.planning.proposing import lowest, near, propose, stated
from finecast.progress import ExpectedTime, Notice, Phases, Progress, silent
from finecast.rules.policy import Policy
from finecast.tuning import measuring
from finecast.tuning.belief import CLOSELY, ROUGHLY, Belief
from finecast.tuning.certifying import certifier_of, copies_told
from finecast.tuning.conclusion import Conclusion, final_benchmark
from finecast.tuning.executor import Executor, LocalExecutor
from finecast.tuning.findings import SearchStep, findings
from finecast.tuning.goal import ANY_SPEEDUP, MIN_SPEEDUP, Budget, Goal
from finecast.tuning.hint import hinted_proposals
from finecast.tuning.kv_cache import kv_caches, with_kv_caches
from finecast.tuning.loop import TRIALS, Loop, Proposer
from finecast.tuning.measuring import Afresh, Measurements, Measuring
from finecast.tuning.models import PlanModels
from finecast.tuning.proposers import (
    Probed,
    corrected,
    more_steps,
    over_hint,
    single_changes,
)
from finecast.tuning.result import Result
from finecast.tuning.search import Candidate, Corrections, chain, worth_timing
from finecast.tuning.size import SizeBound
from finecast.tuning.trials import Trials, nan_baseline

# A search takes so many times as long as it took until the rules had judged: in the laboratory
# between half of that and twice that, where it is long enough to be told.
_TIMES: Final = 5
# Ops that keep fp32 as the engine computes them wrongly, one after the other.
_MOST_WRONG: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a search is done: the model in an engine, its data, and what evaluates plans.

    ``afresh`` times the result in other processes, where these can load it.
    """

    subject: Subject
    workload: Workload
    executor: Executor | None = None
    afresh: Afresh | None = None


def tune(
    place: Place,
    goal: Goal,
    policy: Policy,
    *,
    user_rules: UserRules = (),
    start: Plan | None = None,
    progress: Progress = silent,
    elsewhere: Callable[[Progress], Place | None] | None = None,
) -> Result:
    """Find the fastest plan that keeps ``goal`` on all of the workload's data.

    Plans are evaluated by the place's executor; without one, in this process. Trials are kept
    in the subject's study.

    Once the fp32 model has been evaluated, ``elsewhere`` says where the search is done, if
    another place is better.

    A plan to ``start`` from, of this model or of another version of it, is tried first. If it
    keeps the goal, only faster ones are tried.

    Raises:
        UsageError: If the policy does not fit the model or the device.
        ModelError: If the fp32 model gives NaN, or the model cannot be converted, or the plan
            to start from is of another model.
        EngineError: If the fp32 model cannot be run.
    """
    asked, told = policy, progress
    subject, workload, executor = place.subject, place.workload, place.executor
    progress = Phases(progress, "load", goal.start_s)
    workload = goal.objective.timed(workload)
    measuring = Measuring(
        objective=goal.objective,
        subject=subject,
        workload=workload,
        racer=None if executor is None else executor.racer,
        afresh=place.afresh,
    )
    measuring.check()
    executor = executor or LocalExecutor(criterion=goal.criterion, measuring=measuring)
    untried: tuple[str, ...] = ()
    if policy.io_state:
        policy = replace(policy, state=workload.state)
    elif workload.state and not policy.retypes_ports:
        untried = (
            "state that passes from call to call keeps its type: --io state decides it, too",
        )
    if policy.open_formats:
        untried += tuple(filter(None, (subject.untried,)))
        formats = policy.formats if policy.by_hint else subject.formats  # a hint has one
        policy = replace(policy, formats=formats, open_formats=False)
    subject.check_formats(policy)
    subject.model.check_policy(policy)  # refuses a misspelt name before any long work
    progress("baseline", 0, 1)
    baseline = _baseline(subject, workload, executor)
    if elsewhere is not None and (other := elsewhere(progress)) is not None:
        return tune(other, goal, asked, user_rules=user_rules, start=start, progress=told)
    goal.criterion.check(baseline, workload.worst)
    certifier = certifier_of(goal.criterion, baseline, workload.groups)
    if certifier is not None:
        progress(Notice(certifier.expectation), 1, 1)
        subject.tell(*copies_told(workload))
    progress("baseline", 1, 1)
    narrowed, left_out = policy, ()
    if goal.objective.of_time:
        progress("format speeds", 0, 1)
        narrowed, left_out = drop_slow_formats(policy, subject.speed, user_rules)
    progress("rules", 0, 1)

    def examine(policy: Policy) -> Examined:
        return subject.examine(policy, user_rules, workload, progress)

    examined = examine(narrowed)
    _tell_time(subject, progress, goal.timeout_s)
    bound = SizeBound.of(goal, subject.model.size_bytes, examined.planner.graph)
    if bound is not None and bound.excludes_fp32 and goal.min_speedup == MIN_SPEEDUP:
        goal = replace(goal, min_speedup=ANY_SPEEDUP)

    def spread_of(plan: Plan, keeps: Callable[[float], bool]) -> OrderSpread:
        return subject.spread(plan, workload, keeps, progress)

    trials = Trials(
        model=subject.model.digest,
        workload=workload,
        baseline=baseline,
        certifier=certifier,
        runner=goal.objective.keyed(subject.runner),
        study=subject.study,
        progress=progress,
        budget=Budget(goal=goal),
        spread_of=spread_of if subject.target else None,
    )
    models = PlanModels(
        subject=subject,
        measuring=measuring,
        executor=executor,
        trials=trials,
        progress=progress,
        planner=examined.planner,
        bound=bound,
    )
    tuning = _Tuning(
        models=models,
        workload=workload,
        progress=progress,
        examine=examine,
        examined=examined,
        corrections=Corrections.of(measuring, examined, policy),
        left_out=(*left_out, *untried),
        start={} if start is None else _placed(start, subject, examined.planner),
    )
    outcome = tuning.run()
    phases = progress.seconds()
    return replace(outcome, phases=phases, seconds=sum(phases.values()))


def _tell_time(subject: Subject, progress: Phases, timeout_s: float | None) -> None:
    """Tell how long the search takes in all, if that is long, or that its time is over.

    On an emulated device nearly all of the time goes into runs of the emulator for
    sensitivities, which take many times as long as fp32's. Their progress tells their number.
    """
    spent = progress.seconds()
    spent_s, most_s = sum(spent.values()), math.inf if timeout_s is None else timeout_s
    if spent_s >= most_s:
        longest = next(iter(spent))
        over = (
            f"the --timeout of {timeout_s:g} s is over: {longest} took {spent[longest]:.1f} s"
        )
        progress(Notice(f"{over}; one plan is tried, and the search ends"), 0, 1)
        return
    if subject.target:
        return
    expected_s = _TIMES * spent_s
    if expected_s >= 30:  # who waits for less has no use for a forecast
        least_s, most_s = (min(s, most_s) for s in (expected_s / 2, 2 * expected_s))
        remark = (
            f"this takes {_rounded(least_s)} to {_rounded(most_s)} in all, as it looks now"
        )
        progress(ExpectedTime(remark, most_s), 0, 1)


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
    """The state of one tuning.

    Attributes:
        models: Builds, races and evaluates the models of plans.
        progress: Told of each step.
        examine: Lets the rules judge the subject's ops under a policy.
        examined: What the rules judge now.
        corrections: Corrects biases of plans.
        left_out: Formats and rewritings that are not tried, and why.
        start: Formats by node name of the plan to start from; empty for none.
        started: That plan on this model.
        hints: Models that stand beside the result, by name: what the engine lowers by itself.
        hinted: Digests of the plans of what it lowers.
        frontier: The first steps of the frontier, those too slow to be raced among them.
        is_prior: Whether the errors of single ops are not measured yet.
        guesses: Steps of the frontier as it would be if all ops of a format erred alike.
        journal: What was measured, and why.
    """

    models: PlanModels
    workload: Workload
    progress: Phases
    examine: Callable[[Policy], Examined]
    examined: Examined
    corrections: Corrections
    left_out: tuple[str, ...]
    start: Mapping[str, Format] = field(default_factory=dict[str, Format])
    started: Proposal | None = None
    hints: dict[str, Built] = field(default_factory=dict[str, Built])
    hinted: set[str] = field(default_factory=set[str])
    frontier: list[Proposal] = field(default_factory=list[Proposal])
    is_prior: bool = False
    guesses: Sequence[Proposal] = ()
    journal: list[SearchStep] = field(default_factory=list[SearchStep])

    def run(self) -> Result:
        if not self.examined.planner.is_free:
            ops, why = commonest_verdict(self.examined.planner.highest())
            verdict = f" ({ops}: {why})" if why else ""
            return self._unchanged(
                f"no op may have a lower format here{verdict}: finecast explain MODEL says why"
                " of each"
            )
        try:
            proposals = self._right_proposals()
        except EngineError as error:
            return self._unchanged(f"no plan can be judged: {error.what}")
        why = self._too_large()
        if not (why or proposals):
            why = "no op that computes can have reduced precision: there is nothing to gain"
        if why:
            return self._unchanged(why)
        for _ in range(_MOST_WRONG):
            try:
                return self._searched(proposals)
            except WrongNumbersError as error:  # the errors of single ops told of it
                if not error.unfit:
                    raise
                self._leave_out(error.unfit)
                self.models.keep()
                self.models.candidates.clear()
            proposals = self._right_proposals()
        return self._searched(proposals)

    def _searched(self, proposals: Sequence[Proposal]) -> Result:
        """The outcome of a search from these plans."""
        models = self.models
        models.predicting = self.subject.compiles and self.measuring.objective.of_latency
        loop, raced = self._loop(proposals), False
        while (best := loop.run()) is not None:
            self._try_safer(best)
            unproven = models.trials.certify()
            if unproven:
                held = [c for c in models.candidates if models.trials.has_passed(c)]
                if not held:
                    return self._unchanged(f"no plan is certified: {unproven}")
                best = min(held, key=lambda c: c.cost)
            best, measurements = self._final_benchmark(loop, best)
            if self._gains(best, measurements):
                built = models.build(best.plan)
                loads_s = 2 * self.progress.seconds().get("load", 0.0)  # in two processes
                measurements = self._conclusion.confirmed(built, measurements, loads_s)
                if not self._gains(best, measurements):
                    models.take_times(measurements)
            if self._gains(best, measurements):
                return self._improved(best, measurements)
            raced = True
        return self._none(loop, raced=raced)

    def _none(self, loop: Loop, *, raced: bool) -> Result:
        """The outcome without a plan; ``raced``: one gained too little in the last race."""
        models = self.models
        if models.fp32 is None:
            return self._unchanged(f"no plan tried takes at most {self._goal.size_text}")
        kept = any(trial.passed for trial in models.trials.tried.values())
        if raced or kept or not models.trials.tried:
            none_better = self._conclusion.none_better(models.candidates, models.fp32)
            return self._unchanged(none_better)
        why = models.trials.none_passes(len(loop.pool))
        nearest = models.trials.nearest(models.candidates)
        if models.bound is not None and nearest is not None:
            metric = models.trials.metric(nearest.plan)
            why += f"; the best that takes at most {self._goal.size_text} has {metric:.6g}"
        if self._goal.is_unlimited:
            why += "; with --max-trials or --timeout single ops are tried, too"
        return self._unchanged(why)

    def _too_large(self) -> str:
        """Text: that the smallest plan exceeds the bound on size, and what it loses; or empty.

        It is evaluated on all data.
        """
        models, bound = self.models, self.models.bound
        if bound is None or models.analysis is None:
            return ""
        smallest = bound.smallest(models.planner, models.analysis)
        if smallest is None:
            return ""
        proposal, takes = smallest
        text = f"no plan takes at most {self._goal.size_text}: the smallest takes {takes}"
        try:
            metric = models.evaluate(proposal.plan)
        except EngineError as error:
            return f"{text}; it does not run: {error.what}"
        finally:
            models.keep()
        return (
            f"{text}; it has {metric:.6g} on your data, and fp32 {models.trials.baseline:.6g}"
        )

    def _improved(self, best: Candidate, measurements: Measurements) -> Result:
        self.models.keep(best)
        if self.is_prior:
            best = self._outlined(best)
        built, gains = self.models.build(best.plan), self.corrections.gained(best.plan)
        return self._conclusion.improved(best, built, measurements, gains)

    def _outlined(self, best: Candidate) -> Candidate:
        """The result, with the ops that cost it most; no plan was chosen by these errors."""
        of_time, formats = self.measuring.objective.of_time, best.plan.low_formats
        try:
            outline = self.examined.outline(formats, of_time=of_time)
        except EngineError as error:
            self._tell_unprobed(error)
            return best
        self.models.sharpen(self.measuring.priced(self.examined.planner, outline))
        return next(c for c in self.models.candidates if c.plan.digest == best.plan.digest)

    def _tell_unprobed(self, error: EngineError) -> None:
        """Warn that the engine does not run the model with single roundings."""
        self.subject.tell(f"the errors of single ops are not known: {error.what}")

    def _loop(self, proposals: Sequence[Proposal]) -> Loop:
        """The search among the first plans, and those that other proposers add."""
        models, subject, objective = self.models, self.subject, self.measuring.objective
        assert models.analysis is not None
        belief = Belief(
            planner=models.planner,
            analysis=models.analysis,
            order=self.workload.order,
            decisions=models.trials.decisions(),
        )
        errors = [p.error for p in proposals if 0 < p.error < math.inf]
        belief.reference = max(errors, default=1.0)
        if subject.target or not objective.of_time:
            belief.cost_off = math.log(MODELLED_GAIN)  # they are what was predicted
        elif models.predicting:  # of compiled models single kernels tell half as much
            belief.cost_off = 2 * CLOSELY
        known = models.trials.stated_error
        if known is None and self.started is not None:
            known = self.started.error
        if known:
            belief.reference, belief.loss_off = known, ROUGHLY
        proposers: list[Proposer] = [more_steps]
        proposers.append(partial(corrected, self.corrections))
        proposers.append(partial(over_hint, subject, self.hints, self.corrections))
        proposers.append(single_changes)
        loop = Loop(
            models=models,
            belief=belief,
            least_gain=MODELLED_GAIN if subject.target else SAME_TIME,
            probe=Probed() if subject.target else None,
            proposers=proposers,
            start=self.started if self.started and self.started.plan.lowers else None,
            sharpen=self._sharpened if self.is_prior else None,
            guesses=self.guesses,
            more_trials=TRIALS if subject.target else 0,
            journal=self.journal,
        )
        models.exact_s = belief.fp32
        loop.add(proposals)
        if models.predicting:
            models.rank([*loop.pool.values()])
            loop.add(c.proposal for c in models.candidates)
        return loop

    @property
    def subject(self) -> Subject:
        return self.models.subject

    @property
    def measuring(self) -> Measuring:
        return self.models.measuring

    def _final_benchmark(self, loop: Loop, best: Candidate) -> tuple[Candidate, Measurements]:
        """The best of the plans that passed, and the measurements that tell its speed.

        Where the engine's hint alone is faster, the plans of what it lowers are measured, too:
        no prediction knows what an engine spares under its own hint.
        """
        models = self.models
        best, measurements = self._raced_beside(best)
        costs, name = measurements.costs, best.plan.digest
        hints = [n for n, one in self.hints.items() if isinstance(one, Hinted)]
        is_beaten = any(costs.between(n, name).high < 1 for n in hints if n in costs.names)
        known = {c.plan.digest for c in models.candidates}
        fresh = [p for d, p in loop.pool.items() if d in self.hinted and d not in known]
        if not (is_beaten and fresh and models.trials.may_go_on()):
            return best, measurements
        loop.race(fresh)
        return self._raced_beside(loop.run() or best)

    def _raced_beside(self, best: Candidate) -> tuple[Candidate, Measurements]:
        """The best of ``best`` and plans that passed and may be better, and what tells it."""
        models = self.models
        evaluation_s = self.progress.seconds().get("baseline", 0.0)
        settle_s = max(measuring.FINAL.settle_s, evaluation_s)

        def race(racing: Sequence[Candidate]) -> Measurements:
            errors = {c.plan.digest: c.error for c in models.fitting(racing)}
            effort = replace(
                measuring.FINAL,
                settle_s=settle_s,
                errors=errors,
                sure=racing[0].plan.digest,
                limit=max(measuring.FINAL.limit, 1 / self._goal.min_speedup),
            )
            raced = {digest: models.built[digest] for digest in errors}
            return self._conclusion.race(raced, effort)

        passed = [c for c in models.candidates if models.trials.has_passed(c)]
        assert models.fp32 is not None
        if models.predicting:  # of those predicted to be equally fast one is compiled
            passed = chain(passed, models.fp32, models.min_speedup)
        for one in (best, *passed):
            models.build(one.plan)
        best, measurements = final_benchmark(
            best,
            passed,
            fp32=models.fp32,
            min_speedup=self._goal.min_speedup,
            race=race,
            error=lambda c: models.error(c) ** 2,
        )
        if not self._gains(best, measurements):
            models.take_times(measurements)
        return best, measurements

    def _gains(self, best: Candidate, measurements: Measurements) -> bool:
        gain = measurements.costs.speed(best.plan.digest)
        return gain.median >= self._goal.min_speedup

    def _try_safer(self, best: Candidate) -> None:
        """Evaluate a more accurate plan, which may be certified where the best one is not.

        Its predicted error is less by two deviations of the ratio of two such errors.
        """
        models, trials = self.models, self.models.trials
        assert models.analysis is not None
        if trials.certifier is None or trials.certificates or not trials.may_go_on():
            return
        error = best.error * math.exp(-2 * math.sqrt(2) * ROUGHLY)
        safer = near(models.planner, models.analysis, error, (1.0,))
        for one in models.rank([p for p in safer if p.plan.digest not in trials.tried])[:1]:
            if models.fp32 is not None and one.cost * self._goal.min_speedup < models.fp32:
                trials.passes(one, models.evaluate)

    def _unchanged(self, why: str) -> Result:
        self.models.keep()
        return self._conclusion.unchanged(why)

    @property
    def _conclusion(self) -> Conclusion:
        models = self.models
        return Conclusion(
            subject=self.subject,
            workload=self.workload,
            executor=models.executor,
            planner=models.planner,
            analysis=models.analysis,
            trials=models.trials,
            measuring=self.measuring,
            hints=self.hints,
            left_out=self.left_out,
            findings=replace(
                findings(
                    self.examined,
                    models.analysis,
                    self.frontier,
                    models.candidates,
                    None if models.predicting else models.fp32,
                    models.trials.tried,
                    self.measuring.errors,
                ),
                journal=tuple(self.journal),
            ),
        )

    @property
    def _goal(self) -> Goal:
        return self.models.trials.budget.goal

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
        raise EngineError("the engine computes ever more ops in reduced precision wrongly")

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
        text = f"the engine refuses plans as they are usually written ({refused.what})"
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
        """The first plans: those of a start and of hints, and the lowest ones.

        Where the errors of single ops are known, or evaluations are counted, those of the
        frontier, too; elsewhere they are measured once these plans leave something to gain.
        """
        planner = self.models.planner = self.examined.planner
        of_time, prior = self.measuring.objective.of_time, None
        if self._goal.max_trials is None and self.models.trials.certifier is None:
            prior = self.examined.prior(of_time=of_time)
        self.is_prior = prior is not None
        analysed = prior or self.examined.analysis(of_time=of_time)
        analysis = self.models.analysis = self._priced(analysed)
        steps = self._steps(analysis)
        gaining = worth_timing(steps, self._goal.min_speedup)
        if self.is_prior:  # a step in between would be one by guessed errors
            self.guesses = gaining
            gaining = [replace(one, name="the fastest predicted") for one in gaining[-1:]]
        self.hints, hinted = hinted_proposals(self.subject, planner, analysis)
        self.hinted = {p.plan.digest for p in hinted}
        slowest = max((p.time_s for p in steps), default=0.0)
        self.models.caches = kv_caches(self.measuring, planner, slowest)
        first_proposals = (
            *self._started(analysis),
            *hinted,
            *gaining,
            *lowest(planner, analysis),
        )
        exact = [p for p in steps if not p.plan.lowers]
        first_proposals += (*with_kv_caches(exact, self.models.caches),)
        return [p for p in first_proposals if p.plan.lowers]

    def _priced(self, analysed: Analysis) -> Analysis:
        """What is known, priced by the objective, of plans that keep the bound on size."""
        planner, models = self.examined.planner, self.models
        priced = self.measuring.priced(planner, analysed)
        if models.bound is None:
            return priced
        return models.bound.fitted(planner, priced, models.build, self.subject.max_steps)

    def _sharpened(self) -> tuple[Analysis, Sequence[Proposal]] | None:
        """The analysis by measured errors of single ops, and plans of its frontier.

        None where the engine does not run the probes: the plans that are known stay.
        """
        planner, trials = self.examined.planner, self.models.trials
        lost = {fmt: trials.share_lost(planner.lowest(fmt)) for fmt in planner.policy.formats}
        of_time = self.measuring.objective.of_time
        try:
            analysed = self.examined.analysis(of_time=of_time, lost=lost)
        except EngineError as error:
            self._tell_unprobed(error)
            return None
        analysis, self.is_prior = self._priced(analysed), False
        return analysis, worth_timing(self._steps(analysis), self._goal.min_speedup)

    def _steps(self, analysis: Analysis) -> list[Proposal]:
        """Steps of the frontier."""
        self.progress("plans", 0, 1)
        steps = propose(self.examined.planner, analysis, max_steps=self.subject.max_steps)
        self.frontier = [] if self.is_prior else steps
        return steps

    def _started(self, analysis: Analysis) -> list[Proposal]:
        """The plan to start from, whose error is then expected to pass."""
        planner, given = self.examined.planner, self.start
        if not given:
            return []
        formats = {n.id: given[n.name] for n in planner.graph.nodes if n.name in given}
        made = stated(planner, analysis, formats, "the plan to start from")
        self.started = made
        return [made]
