"""The end of a search: its last race, and its outcome, which says what was found or why not.

The first race, of all plans, tells times to some percent only, and the fastest of many plans
is the fastest partly by chance. What one race says of two plans that differ by about 3% may
differ in the next. So in the last race, between the plan found and those that may be better, a
more accurate plan counts as equally fast unless it is known to be slower, and two runs of one
search mostly agree. Errors are measured, too: predicted ones may put two nearly
equal plans in the wrong order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from finecast.data.metrics import by_output
from finecast.data.workload import Workload, sample_count
from finecast.engines.base import calls_of
from finecast.engines.exact import RELATIVE_ERROR, Exact
from finecast.engines.probe import Speed
from finecast.engines.usage import Inputs, by_the_hint
from finecast.errors import EngineError
from finecast.measure.racing import ANCHOR, Effort, Interval, Race
from finecast.naming import number_of
from finecast.native.gains import Gain
from finecast.native.model import OpenedModel
from finecast.native.orders import OrderSpread
from finecast.native.subject import Built, Hinted, Subject
from finecast.numbers.formats import Format
from finecast.planning.contributions import Contributions, confirmed, in_fp32
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, predicted_parts
from finecast.tuning import measuring
from finecast.tuning.belief import CLOSELY
from finecast.tuning.executor import Executor, LostTrialError
from finecast.tuning.findings import Findings, foretold
from finecast.tuning.goal import MIN_SPEEDUP, takes
from finecast.tuning.hint import Baseline, better_alone
from finecast.tuning.measuring import Measurements, Measuring
from finecast.tuning.result import Measured, Result, Verdict
from finecast.tuning.search import Candidate, chain, rivals
from finecast.tuning.trials import Trials

_EQUAL: Final = Interval(low=1.0, median=1.0, high=1.0)
# Models of more ops are not loaded in other processes at the end, and one share of their error
# is measured: each compiles for 1.5 ms an op in int8, and a net of 5,000 ops would take half a
# minute more.
_MOST_OPS: Final = 3000
_TOO_SMALL: Final = (
    "its products save less than the casts around them and the calls of more kernels cost"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """Makes the outcome of a search.

    Attributes:
        subject: What was tuned.
        workload: The data.
        planner: Makes plans.
        analysis: The costs and errors that plans were chosen by; None if there are none.
        trials: What was evaluated.
        measuring: Measures by the objective.
        hints: Models that stand beside the result, by name: what the engine lowers by itself.
        left_out: Formats that were not tried, and why.
        findings: What the search considered.
    """

    subject: Subject
    workload: Workload
    executor: Executor
    planner: Planner
    analysis: Analysis | None
    trials: Trials
    measuring: Measuring
    hints: Mapping[str, Built]
    left_out: tuple[str, ...]
    findings: Findings

    def race(self, built: Mapping[str, Built], effort: Effort) -> Measurements:
        """The last race, of models of plans and those that stand beside the result."""
        return self._measure({**built, **self.hints}, effort)

    def confirmed(
        self, built: Built, measurements: Measurements, takes_s: float
    ) -> Measurements:
        """``measurements``, with those of the result in other processes.

        That is expected to take ``takes_s``, for which there has to be time.
        """
        if len(self.planner.graph.nodes) > _MOST_OPS:
            return measurements
        models = {built.plan.digest: built, **self.hints}
        left_s = self.trials.budget.left_s - takes_s
        return self.measuring.confirmed(measurements, models, left_s)

    def improved(
        self,
        found: Candidate,
        built: Built,
        measurements: Measurements,
        gains: tuple[Gain, ...] = (),
    ) -> Result:
        """The plan found, or the fp32 model if the last race does not show that it gains.

        ``gains`` are those of the plan's adjustments.
        """
        name = found.plan.digest
        gain, least = measurements.costs.speed(name), self.trials.budget.goal.min_speedup
        if gain.median < least:
            built.release()
            what = f"{found.name} is not {self._wanted} here"
            return self.unchanged(f"{what}: it {takes(1 / gain.median, least)}")
        if gain.low < least or gain.low <= 1 <= least:
            built.release()
            return self.unchanged(
                f"{found.name} is not shown to be {self._wanted} here: measured"
                f" x{gain.low:.2f}"
                f" to x{gain.high:.2f}, as times vary from call to call; run tune again while"
                " nothing else runs on this machine"
            )
        losing = self._losing(built)
        if losing and least >= 1 and not self._one_call_asked:
            built.release()
            return self.unchanged(
                f"{found.name} gains in one call by losing in the other: {losing};"
                " --objective first_token or tokens_per_second asks for one of them"
            )
        where = " in emulation" if self.subject.target else ""
        exact = self.measuring.told()
        errors = exact.errors(self.measuring.session(built))
        plan = self._confirmed(found.plan, exact, errors)
        kernels = self.subject.kernels(built, self.workload)
        outcome = self._outcome(
            "; ".join(
                (f"{_formats_of(plan)}; accuracy is within your limit{where}", *self.left_out)
            ),
            measurements,
            baseline=self._fp32(measurements),
            tuned=self._measured(measurements, name, self.trials.metric(found.plan), built),
            plan=plan,
            built=built,
            predicted_error=self._foretold(found),
        )
        warnings = (*outcome.warnings, *filter(None, (losing,)))
        built.release()
        speed = measurements.times.speed(name)
        return replace(
            outcome,
            kernels=tuple(kernels),
            predicted_parts={} if gains else self._parts(found.plan),
            output_errors=errors,
            error_figure=exact.figure,
            error_samples=sample_count(exact.calls),
            left_out=exact.left_out,
            gains=gains,
            certificate=self.trials.certificates.get(name),
            orders=self.trials.spreads.get(name, OrderSpread()),
            elsewhere=self.trials.elsewhere(self.trials.metric(found.plan)),
            warnings=warnings,
            speedup=speed.median,
            speedup_spread=speed.high - speed.low,
            speedups=measurements.times.speeds(name),
            gain=gain.median,
            gain_spread=gain.high - gain.low,
            findings=replace(self.findings, final_benchmark=_final_benchmark(measurements)),
        )

    def _foretold(self, found: Candidate) -> float:
        if self.analysis is None:
            return math.sqrt(found.error)
        return foretold(self.planner, self.analysis, found.plan, found.error)

    def _confirmed(self, plan: Plan, exact: Exact, errors: Mapping[str, float]) -> Plan:
        """``plan``, with what putting the ops that cost most accuracy into fp32 gave.

        Their shares were predicted; each that is named is measured, as neighbours that round
        the same values may leave little of it. Where that cannot be done, the plan is as it
        was.
        """
        if not errors or exact.figure != RELATIVE_ERROR:
            return plan
        is_large = len(self.planner.graph.nodes) > _MOST_OPS
        most = 1 if is_large else 3  # the report names as many, and each is compiled
        for number in range(most):
            costly = [one for one in Contributions.of(plan).low if one.measured is None]
            if not costly:
                break
            returned = in_fp32(plan, costly[0])
            if returned is None:
                break
            self.trials.progress("confirmation of the largest errors", number, most)
            try:
                session = self.subject.tried(self.subject.model.build(returned))
                error = exact.error(session)
            except EngineError:
                break
            plan = confirmed(plan, costly[0], max(errors.values()), error)
        return plan

    @property
    def _one_call_asked(self) -> bool:
        return self.measuring.objective.call is not None

    def _losing(self, built: Built) -> str:
        """Text: the call of decoding in which a model is slower than fp32; empty for none."""
        if not self.workload.decodes or self.subject.target:
            return ""
        for number, call in enumerate(("a first call", "a step")):
            race = self.measuring.race({call: built}, measuring.BASELINE, call=number)
            if call in race.names and race.speed(call).high < 1:
                return f"{call} is x{race.speed(call).median:.2f} as fast as in fp32"
        return ""

    def _parts(self, plan: Plan) -> Mapping[str, float]:
        """Predicted output errors of codes of weights alone, and of activations alone."""
        if self.analysis is None:
            return {}
        ids = {node.name: node.id for node in self.planner.graph.nodes}
        formats = {ids[name]: fmt for name, fmt in plan.formats.items()}
        parts = predicted_parts(self.analysis, formats)
        if parts is None:
            return {}
        return dict(zip(("weights", "activations"), map(math.sqrt, parts), strict=True))

    def none_better(self, candidates: Sequence[Candidate], fp32: float) -> str:
        """Why none of the ``candidates`` gains enough; ``fp32`` is the fp32 model's cost."""
        objective, least = self.measuring.objective, self.trials.budget.goal.min_speedup
        words, emulated = objective.words, self.subject.target
        reason = "the engine here runs none of them"
        candidates = [c for c in candidates if c.timed] or candidates
        if candidates:
            share = min(c.cost for c in candidates) / fp32
            by = "" if any(c.timed for c in candidates) else ", by times of single kernels,"
            reason = f"the {words.best}{by} {takes(share, least)}"
        where = "by the model" if emulated else "here"
        kept = self.findings.kept_products()
        speeds: list[str] = []
        if not (kept and kept.is_largest) and objective.of_time and not emulated:
            speeds = beside_no_gain([*map(self.subject.speed, self.planner.policy.formats)])
        why = f"no plan is {self._wanted} {where}: {reason}"
        return "; ".join((why, *speeds, *self.left_out))

    @property
    def _wanted(self) -> str:
        """Text: what a plan has to be, compared with fp32."""
        words, least = self.measuring.objective.words, self.trials.budget.goal.min_speedup
        if least == MIN_SPEEDUP or least <= 1:
            return words.better
        return f"x{least:g} {words.as_good} as fp32"

    def unchanged(self, why: str) -> Result:
        """The outcome that the fp32 model stays, for the reason ``why``."""
        measurements = self._measure(self.hints, measuring.BASELINE)
        same, plan = self._fp32(measurements), self.planner.unchanged(why)
        return self._outcome(why, measurements, baseline=same, tuned=same, plan=plan)

    def _measure(self, built: Mapping[str, Built], effort: Effort) -> Measurements:
        self.trials.progress("final benchmark", 0, 1)
        effort = self.trials.budget.within(effort)
        return self.measuring.measure(built, effort, self.planner, self.analysis)

    def _fp32(self, measurements: Measurements) -> Measured:
        return self._measured(measurements, ANCHOR, self.trials.baseline, self.subject.model)

    def _measured(
        self, measurements: Measurements, name: str, metric: float, sized: Built | OpenedModel
    ) -> Measured:
        return Measured(
            metric=float(metric),
            outputs=by_output(metric),
            latency_s=measurements.times.latency_s(name),
            size_bytes=sized.size_bytes,
            cost=measurements.costs.latency_s(name),
        )

    def _better_alone(
        self,
        baselines: Sequence[Baseline],
        measurements: Measurements,
        result: Mapping[str, Built],
        metric: float,
    ) -> tuple[str, ...]:
        """A warning for each anchor that is better than the result, which has ``metric``.

        ``result`` is the tuned model by its name, or empty if that is the fp32 model.
        """
        if not self.measuring.objective.of_time:
            return ()
        name = next(iter(result), ANCHOR)

        def again(names: Sequence[str]) -> Callable[[str], Interval]:
            racing = {**result, **{other: self.hints[other] for other in names}}
            second = self._measure(racing, measuring.DUEL).costs
            known = {name, *names} <= {ANCHOR, *second.names}  # one may have left, far behind
            return lambda other: second.between(other, name) if known else _EQUAL

        return better_alone(
            baselines,
            lambda found: self.trials.no_worse(found, metric),
            lambda other: measurements.costs.between(other, name),
            again,
            result="the result" if result else self._reference,
            cost=measurements.costs.latency_s(name),
        )

    @property
    def _reference(self) -> str:
        """What the fp32 model is called; the model given may be a low one."""
        return self.subject.model.reference_name(self.planner.graph)

    def _baselines(self, measurements: Measurements) -> tuple[Baseline, ...]:
        """Metric and time of the models that stand beside the result, on all data."""
        baselines: list[Baseline] = []
        for name, built in self.hints.items():
            if name not in measurements.times.names:
                continue
            self.trials.progress(f"evaluation of {name}", 0, 1)
            try:
                metric = self.executor.evaluate(built).metric
            except LostTrialError as error:
                metric = self.trials.lose(name, error)
            self.trials.evaluations += 1
            baselines.append(
                Baseline(
                    name=name,
                    metric=metric,
                    passed=self.trials.certifier is None and self.trials.passing(metric),
                    latency_s=measurements.times.latency_s(name),
                    cost=measurements.costs.latency_s(name),
                    how=self._how(built),
                )
            )
        return tuple(baselines)

    def _how(self, built: Built) -> str:
        """How a model that stands beside the result is run; empty for a model as it is."""
        if not isinstance(built, Hinted):
            return ""
        name = self.subject.model.name
        if self.planner.from_type:  # the hint was judged on a model that is no file here
            return (
                f"an output NAME.xml holds it; {name} itself, in {self.planner.from_type}, has"
                " another accuracy under the hint"
            )
        return by_the_hint(self.subject.runner, built.format, repr(name))

    def _outcome(
        self,
        why: str,
        measurements: Measurements,
        *,
        baseline: Measured,
        tuned: Measured,
        plan: Plan,
        built: Built | None = None,
        predicted_error: float = 0.0,
    ) -> Result:
        subject, baselines = self.subject, self._baselines(measurements)
        result = {} if built is None else {plan.digest: built}
        return Result(
            verdict=Verdict.UNCHANGED if built is None else Verdict.IMPROVED,
            why=why,
            baseline=baseline,
            tuned=tuned,
            objective=self.measuring.objective,
            plan=plan,
            counts=plan.counts_in(self.planner.graph),
            casts=0 if built is None else built.casts,
            trials=tuple(self.trials.tried.values()),
            evaluations=self.trials.evaluations,
            seconds=self.trials.budget.seconds,
            probes=0 if self.analysis is None else self.analysis.probes,
            reused_sensitivities=subject.reused,
            predicted_error=predicted_error,
            target=subject.target,
            engine=subject.runs_in,
            reference=self._reference,
            warnings=(
                *subject.told,
                *self.trials.lost,
                *subject.model.notes(self.planner),
                *self._doubted_direction(),
                *measurements.times.notes,
                *self._better_alone(baselines, measurements, result, tuned.metric),
            ),
            baselines=baselines,
            findings=self.findings,
            reused=len(self.trials.reused),
            model=subject.model.model if built is None else built.model,
            built=built,
            conditions=self._conditions(measurements),
            inputs=self._inputs(plan),
        )

    def _doubted_direction(self) -> tuple[str, ...]:
        """A warning where more counts as better and all plans have more, as of an error."""
        tried = [trial.metric for trial in self.trials.tried.values()]
        baseline = self.trials.baseline
        raised = bool(tried) and min(tried) > baseline
        if not (raised and self.workload.assumes_direction):
            return ()
        text = (
            "more of the metric counts as better, and every plan that was tried has more of it"
            f" than fp32, which has {baseline:.6g}: if it is an error or a loss, give"
            " --lower-is-better (in Python lower_is_better=True)"
        )
        return (text,)

    def _inputs(self, plan: Plan) -> Inputs:
        """The arrays of the first call that is timed, in the types that ``plan`` declares."""
        call = next((c for feeds in self.workload.timing() for c in calls_of(feeds)), {})
        low = {name: fmt.dtype for name, fmt in plan.io.items()}
        return {n: (array.shape, str(low.get(n, array.dtype))) for n, array in call.items()}

    def _conditions(self, measurements: Measurements) -> dict[str, Any]:
        """What the accuracy and the times are of."""
        target = self.trials.target
        timed = () if self.subject.target else self.workload.timing()
        return {
            "target_metric": target if math.isfinite(target) else None,
            "higher_is_better": self.workload.higher_is_better,
            "confidence": self.trials.budget.goal.criterion.confidence,
            "samples": self.workload.samples or None,
            "threads": self.subject.threads,
            "timed": [
                {name: list(array.shape) for name, array in call.items()}
                for feeds in timed
                for call in calls_of(feeds)[:1]
            ],
            "timing_notes": list(measurements.times.notes),
            "date": datetime.now(UTC).date().isoformat(),
        }


