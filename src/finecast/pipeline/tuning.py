"""From a model, data and a criterion to the fastest plan that keeps it.

Laws: the result never misses the criterion and is never slower than the fp32 model run in
the same way; the winner was evaluated and timed again in this run; where nothing helps the
outcome says so, and why. Of a device that is not here times are modelled, and accuracy is
that of its emulation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from finecast.data.criterion import Criterion
from finecast.errors import EngineError
from finecast.measure.timing import ratio
from finecast.pipeline.narrowing import worthwhile
from finecast.pipeline.outcome import Measured, Outcome, Verdict
from finecast.pipeline.search import Candidate, chain
from finecast.pipeline.study import Study
from finecast.pipeline.subject import Built, Examined, Subject, UserRules
from finecast.pipeline.trials import Trials, nan_baseline
from finecast.pipeline.truth import baseline_of
from finecast.pipeline.workload import Workload
from finecast.planning.choices import Proposal
from finecast.planning.plan import Plan
from finecast.planning.proposing import lowest, propose
from finecast.planning.sensitivity import squared_error
from finecast.progress import Progress, silent
from finecast.rules.policy import Policy

# A tuned model must win by more than interleaved medians wander on a quiet machine.
_MIN_SPEEDUP: Final = 1.02
_FINAL_TIME_S: Final = 4.0
_RANK_TIME_S: Final = 3.0
_BASELINE_TIME_S: Final = 0.5


def tune(
    subject: Subject,
    workload: Workload,
    criterion: Criterion,
    policy: Policy,
    *,
    user_rules: UserRules = (),
    study: Study | None = None,
    progress: Progress = silent,
) -> Outcome:
    """Find the fastest plan that keeps ``criterion`` on all of the workload's data.

    Raises:
        UsageError: If the policy does not fit the model or the device.
        ModelError: If the fp32 model gives NaN, or the model cannot be converted.
        EngineError: If the fp32 model cannot be run.
    """
    start = time.perf_counter()
    if policy.open_formats:
        policy = replace(policy, formats=subject.formats, open_formats=False)
    subject.check(policy)  # a slip in a name shows here
    progress("baseline", 0, 1)
    baseline = _baseline(subject, workload, criterion)
    criterion.check(baseline, workload.worst)
    progress("baseline", 1, 1)
    narrowed, left_out = worthwhile(policy, subject.speed, user_rules)
    tuning = _Tuning(
        subject=subject,
        workload=workload,
        policy=narrowed,
        left_out=left_out,
        progress=progress,
        examined=subject.examine(narrowed, user_rules, workload, progress),
        start=start,
        trials=Trials(
            model=subject.digest,
            workload=workload,
            criterion=criterion,
            baseline=baseline,
            runner=subject.runner,
            study=study,
            progress=progress,
        ),
    )
    return tuning.run()


def _baseline(subject: Subject, workload: Workload, criterion: Criterion) -> float:
    value = baseline_of(workload, criterion, subject.reference, subject.truth)
    if math.isnan(value):
        raise nan_baseline(subject.name, subject.first_nan(workload))
    return value


@dataclass(slots=True, kw_only=True)
class _Tuning:
    """One search: ``built`` are the models of plans that are candidates, by digest."""

    subject: Subject
    workload: Workload
    policy: Policy
    left_out: tuple[str, ...]
    examined: Examined
    trials: Trials
    progress: Progress
    start: float
    built: dict[str, Built] = field(default_factory=dict[str, Built])
    probes: int = 0

    def run(self) -> Outcome:
        if not self.examined.planner.is_free:
            return self._unchanged("the rules leave no op a lower format")
        try:
            proposals = self._proposals()
        except EngineError as error:
            return self._unchanged(f"the lowest plan cannot be run: {error.what}")
        candidates, baseline_s = self._rank(proposals)
        chained = chain(candidates, baseline_s)
        if not chained:
            return self._unchanged(self._none_faster(candidates, baseline_s))
        kept = {c.plan.digest for c in chained}
        self.built = {digest: one for digest, one in self.built.items() if digest in kept}
        found = self.trials.search(chained, self._evaluate)
        if found is None:
            return self._unchanged(self.trials.none_passes(len(candidates)))
        return self._finish(found)

    def _proposals(self) -> list[Proposal]:
        planner, analysis = self.examined.planner, self.examined.analysis()
        self.probes = analysis.probes
        proposals = propose(planner, analysis, max_steps=self.subject.max_steps)
        found = (*proposals, *lowest(planner, analysis))
        return [p for p in found if p.plan.lowers]

    def _rank(self, proposals: Sequence[Proposal]) -> tuple[list[Candidate], float]:
        """Time every proposal beside fp32: predictions only choose which."""
        unique = {p.plan.digest: p for p in reversed(proposals)}
        for done, (digest, proposal) in enumerate(unique.items()):
            self.built[digest] = self.subject.build(proposal.plan)
            self.progress("convert", done + 1, len(unique))
        models = {"": None, **self.built}
        times = self.subject.times(models, self.workload, _RANK_TIME_S)
        candidates = [
            Candidate(
                name=p.name,
                plan=p.plan,
                error=p.error,
                latency_s=times[digest].median_s,
                casts=self.built[digest].casts,
            )
            for digest, p in unique.items()
            if digest in times  # a mix that the engine has no kernels for is no candidate
        ]
        self.progress("timing", 1, 1)
        return candidates, times[""].median_s

    def _none_faster(self, candidates: Sequence[Candidate], baseline_s: float) -> str:
        fastest = min((c.latency_s for c in candidates), default=math.inf)
        where = "by the model" if self.subject.target else "here"
        speeds = (self.subject.speed(fmt).text for fmt in self.policy.formats)
        return "; ".join(
            (
                (
                    f"no plan is faster {where}: the fastest takes {1e3 * fastest:.3g} ms,"
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
        times = subject.times({"": None, "tuned": built}, self.workload, _FINAL_TIME_S)
        won = ratio(times[""], times["tuned"])
        if won.median < _MIN_SPEEDUP:
            return self._unchanged(
                f"the plan {found.name} is not faster: {won.median:.3g}x fp32's speed"
            )
        keeps = "keeps the criterion" + (" in emulation" if subject.target else "")
        return self._outcome(
            "; ".join((f"{found.name} {keeps}", *self.left_out)),
            baseline=self._fp32(times[""].median_s),
            tuned=Measured(
                metric=self.trials.metric(found.plan),
                latency_s=times["tuned"].median_s,
                size_bytes=built.size_bytes,
            ),
            plan=found.plan,
            built=built,
            speed=(won.median, won.spread),
            errors=(math.sqrt(found.error), self._error(built)),
        )

    def _error(self, built: Built) -> float:
        """Relative error of the outputs, as the square root of the mean square over feeds."""
        subject = self.subject
        session = subject.session(built)
        errors = [
            squared_error([*session.run(f).values()], [*subject.reference.run(f).values()])
            for f in subject.feeds(self.workload)
        ]
        return math.sqrt(sum(errors) / len(errors))

    def _fp32(self, latency_s: float) -> Measured:
        return Measured(
            metric=self.trials.baseline,
            latency_s=latency_s,
            size_bytes=self.subject.size_bytes,
        )

    def _unchanged(self, why: str) -> Outcome:
        times = self.subject.times({"": None}, self.workload, _BASELINE_TIME_S)
        same = self._fp32(times[""].median_s)
        plan = self.examined.planner.unchanged(why)
        return self._outcome(why, baseline=same, tuned=same, plan=plan)

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
            seconds=time.perf_counter() - self.start,
            probes=self.probes,
            predicted_error=errors[0],
            measured_error=errors[1],
            target=self.subject.target,
            warnings=tuple(self.subject.notes(self.examined.planner)),
            reused=len(self.trials.reused),
            model=self.subject.original if built is None else built.model,
            built=built,
        )
