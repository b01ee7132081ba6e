"""From a model, data and a criterion to the fastest plan that keeps it.

Laws: the result never misses the criterion and is never slower than the fp32 model run in
the same way; the winner was evaluated and timed again in this run; where nothing helps the
outcome says so, and why. Of a device that is not here times are modelled, and accuracy is
that of its emulation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from finecast.data.criterion import Criterion
from finecast.errors import EngineError
from finecast.measure.racing import ANCHOR
from finecast.pipeline import measuring
from finecast.pipeline.adjusting import Adjustments, kept, share_left
from finecast.pipeline.conclusion import Conclusion
from finecast.pipeline.goal import Budget, Goal
from finecast.pipeline.hint import CameOtherwise, Hinting, choices_of
from finecast.pipeline.last_race import last_race
from finecast.pipeline.measuring import Measuring, Standing
from finecast.pipeline.narrowing import worthwhile
from finecast.pipeline.outcome import Outcome
from finecast.pipeline.search import SAME_TIME, Candidate, chain, undecided, worth_timing
from finecast.pipeline.study import Study
from finecast.pipeline.subject import Built, Examined, Subject, UserRules
from finecast.pipeline.trials import Trials, nan_baseline
from finecast.pipeline.truth import baseline_of
from finecast.pipeline.workload import Workload
from finecast.planning.choices import Proposal
from finecast.planning.plan import Plan
from finecast.planning.predicting import predicted_error
from finecast.planning.problem import Analysis
from finecast.planning.proposing import between, lowest, near, propose
from finecast.planning.singles import lowered_by_one, raised_by_one
from finecast.progress import Progress, silent
from finecast.rules.policy import Policy

# Share of the error that is expected to be allowed from which on a plan may miss.
_NEARLY: Final = 0.8
# Steps of the frontier that become candidates where none of the first ones passes: bisection
# evaluates three or four of them.
_MORE_STEPS: Final = 7


def tune(
    subject: Subject,
    workload: Workload,
    goal: Goal,
    policy: Policy,
    *,
    user_rules: UserRules = (),
    study: Study | None = None,
    progress: Progress = silent,
) -> Outcome:
    """Find the fastest plan that keeps ``goal`` on all of the workload's data.

    Raises:
        UsageError: If the policy does not fit the model or the device.
        ModelError: If the fp32 model gives NaN, or the model cannot be converted.
        EngineError: If the fp32 model cannot be run.
    """
    budget = Budget(goal=goal)
    standing = Measuring(objective=goal.objective, subject=subject, workload=workload)
    standing.check()
    if policy.open_formats:
        policy = replace(policy, formats=subject.formats, open_formats=False)
    subject.check_formats(policy)
    subject.model.check_policy(policy)  # a slip in a name shows here
    progress("baseline", 0, 1)
    baseline = _baseline(subject, workload, goal.criterion)
    goal.criterion.check(baseline, workload.worst)
    progress("baseline", 1, 1)
    narrowed, left_out = policy, ()
    if goal.objective.of_time:
        narrowed, left_out = worthwhile(policy, subject.speed, user_rules)
    examined = subject.examine(narrowed, user_rules, workload, progress)
    tuning = _Tuning(
        subject=subject,
        workload=workload,
        policy=narrowed,
        left_out=left_out,
        progress=progress,
        measuring=standing,
        examined=examined,
        adjustments=Adjustments.of(subject, workload, examined, policy),
        trials=Trials(
            model=subject.model.digest,
            workload=workload,
            baseline=baseline,
            runner=goal.objective.keyed(subject.runner),
            study=study,
            progress=progress,
            budget=budget,
        ),
    )
    return tuning.run()


def _baseline(subject: Subject, workload: Workload, criterion: Criterion) -> float:
    value = baseline_of(workload, criterion, subject.reference, subject.truth)
    if math.isnan(value):
        raise nan_baseline(subject.model.name, subject.first_nan(workload))
    return value


@dataclass(slots=True, kw_only=True)
class _Tuning:
    """One search: ``candidates`` were raced, ``built`` are the models of plans, by digest.

    ``fp32`` is what it takes, by the objective, in the first race.
    """

    subject: Subject
    workload: Workload
    policy: Policy
    left_out: tuple[str, ...]
    examined: Examined
    adjustments: Adjustments
    trials: Trials
    measuring: Measuring
    progress: Progress
    built: dict[str, Built] = field(default_factory=dict[str, Built])
    candidates: list[Candidate] = field(default_factory=list[Candidate])
    analysis: Analysis | None = None
    fp32: float | None = None
    hints: dict[str, Built] = field(default_factory=dict[str, Built])

    def run(self) -> Outcome:
        if not self.examined.planner.is_free:
            return self._unchanged("the rules leave no op a lower format")
        try:
            proposals = self._proposals()
        except EngineError as error:
            return self._unchanged(f"the lowest plan cannot be run: {error.what}")
        candidates, fp32 = self._rank(proposals)
        chained = chain(candidates, fp32, self._min_speedup)
        if not chained:
            return self._unchanged(self._conclusion.none_better(candidates, fp32))
        if self.trials.misses(chained[0], self._evaluate):
            candidates += self._near()
            candidates += self._adjusted(candidates, None)
            chained = chain(candidates, fp32, self._min_speedup)
        found = self._search(chained)
        finer = self._refine(chained, found)
        if finer:
            candidates += finer
            found = self._faster(finer, found, fp32)
        adjusted = self._adjusted(candidates, found)  # those that missed later
        if adjusted:
            candidates += adjusted
            found = self._faster(adjusted, found, fp32)
        singles, found = self._one_by_one(candidates, found)
        if found is None:
            why = self.trials.none_passes(len(candidates) + singles)
            if self.trials.budget.goal.is_unlimited:
                why += "; with --max-trials or --timeout single ops are tried, too"
            return self._unchanged(why)
        return self._settled(found)

    def _settled(self, found: Candidate) -> Outcome:
        """What the last race leaves of ``found`` and of what may be better."""
        assert self.fp32 is not None

        def race(racing: Sequence[Candidate]) -> Standing:
            errors = {c.plan.digest: c.error for c in racing}
            return self._conclusion.race({d: self.built[d] for d in errors}, errors)

        there = [c for c in self.candidates if c.plan.digest in self.built]
        best, standing = last_race(
            found,
            there,
            fp32=self.fp32,
            trials=self.trials,
            measure=self._evaluate,
            race=race,
        )
        self._keep(best)
        gains, built = self.adjustments.gained(best.plan), self.built[best.plan.digest]
        return self._conclusion.improved(best, built, standing, gains)

    def _unchanged(self, why: str) -> Outcome:
        self._keep()
        return self._conclusion.unchanged(why)

    def _keep(self, *candidates: Candidate) -> None:
        """Unload the models of all other candidates."""
        kept = {c.plan.digest for c in candidates}
        for digest in [d for d in self.built if d not in kept]:
            self.built.pop(digest).release()

    @property
    def _conclusion(self) -> Conclusion:
        return Conclusion(
            subject=self.subject,
            workload=self.workload,
            planner=self.examined.planner,
            analysis=self.analysis,
            trials=self.trials,
            measuring=self.measuring,
            hints=self.hints,
            left_out=self.left_out,
        )

    @property
    def _min_speedup(self) -> float:
        return self.trials.budget.goal.min_speedup

    def _search(
        self, chained: Sequence[Candidate], found: Candidate | None = None
    ) -> Candidate | None:
        """The fastest that passes; models that count no longer, beside ``found``, go."""
        self._keep(*undecided(self.candidates), *([found] if found else ()))
        return self.trials.search(chained, self._evaluate)

    def _faster(
        self, candidates: Sequence[Candidate], found: Candidate | None, fp32: float
    ) -> Candidate | None:
        """The fastest of ``candidates`` that passes and beats ``found``; else that."""
        limit = (fp32, self._min_speedup)
        if found is not None:
            limit = (found.cost, SAME_TIME)
        return self._search(chain(candidates, *limit), found) or found

    def _adjusted(
        self, candidates: Sequence[Candidate], found: Candidate | None
    ) -> list[Candidate]:
        """Candidates with operands adjusted, where plans on codes are faster and miss.

        Of the most accurate of them it is measured what each kind gains: where it is too
        little to tell, none is tried. With less error other plans come within the criterion,
        and those that are near it keep it more surely.
        """
        analysis, adjustments = self.analysis, self.adjustments
        if any(c.plan.adjustments for c in candidates):
            return []
        coded = [c for c in self.trials.missed(candidates, found) if c.plan.encodings]
        if not coded or analysis is None or not self.trials.may_go_on():
            return []
        nearest = min(coded, key=lambda c: c.error)
        gains = adjustments.gains(nearest.plan)
        if not kept(gains):
            return []
        allowed = self.trials.allowed_error() or nearest.error
        about = [c for c in candidates if c.plan.encodings and c.error > _NEARLY**2 * allowed]
        wanted = [
            *near(self.examined.planner, analysis, allowed / share_left(gains)),
            *(Proposal(name=c.name, plan=c.plan, time_s=0.0, error=c.error) for c in about),
        ]
        return self._rank(adjustments.proposals(wanted, gains))[0]

    def _near(self) -> list[Candidate]:
        """Candidates of the error that the criterion is expected to allow, after a miss.

        The frontier has steps, and its error may jump from far above that to far below.
        """
        allowed = self.trials.allowed_error()
        if allowed is None or self.analysis is None or not self.trials.may_go_on():
            return []
        proposals = near(self.examined.planner, self.analysis, allowed)
        fresh = [p for p in proposals if p.plan.digest not in self.built]
        return self._rank(fresh)[0] if fresh else []

    def _refine(
        self, chained: Sequence[Candidate], found: Candidate | None
    ) -> list[Candidate]:
        """Candidates between the plan found and the next faster one, which misses.

        Of the frontier only some steps are candidates at first. Where none of those passes,
        or the user gave a budget that is not spent, the steps between are tried, too.
        """
        tried = [c for c in chained if found is None or c.error > found.error]
        if not tried or self.analysis is None or not self.trials.may_go_on():
            return []
        if found is not None and not self.trials.budget.goal.goes_on:
            return []
        errors = (0.0 if found is None else found.error, tried[-1].error)
        proposals = between(self.examined.planner, self.analysis, errors, most=_MORE_STEPS)
        return self._rank(proposals)[0] if proposals else []

    def _one_by_one(
        self, candidates: Sequence[Candidate], found: Candidate | None
    ) -> tuple[int, Candidate | None]:
        """Single units tried both ways while a given budget lasts; how many plans that made.

        From the plan found one unit more is lowered. Where none passes, one less of the plan
        that came nearest, and one alone: the metric may fail by a unit whose predicted error
        is small. The best of those that were tried is the next to start from.
        """
        made, at = 0, found
        tried = {c.plan.digest for c in candidates}
        while self.trials.budget.goal.goes_on and self.trials.may_go_on():
            at = at or self.trials.nearest(candidates)
            fresh = [p for p in self._singles(at, found) if p.plan.digest not in tried]
            if not fresh:
                break
            tried |= {p.plan.digest for p in fresh}
            self._keep(*([found] if found else ()))
            ranked, fp32 = self._rank(fresh)
            made += len(ranked)
            limit = fp32 / self._min_speedup if found is None else found.cost / SAME_TIME
            faster = sorted((c for c in ranked if c.cost < limit), key=lambda c: c.cost)
            passed = self._first_passing(faster)
            if passed is None and found is not None:
                break
            found, at = passed, passed or self.trials.nearest(faster) or at
        return made, found

    def _singles(self, at: Candidate | None, found: Candidate | None) -> list[Proposal]:
        planner, analysis = self.examined.planner, self.analysis
        if analysis is None or at is None:
            return []
        if found is not None:
            return lowered_by_one(planner, analysis, found.plan)
        alone = planner.highest()
        return [
            *raised_by_one(planner, analysis, at.plan),
            *lowered_by_one(planner, analysis, alone),
        ]

    def _first_passing(self, candidates: Sequence[Candidate]) -> Candidate | None:
        return next((c for c in candidates if self.trials.search([c], self._evaluate)), None)

    def _proposals(self) -> list[Proposal]:
        planner = self.examined.planner
        analysis = self.measuring.priced(planner, self.examined.analysis())
        self.analysis = analysis
        proposals = propose(planner, analysis, max_steps=self.subject.max_steps)
        near = worth_timing(proposals, self._min_speedup)
        found = (*self._hinted(analysis), *near, *lowest(planner, analysis))
        return [p for p in found if p.plan.lowers]

    def _hinted(self, analysis: Analysis) -> list[Proposal]:
        """What the engine lowers where it is asked to, as plans."""
        planner, subject = self.examined.planner, self.subject
        found = subject.hints(planner) if isinstance(subject, Hinting) else ()
        alone = len(found) == 1
        self.hints = {
            "the hint alone" if alone else f"the {b.plan.policy} hint alone": b for b in found
        }
        given = subject.as_given(planner) if isinstance(subject, CameOtherwise) else None
        if given is not None:
            self.hints["the model given"] = given
        ids = {n.name: n.id for n in planner.graph.nodes}
        plans = [(name, plan) for one in found for name, plan in choices_of(one)]
        return [
            Proposal(
                name=name,
                plan=plan,
                time_s=math.inf,
                error=predicted_error(
                    analysis, {ids[name]: fmt for name, fmt in plan.formats.items()}
                ),
            )
            for name, plan in plans
        ]

    def _rank(self, proposals: Sequence[Proposal]) -> tuple[list[Candidate], float]:
        """Measure every proposal beside fp32: predictions only choose which.

        Costs of several races are by fp32's in the first: the machine's load changes.
        """
        unique = {p.plan.digest: p for p in reversed(proposals)}
        for done, (digest, proposal) in enumerate(unique.items()):
            self.built[digest] = self.subject.model.build(proposal.plan)
            self.progress("convert", done + 1, len(unique))
        models = {digest: self.built[digest] for digest in unique}
        errors = {digest: p.error for digest, p in unique.items()}
        effort = measuring.ranking(len(models))
        effort = replace(effort, limit=1 / self._min_speedup, errors=errors)
        found = self.measuring.stand(models, effort, self.examined.planner, self.analysis)
        if self.fp32 is None:
            self.fp32 = found.costs.latency_s(ANCHOR)
        fp32_s = found.times.latency(ANCHOR).median_s
        candidates = [
            Candidate(
                name=p.name,
                plan=p.plan,
                error=p.error,
                cost=self.fp32 * found.costs.slowdown(digest).median,
                latency_s=fp32_s * found.times.slowdown(digest).median,
                casts=self.built[digest].casts,
                spread=found.costs.slowdown(digest).spread,
            )
            for digest, p in unique.items()
            if digest in found.costs.names  # a mix that the engine has no kernels for is none
        ]
        self.candidates += candidates
        self.progress("timing", 1, 1)
        return candidates, self.fp32

    def _evaluate(self, plan: Plan) -> float:
        """The metric of the plan's model on all data."""
        subject = self.subject
        session = subject.session(self.built[plan.digest])
        return self.workload.evaluate(session, subject.truth or subject.reference)