def _formats_of(plan: Plan) -> str:
    """How many ops a plan has in which reduced precision: ``12 of 25 ops in int8``."""
    low = {label: count for label, count in plan.counts.items() if label != Format.FP32.label}
    if not low:
        return "the KV cache in reduced precision"
    total = number_of(len(plan.counted), "op")
    named = ", ".join(f"{count} in {label}" for label, count in low.items())
    hint = " by the engine's precision hint" if plan.by_hint else ""
    if len(low) == 1:
        ((label, count),) = low.items()
        return f"{count} of {total} in {label}{hint}"
    return f"of {total} {named}{hint}"


def _final_benchmark(measurements: Measurements) -> dict[str, tuple[float, float]]:
    """Gain over fp32 and seconds of a call, by the names of what raced."""
    costs, times = measurements.costs, measurements.times
    names = [n for n in costs.names if n in times.names and n != ANCHOR]
    return {n: (costs.speed(n).median, times.latency_s(n)) for n in names}


def final_benchmark(
    best: Candidate,
    passed: Sequence[Candidate],
    *,
    fp32: float,
    min_speedup: float,
    race: Callable[[Sequence[Candidate]], Measurements],
    error: Callable[[Candidate], float],
) -> tuple[Candidate, Measurements]:
    """The best plan, and the measurements of the race that tells its speed.

    Args:
        best: The fastest plan so far.
        passed: All plans that passed, with their costs in the first races.
        fp32: The cost of the fp32 model in those races.
        min_speedup: The speedup that is asked for.
        race: Races some of these plans beside fp32 until their speeds are known: as many, from
            the first one on, as can be loaded at once.
        error: Measures the squared output error of a plan.
    """
    racing = [best, *rivals(passed, best)]
    measurements = race(racing)
    if len(racing) == 1:
        return best, measurements
    costs = measurements.costs
    known = [
        replace(c, cost=fp32 * costs.slowdown(c.plan.digest).median, error=error(c))
        for c in racing
        if c.plan.digest in costs.names
    ]
    finer = math.exp(-CLOSELY)  # what differs by less may be in the other order elsewhere
    chained = chain(known, fp32, min_speedup, partial(_same_time, costs), finer)
    return _as_predicted(chained[0], racing) if chained else best, measurements


def _as_predicted(best: Candidate, racing: Sequence[Candidate]) -> Candidate:
    """``best`` with its predicted error instead of the measured one."""
    digest = best.plan.digest
    return replace(best, error=next(c.error for c in racing if c.plan.digest == digest))


def _same_time(costs: Race, fast: Candidate, other: Candidate) -> bool:
    """Whether ``other``, of less error, counts as equally fast."""
    return costs.is_as_fast(other.plan.digest, fast.plan.digest, measuring.FINAL.tie or 1.0)


def beside_no_gain(speeds: Sequence[Speed]) -> list[str]:
    """What to say of formats where no plan gains: their probes may gain all the same."""
    gaining = ", ".join(one.text for one in speeds if one.gains)
    others = [one.text for one in speeds if not one.gains]
    return (
        [f"{_TOO_SMALL}; large products alone would gain ({gaining})", *others]
        if gaining
        else others
    )
