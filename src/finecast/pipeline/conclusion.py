"""What is told of a search: the plan found, measured afresh, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from finecast.measure.racing import ANCHOR, Effort
from finecast.pipeline import measuring
from finecast.pipeline.adjusting import Gain, output_error
from finecast.pipeline.goal import MIN_SPEEDUP, takes
from finecast.pipeline.hint import Anchor
from finecast.pipeline.measuring import Measuring, Standing
from finecast.pipeline.outcome import Measured, Outcome, Verdict
from finecast.pipeline.search import Candidate
from finecast.pipeline.subject import Built, SourceModel, Subject
from finecast.pipeline.trials import Trials
from finecast.pipeline.workload import Workload
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """A search that ended.

    Attributes:
        subject: What was tuned.
        workload: The data.
        planner: Makes plans.
        analysis: What they were chosen by; None where the search ended before.
        trials: What was evaluated.
        measuring: Measures by the objective.
        hints: The model as its engine lowers it alone, by what that is called.
        left_out: Formats that were not tried, and why.
    """

    subject: Subject
    workload: Workload
    planner: Planner
    analysis: Analysis | None
    trials: Trials
    measuring: Measuring
    hints: Mapping[str, Built]
    left_out: tuple[str, ...]

    def race(self, built: Mapping[str, Built], errors: Mapping[str, float]) -> Standing:
        """The last race: of models of plans that may be told, and the engine's own."""
        return self._stand({**built, **self.hints}, replace(measuring.FINAL, errors=errors))

    def improved(
        self,
        found: Candidate,
        built: Built,
        standing: Standing,
        gains: tuple[Gain, ...] = (),
    ) -> Outcome:
        """The plan found, if it still gained enough when it was measured again.

        ``gains`` are those of its adjustments.
        """
        name = found.plan.digest
        gain, least = standing.costs.speed(name), self.trials.budget.goal.min_speedup
        if gain.median < least:
            built.release()
            what = f"the plan {found.name} is not {self._wanted} here"
            return self.unchanged(f"{what}: it {takes(1 / gain.median, least)}")
        keeps = "keeps the criterion" + (" in emulation" if self.subject.target else "")
        anchors, subject = self._anchors(standing), self.subject
        feeds = subject.feeds(self.workload)
        error = output_error(subject.session(built), subject.reference, feeds)
        outcome = self._outcome(
            "; ".join((f"{found.name} {keeps}", *self.left_out)),
            baseline=self._fp32(standing),
            tuned=self._measured(standing, name, self.trials.metric(found.plan), built),
            plan=found.plan,
            built=built,
            errors=(math.sqrt(found.error), error),
        )
        built.release()
        speed = standing.times.speed(name)
        return replace(
            outcome,
            anchors=anchors,
            gains=gains,
            speedup=speed.median,
            speedup_spread=speed.high - speed.low,
            gain=gain.median,
            gain_spread=gain.high - gain.low,
        )

    def none_better(self, candidates: Sequence[Candidate], fp32: float) -> str:
        """Why none of the ``candidates`` counts; the fp32 model costs ``fp32``."""
        objective, least = self.measuring.objective, self.trials.budget.goal.min_speedup
        words, emulated = objective.words, self.subject.target
        found = "what runs the model here takes none of them"
        if candidates:
            share = min(c.cost for c in candidates) / fp32
            found = f"the {words.best} {takes(share, least)}"
        where = "by the model" if emulated else "here"
        told = ()
        if objective.of_time and not emulated:
            told = (self.subject.speed(fmt).text for fmt in self.planner.policy.formats)
        why = f"no plan is {self._wanted} {where}: {found}"
        return "; ".join((why, *told, *self.left_out))

    @property
    def _wanted(self) -> str:
        """What a plan is to be beside fp32."""
        words, least = self.measuring.objective.words, self.trials.budget.goal.min_speedup
        if least == MIN_SPEEDUP:
            return words.better
        return f"{least:g} times {words.as_good} as fp32"

    def unchanged(self, why: str) -> Outcome:
        """The fp32 model."""
        standing = self._stand(self.hints, measuring.BASELINE)
        same, plan = self._fp32(standing), self.planner.unchanged(why)
        anchors = self._anchors(standing)
        outcome = self._outcome(why, baseline=same, tuned=same, plan=plan)
        return replace(outcome, anchors=anchors)

    def _stand(self, built: Mapping[str, Built], effort: Effort) -> Standing:
        return self.measuring.stand(built, effort, self.planner, self.analysis)

    def _fp32(self, standing: Standing) -> Measured:
        return self._measured(standing, ANCHOR, self.trials.baseline, self.subject.model)

    def _measured(
        self, standing: Standing, name: str, metric: float, sized: Built | SourceModel
    ) -> Measured:
        return Measured(
            metric=metric,
            latency_s=standing.times.latency_s(name),
            size_bytes=sized.size_bytes,
            cost=standing.costs.latency_s(name),
        )

    def _anchors(self, standing: Standing) -> tuple[Anchor, ...]:
        """What the engine's own lowering gives, on all data."""
        found: list[Anchor] = []
        for name, built in self.hints.items():
            if name not in standing.times.names:
                continue
            session, truth = self.subject.session(built), self.subject.truth
            metric = self.workload.evaluate(session, truth or self.subject.reference)
            self.trials.evaluations += 1
            found.append(
                Anchor(
                    name=name,
                    metric=metric,
                    passed=self.trials.passing(metric),
                    latency_s=standing.times.latency_s(name),
                    cost=standing.costs.latency_s(name),
                )
            )
        return tuple(found)

    def _outcome(
        self,
        why: str,
        *,
        baseline: Measured,
        tuned: Measured,
        plan: Plan,
        built: Built | None = None,
        errors: tuple[float, float] = (0.0, 0.0),
    ) -> Outcome:
        subject = self.subject
        return Outcome(
            verdict=Verdict.UNCHANGED if built is None else Verdict.IMPROVED,
            why=why,
            baseline=baseline,
            tuned=tuned,
            objective=self.measuring.objective,
            plan=plan,
            ops=plan.counts_in(self.planner.graph),
            casts=0 if built is None else built.casts,
            trials=tuple(self.trials.tried.values()),
            evaluations=self.trials.evaluations,
            seconds=self.trials.budget.seconds,
            probes=0 if self.analysis is None else self.analysis.probes,
            predicted_error=errors[0],
            measured_error=errors[1],
            target=subject.target,
            reference=subject.model.reference_name(self.planner.graph),
            warnings=(*subject.told, *subject.model.notes(self.planner)),
            reused=len(self.trials.reused),
            model=subject.model.model if built is None else built.model,
            built=built,
        )
