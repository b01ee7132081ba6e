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
from finecast.measure.racing import ANCHOR, Effort, Race
from finecast.pipeline.correction import Correcting, corrected, measured, output_error
from finecast.pipeline.goal import MIN_SPEEDUP, Budget, Goal
from finecast.pipeline.hint import Anchor, Hinting
from finecast.pipeline.narrowing import worthwhile
from finecast.pipeline.outcome import Measured, Outcome, Verdict
from finecast.pipeline.search import SAME_TIME, Candidate, chain, worth_timing
from finecast.pipeline.study import Study
from finecast.pipeline.subject import Built, Examined, Subject, UserRules
from finecast.pipeline.trials import Trials, nan_baseline
from finecast.pipeline.truth import baseline_of
from finecast.pipeline.workload import Workload
from finecast.planning.biases import uncorrected
from finecast.planning.choices import Proposal
from finecast.planning.plan import Plan
from finecast.planning.predicting import predicted_error
from finecast.planning.problem import Analysis
from finecast.planning.proposing import between, lowest, near, propose
from finecast.progress import Progress, silent
from finecast.rules.policy import Adjust, Policy

_FINAL: Final = Effort(min_time_s=4.0, settle_s=6.0)
_RANKING: Final = Effort(min_time_s=3.0, settle_s=12.0)
_BASELINE: Final = Effort(min_time_s=0.5)
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
    if policy.open_formats:
        policy = replace(policy, formats=subject.formats, open_formats=False)
    subject.check_formats(policy)
    subject.model.check_policy(policy)  # a slip in a name shows here
    progress("baseline", 0, 1)
    baseline = _baseline(subject, workload, goal.criterion)
    goal.criterion.check(baseline, workload.worst)
    progress("baseline", 1, 1)
    narrowed, left_out = worthwhile(policy, subject.speed, user_rules)
    tuning = _Tuning(
        subject=subject,
        workload=workload,
        policy=narrowed,
        left_out=left_out,
        progress=progress,
        examined=subject.examine(narrowed, user_rules, workload, progress),
        trials=Trials(
            model=subject.model.digest,
            workload=workload,
            baseline=baseline,
            runner=subject.runner,
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
    """One search: ``built`` are the models of plans that are candidates, by digest.

    ``baseline_s`` is fp32's time in the first race.
    """

    subject: Subject
    workload: Workload
    policy: Policy
    left_out: tuple[str, ...]
    examined: Examined
    trials: Trials
    progress: Progress
    built: dict[str, Built] = field(default_factory=dict[str, Built])
    analysis: Analysis | None = None
    baseline_s: float | None = None
    hints: dict[str, Built] = field(default_factory=dict[str, Built])

    def run(self) -> Outcome:
        if not self.examined.planner.is_free:
            return self._unchanged("the rules leave no op a lower format")
        try:
            proposals = self._proposals()
        except EngineError as error:
            return self._unchanged(f"the lowest plan cannot be run: {error.what}")
        candidates, baseline_s = self._rank(proposals)
        chained = chain(candidates, baseline_s, self._min_speedup)
        if not chained:
            return self._unchanged(self._none_faster(candidates, baseline_s))
        if self.trials.misses(chained[0], self._evaluate):
            candidates += self._near(candidates)
            chained = chain(candidates, baseline_s, self._min_speedup)
        found = self._search(chained)
        finer = self._refine(chained, found)
        if finer:
            candidates += finer
            found = self._faster(finer, found, baseline_s)
        adjusted = self._corrected(candidates, found)
        if adjusted:
            candidates += adjusted
            found = self._faster(adjusted, found, baseline_s)
        if found is None:
            return self._unchanged(self.trials.none_passes(len(candidates)))
        return self._finish(found)

    @property
    def _min_speedup(self) -> float:
        return self.trials.budget.goal.min_speedup

    def _search(
        self, chained: Sequence[Candidate], found: Candidate | None = None
    ) -> Candidate | None:
        """The fastest that passes; models that count no longer, beside ``found``, go."""
        kept = {c.plan.digest for c in (*chained, *([found] if found else ()))}
        for digest in [d for d in self.built if d not in kept]:
            self.built.pop(digest).release()
        return self.trials.search(chained, self._evaluate)

    def _faster(
        self, candidates: Sequence[Candidate], found: Candidate | None, baseline_s: float
    ) -> Candidate | None:
        """The fastest of ``candidates`` that passes and beats ``found``; else that."""
        limit = (baseline_s, self._min_speedup)
        if found is not None:
            limit = (found.latency_s, SAME_TIME)
        return self._search(chain(candidates, *limit), found) or found

    def _corrected(
        self, candidates: Sequence[Candidate], found: Candidate | None
    ) -> list[Candidate]:
        """Candidates with biases corrected, where plans on codes are faster and miss.

        Of the most accurate of them the gain is measured: where it is too little to tell, none
        is tried. With less error other plans come within the criterion.
        """
        examined, analysis = self.examined, self.analysis
        missed = self.trials.missed(candidates, found)
        coded = [c for c in missed if c.plan.encodings]
        off = self.policy.adjust is Adjust.NONE or not self.trials.may_go_on()
        if off or not coded or analysis is None or not isinstance(examined, Correcting):
            return []
        nearest = min(coded, key=lambda c: c.error)
        made = examined.corrected(nearest.plan)
        gain = measured(self.subject, self.workload, nearest.plan, made)
        if gain is None or not gain.gains:
            return []
        allowed = self.trials.allowed_error(candidates) or nearest.error
        wanted = [
            *near(examined.planner, analysis, allowed / gain.share),
            *(Proposal(name=c.name, plan=c.plan, time_s=0.0, error=c.error) for c in coded),
        ]
        return self._rank(corrected(wanted, examined, gain.share))[0]

    def _near(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Candidates of the error that the criterion is expected to allow, after a miss.

        The frontier has steps, and its error may jump from far above that to far below.
        """
        allowed = self.trials.allowed_error(candidates)
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

    def _proposals(self) -> list[Proposal]:
        planner, analysis = self.examined.planner, self.examined.analysis()
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
        ids = {n.name: n.id for n in planner.graph.nodes}
        return [
            Proposal(
                name="the hint's choice",
                plan=one.plan,
                time_s=math.inf,
                error=predicted_error(
                    analysis, {ids[name]: fmt for name, fmt in one.plan.formats.items()}
                ),
            )
            for one in found
        ]

    def _rank(self, proposals: Sequence[Proposal]) -> tuple[list[Candidate], float]:
        """Time every proposal beside fp32: predictions only choose which.

        Latencies of several races are by fp32's in the first: the machine's load changes.
        """
        unique = {p.plan.digest: p for p in reversed(proposals)}
        for done, (digest, proposal) in enumerate(unique.items()):
            self.built[digest] = self.subject.model.build(proposal.plan)
            self.progress("convert", done + 1, len(unique))
        models = {digest: self.built[digest] for digest in unique}
        effort = replace(_RANKING, limit=1 / self._min_speedup)
        times = self.subject.times(models, self.workload, effort)
        if self.baseline_s is None:
            self.baseline_s = times.latency_s(ANCHOR)
        candidates = [
            Candidate(
                name=p.name,
                plan=p.plan,
                error=p.error,
                latency_s=self.baseline_s * times.slowdown(digest).median,
                casts=self.built[digest].casts,
            )
            for digest, p in unique.items()
            if digest in times.names  # a mix that the engine has no kernels for is none
        ]
        self.progress("timing", 1, 1)
        return candidates, self.baseline_s

    def _none_faster(self, candidates: Sequence[Candidate], baseline_s: float) -> str:
        fastest = min((c.latency_s for c in candidates), default=math.inf)
        where = "by the model" if self.subject.target else "here"
        least = self._min_speedup
        wanted = "faster" if least == MIN_SPEEDUP else f"{least:g} times as fast as fp32"
        speeds = (self.subject.speed(fmt).text for fmt in self.policy.formats)
        return "; ".join(
            (
                (
                    f"no plan is {wanted} {where}: the fastest takes {1e3 * fastest:.3g} ms,"
                    f" fp32 {1e3 * baseline_s:.3g} ms"
                ),
                *(() if self.subject.target else speeds),
                *self.left_out,
            )
        )

    def _evaluate(self, plan: Plan) -> float:
        """The metric of the plan's model on all data."""
        subject = self.subject
        session = subject.session(self.built[plan.digest])
        return self.workload.evaluate(session, subject.truth or subject.reference)

    def _finish(self, found: Candidate) -> Outcome:
        subject, built = self.subject, self.built[found.plan.digest]
        times = subject.times({"tuned": built, **self.hints}, self.workload, _FINAL)
        speed = times.speed("tuned")
        if speed.median < self._min_speedup:
            wanted = "not faster" if self._min_speedup == MIN_SPEEDUP else "not fast enough"
            return self._unchanged(
                f"the plan {found.name} is {wanted}: {speed.median:.3g}x fp32's speed"
            )
        keeps = "keeps the criterion" + (" in emulation" if subject.target else "")
        anchors = self._anchors(times)
        plain = uncorrected(found.plan)
        correction = measured(subject, self.workload, plain, found.plan)
        feeds = subject.feeds(self.workload)
        error = output_error(subject.session(built), subject.reference, feeds)
        outcome = self._outcome(
            "; ".join((f"{found.name} {keeps}", *self.left_out)),
            baseline=self._fp32(times.latency_s(ANCHOR)),
            tuned=Measured(
                metric=self.trials.metric(found.plan),
                latency_s=times.latency_s("tuned"),
                size_bytes=built.size_bytes,
            ),
            plan=found.plan,
            built=built,
            speed=(speed.median, speed.high - speed.low),
            errors=(math.sqrt(found.error), error),
        )
        return replace(outcome, anchors=anchors, correction=correction)

    def _anchors(self, times: Race) -> tuple[Anchor, ...]:
        """What the engine's own lowering gives, on all data."""
        found: list[Anchor] = []
        for name, built in self.hints.items():
            session, truth = self.subject.session(built), self.subject.truth
            metric = self.workload.evaluate(session, truth or self.subject.reference)
            self.trials.evaluations += 1
            found.append(
                Anchor(
                    name=name,
                    metric=metric,
                    passed=self.trials.passing(metric),
                    latency_s=times.latency_s(name),
                )
            )
        return tuple(found)

    def _fp32(self, latency_s: float) -> Measured:
        return Measured(
            metric=self.trials.baseline,
            latency_s=latency_s,
            size_bytes=self.subject.model.size_bytes,
        )

    def _unchanged(self, why: str) -> Outcome:
        times = self.subject.times(self.hints, self.workload, _BASELINE)
        same = self._fp32(times.latency_s(ANCHOR))
        plan = self.examined.planner.unchanged(why)
        anchors = self._anchors(times)
        outcome = self._outcome(why, baseline=same, tuned=same, plan=plan)
        return replace(outcome, anchors=anchors)

    def _outcome(
        self,
        why: str,
        *,
        baseline: Measured,
        tuned: Measured,
        plan: Plan,
        built: Built | None = None,
        speed: tuple[float, float] = (1.0, 0.0),
        errors: tuple[float, float] = (0.0, 0.0),
    ) -> Outcome:
        subject = self.subject
        for one in self.built.values():
            one.release()
        return Outcome(
            verdict=Verdict.UNCHANGED if built is None else Verdict.IMPROVED,
            why=why,
            baseline=baseline,
            tuned=tuned,
            speedup=speed[0],
            speedup_spread=speed[1],
            plan=plan,
            casts=0 if built is None else built.casts,
            trials=tuple(self.trials.tried.values()),
            evaluations=self.trials.evaluations,
            seconds=self.trials.budget.seconds,
            probes=0 if self.analysis is None else self.analysis.probes,
            predicted_error=errors[0],
            measured_error=errors[1],
            target=subject.target,
            warnings=(*subject.told, *subject.model.notes(self.examined.planner)),
            reused=len(self.trials.reused),
            model=subject.model.model if built is None else built.model,
            built=built,
        )
