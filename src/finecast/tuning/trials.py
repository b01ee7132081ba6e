"""Trials: candidates evaluated on all data, each once, or taken from a study; the baseline."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np

from finecast.data.certificates import Certificate
from finecast.data.criterion import Criterion
from finecast.data.metrics import ExpectedMetric, Score, by_margins, losses_at, on_new_data
from finecast.data.workload import Workload, nonfinite_data
from finecast.errors import ModelError, UsageError
from finecast.measure.study import Study, Trial, TrialKey
from finecast.naming import number_of
from finecast.native.orders import OrderSpread
from finecast.numbers.thresholds import SAME_TIME
from finecast.planning.plan import Plan
from finecast.progress import Notice, Progress
from finecast.reports.base import expected_text
from finecast.tuning.belief import CLOSELY, LOSS_OFF, ROUGHLY
from finecast.tuning.certifying import Certifier
from finecast.tuning.decision_chances import DecisionChances
from finecast.tuning.executor import LostTrialError
from finecast.tuning.goal import Budget
from finecast.tuning.search import Candidate, none_passes

# How far the logarithm of a loss over what may be lost is looked at: three deviations of what
# is believed of it before any plan was tried.
_FAR: Final = 3 * LOSS_OFF

# Gives the metric of a plan.
Measure = Callable[[Plan], float]


@dataclass(slots=True, kw_only=True)
class Trials:
    """The trials of one tuning.

    Laws: each is in the study before the next starts; what ``confirms`` lets pass was
    evaluated in this run.

    Attributes:
        model: The model's digest.
        workload: The data.
        baseline: The fp32 model's metric; its evaluation is counted.
        runner: Identifies what runs the plans, with every setting that changes numbers.
        study: Where trials are kept; None for nowhere.
        progress: Told of each trial.
        budget: The goal, and how many trials there may be.
        tried: The trials by their plan's digest.
        errors: The predicted squared output errors of these plans, by digest.
        certifier: Judges on one half of the samples and certifies on the other, if asked to.
        certificates: Those of plans by digest, once ``certify`` was called.
        reused: Digests of plans whose trial was taken from an earlier run.
        evaluations: Number of evaluations on all data in this run.
        lost: Of each evaluation that ended its process, what was lost.
        spread_of: Gives metric and error of a plan over orders of summation, of which enough
            have to keep the criterion; None where the order is known.
        spreads: Those of the plans that keep it in the engine's order here, by digest.
    """

    model: str
    workload: Workload
    baseline: float
    runner: str
    study: Study | None
    progress: Progress
    budget: Budget
    tried: dict[str, Trial] = field(default_factory=dict[str, Trial])
    errors: dict[str, float] = field(default_factory=dict[str, float])
    certifier: Certifier | None = None
    certificates: dict[str, Certificate] = field(default_factory=dict[str, Certificate])
    reused: set[str] = field(default_factory=set[str])
    evaluations: int = 1
    lost: list[str] = field(default_factory=list[str])
    spread_of: SpreadOf | None = None
    spreads: dict[str, OrderSpread] = field(default_factory=dict[str, OrderSpread])
    _metrics: dict[str, float] = field(init=False, default_factory=dict[str, float])
    _resume: bool = field(init=False)
    _judged_by: str = field(init=False)

    def __post_init__(self) -> None:
        """Digest what judges a plan: the data or the user's code, and the baseline metric."""
        # Of a trial that a study remembers the samples are not known.
        remembers = self.study is not None and self.study.resume
        self._resume = remembers and self.certifier is None
        judge = f"{self.workload.digest}\0{self.baseline:.6g}"
        self._judged_by = hashlib.sha256(judge.encode()).hexdigest()[:16]

    def confirms(self, candidate: Candidate, measure: Measure) -> bool:
        """Whether a candidate that passed does so by an evaluation of this run.

        Trials of an earlier run only guide the search. If a candidate that one let pass now
        fails, those trials are of other code or data, and are dropped.
        """
        digest = candidate.plan.digest
        if digest not in self.reused or self._judge(
            candidate, self._evaluate(candidate, measure)
        ):
            return True
        self.tried = {digest: self.tried[digest]}
        self.reused.clear()
        self._resume = False
        return False

    def has_passed(self, candidate: Candidate) -> bool:
        """Whether a candidate was tried and passed."""
        trial = self.tried.get(candidate.plan.digest)
        return trial is not None and trial.passed

    def nearest(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """The one of the tried ``candidates`` whose metric comes nearest to the target."""
        tried = [c for c in candidates if c.plan.digest in self.tried]
        better = self._criterion.higher_is_better
        return max(
            tried,
            key=lambda c: _ascending(self._guiding(self.metric(c.plan)), better),
            default=None,
        )

    def missed(
        self, candidates: Sequence[Candidate], found: Candidate | None
    ) -> list[Candidate]:
        """Candidates that were tried and failed, and are faster than ``found``."""
        limit = math.inf if found is None else found.cost / SAME_TIME
        failed = {d for d, trial in self.tried.items() if not trial.passed}
        return [c for c in candidates if c.plan.digest in failed and c.cost < limit]

    @property
    def least_missed(self) -> float | None:
        """The least predicted squared error of the plans that failed; None if none did."""
        failed = (self.errors[d] for d, t in self.tried.items() if not t.passed)
        return min(failed, default=None)

    def allowed_error(self, errors: Mapping[str, float] | None = None) -> float | None:
        """The squared output error at which the metric is expected to reach the target.

        ``errors`` are squared errors of plans by digest; the predicted ones if not given.

        The metric is taken to be linear in the error, between the smallest error that failed
        and the largest below it that passed, or no error at all; an SNR in dB as the error
        that it states. None where nothing failed, or the metric does not tell the two apart.
        """
        known = {
            math.sqrt(error): digest
            for digest, error in (self.errors if errors is None else errors).items()
            if digest in self.tried and math.isfinite(error)
        }
        tried = {error: self.deciding(digest) for error, digest in known.items()}
        passed = {error: self.tried[digest].passed for error, digest in known.items()}
        missed = min((e for e, kept in passed.items() if not kept), default=None)
        linear = _relative if self.baseline == math.inf else float
        baseline = self._guiding(self.baseline)
        best = linear(baseline)
        if missed is None or not math.isfinite(best):
            return None
        kept = max((e for e, keeps in passed.items() if keeps and e < missed), default=0.0)
        if kept:
            best = linear(self._guiding(tried[kept]))
        lost = best - linear(self._guiding(tried[missed]))
        if not lost or not math.isfinite(lost):
            return None
        share = (best - linear(self._criterion.target(baseline))) / lost
        return (kept + min(max(share, 0.0), 1.0) * (missed - kept)) ** 2

    def share_lost(self, plan: Plan) -> float:
        """The share of what may be lost by which a plan's metric is off.

        Infinite where it was not tried. A metric that is better than fp32's is off, too: it
        shows what chance may do.
        """
        if plan.digest not in self.tried:
            return math.inf
        metric = self._guiding(self.metric(plan))
        baseline = self._guiding(self.baseline)
        lost, allowed = abs(metric - baseline), self._criterion.allowed_loss(baseline)
        return lost / allowed if math.isfinite(lost) and allowed > 0 else math.inf

    @property
    def stated_error(self) -> float | None:
        """The squared output error that the criterion states; None if it states none."""
        if self.baseline != math.inf:
            return None
        return _relative(self.target) ** 2

    def log_loss(self, metric: float) -> tuple[float, float]:
        """The logarithm of what a plan loses over what may be lost, and its deviation.

        Where margins of decisions are known, the loss on other data counts: how many times as
        far as a plan that just keeps the metric there this one moves margins. A loss of
        nothing says that the logarithm is small, and not how small.
        """
        scale = self._passing_scale(metric)
        guiding, baseline = self._guiding(metric), self._guiding(self.baseline)
        if scale is not None:
            share = 1 / scale
        elif baseline == math.inf:
            share = _relative(guiding) / _relative(self._criterion.target(baseline))
        else:
            sign = 1.0 if self._criterion.higher_is_better else -1.0
            allowed = self._criterion.allowed_loss(baseline)
            share = sign * (baseline - guiding) / (allowed or float(np.finfo(float).tiny))
        if math.isnan(share):
            share = math.inf
        log = math.log(share) if share > 0 else -math.inf
        is_known = abs(log) < _FAR - CLOSELY
        return min(max(log, -_FAR), _FAR), CLOSELY if is_known else ROUGHLY

    def _passing_scale(self, metric: float) -> float | None:
        """How many times as far a plan may move margins, so that other data keep the metric.

        None where margins are not known.
        """
        lost = None if self.certifier else losses_at(self.baseline, metric)
        if lost is None:
            return None
        count = 1 + round(_FAR / CLOSELY)  # each is known to that much to either side
        scales = np.exp(np.linspace(_FAR, -_FAR, count)).tolist()
        return next((s for s in scales if lost(s) <= self._allowed), scales[-1])

    def decisions(self) -> DecisionChances | None:
        """The decisions on the data at hand; None where margins are not known."""
        baseline = self.baseline
        if self.certifier is not None or losses_at(baseline, baseline) is None:
            return None
        assert isinstance(baseline, Score)
        exact = next(iter(baseline.margins.values()))
        may_lose = round(self._allowed / baseline.whole * len(exact), 9)  # some are whole
        unexplained = (ROUGHLY / 2) ** 2  # moves are as much off as errors, not squared
        return DecisionChances(exact=exact, may_lose=may_lose, unexplained=unexplained)

    @property
    def _criterion(self) -> Criterion:
        return self.budget.goal.criterion

    @property
    def asked(self) -> str:
        """Text: what fp32 scores, and the worst metric with which a plan passes."""
        end = "on" if self._criterion.higher_is_better else "down"
        return f"{self.baseline:.6g}; a plan passes from {self.target:.6g} {end}"

    @property
    def target(self) -> float:
        """The worst metric that passes."""
        return self._criterion.target(self.baseline)

    def passing(self, metric: float) -> bool:
        """Whether this metric meets the criterion; certified plans alone, once some are."""
        if self.certifier is not None and isinstance(metric, Score):
            return self.certifier.passes(metric)
        expected = by_margins(self.baseline, metric)
        by_luck = expected is not None and not self._keeps(expected.cautious)
        return self._keeps(metric) and not by_luck

    def _keeps(self, metric: float) -> bool:
        """Whether this metric is within the limit."""
        return self._criterion.passes(metric, self.baseline)

    def elsewhere(self, metric: float) -> ExpectedMetric | None:
        """What is expected on other data; None where it is not known."""
        better = self._criterion.higher_is_better
        return on_new_data(self.baseline, metric, higher_is_better=better)

    @property
    def _allowed(self) -> float:
        """What may be lost of the metric."""
        return self._criterion.allowed_loss(self.baseline)

    def certify(self) -> str:
        """Certify the plans that passed; no other one passes from now on.

        Returns:
            Why the last plan that was tested is not certified; empty if all are.
        """
        certifier = self.certifier
        if certifier is None or self.certificates:
            return ""
        scores = {d: t.metric for d, t in self.tried.items() if t.passed}
        self.certificates = certifier.certified(
            {d: s for d, s in scores.items() if isinstance(s, Score)},
            sorted(scores, key=lambda digest: self.errors[digest]),
        )
        held = {d for d, one in self.certificates.items() if certifier.holds(one)}
        self.tried = {d: replace(t, passed=d in held) for d, t in self.tried.items()}
        *_, last = self.certificates
        certificate, score = self.certificates[last], scores[last]
        if certifier.holds(certificate) or not isinstance(score, Score):
            return ""
        return certifier.why_not(certificate, score)

    def _guiding(self, metric: float) -> float:
        """The metric that leads the search: with a certifier, of the samples that choose.

        The samples that certify would else have a part in which plans are tried.
        """
        if self.certifier is not None and isinstance(metric, Score):
            return self.certifier.chosen(metric)
        return metric

    def no_worse(self, metric: float, other: float) -> bool:
        """Whether ``metric`` is at least as good as ``other``."""
        better = self._criterion.higher_is_better
        return _ascending(metric, better) >= _ascending(other, better)

    def may_go_on(self) -> bool:
        """Whether the budget has room for another evaluation."""
        return not self.spent

    @property
    def spent(self) -> str:
        """Why no further plan may be evaluated; empty if one may.

        The evaluation of fp32 does not count.
        """
        return self.budget.spent(self.evaluations - 1)

    def passes(self, candidate: Candidate, measure: Measure) -> bool:
        """Whether a candidate passes, by its evaluation or by its earlier trial.

        ``measure`` gives the metric of a plan on all data.
        """
        digest = candidate.plan.digest
        if self.certificates:
            return self.has_passed(candidate)
        trial = self.tried.get(digest)
        if trial is None and self.study is not None and self._resume:
            trial = self.study.find(self._key(candidate))
            if trial is not None:
                self.reused.add(digest)
        # A stored trial was judged by the criterion of its own run: judge it by this one.
        return self._judge(candidate, trial or self._evaluate(candidate, measure))

    def metric(self, plan: Plan) -> float:
        """The metric of a plan that was tried."""
        return self.tried[plan.digest].metric

    def deciding(self, digest: str) -> float:
        """The metric by which a plan that was tried passed or missed.

        Over orders of summation that is the worst of as many as have to keep the criterion.
        """
        metric, spread = self.tried[digest].metric, self.spreads.get(digest)
        better = self._criterion.higher_is_better
        over = None if spread is None else spread.deciding(higher_is_better=better)
        return metric if over is None else over

    def none_passes(self, proposed: int) -> str:
        """Text: why none of ``proposed`` plans was found to pass."""
        why = none_passes(
            len(self.tried),
            proposed,
            self._criterion.target(self._guiding(self.baseline)),
            by_half=self.certifier is not None,
            reused=len(self.reused),
            spent=self.spent,
            resumable=self.study is not None,
        )
        why += self._by_chance
        missed = [one for one in self.spreads.values() if not one.holds]
        if not missed:
            return why
        most = max(missed, key=lambda one: one.kept)
        counts = f"at most {most.kept} of {len(most.runs)} orders of summation"
        return f"{why}; of {number_of(len(missed), 'plan')} within it here {counts} keep it"

    @property
    def _by_chance(self) -> str:
        """Text: how many plans keep the limit on these data alone; empty for none."""
        if self.certifier is not None:
            return ""
        metrics = [one.metric for one in self.tried.values() if self._keeps(one.metric)]
        expected = [by_margins(self.baseline, one) for one in metrics]
        lucky = [one for one in expected if one and not self._keeps(one.cautious)]
        if not lucky:
            return ""
        least = max(lucky, key=lambda one: one.cautious)
        keeps = "keeps" if len(lucky) == 1 else "keep"
        there = expected_text(least.metric, least.loss, least.deviation)
        return (
            f"; {number_of(len(lucky), 'plan')} {keeps} it on your data alone: on new data of"
            f" the same kind expect {there}; more data narrow that"
        )

    def _key(self, candidate: Candidate) -> TrialKey:
        return TrialKey(
            model=self.model,
            plan=candidate.plan.digest,
            engine=self.runner,
            data=self._judged_by,
        )

    def _measured(self, plan: Plan, measure: Measure) -> float:
        """The metric of a plan's model on all data, which is evaluated once in a run."""
        if plan.digest not in self._metrics:
            self.evaluations += 1
            self._metrics[plan.digest] = measure(plan)
        return self._metrics[plan.digest]

    def _evaluate(self, candidate: Candidate, measure: Measure) -> Trial:
        self.progress(f"evaluation of {candidate.name}", len(self.tried), len(self.tried) + 1)
        study = self.study
        try:
            metric = self._measured(candidate.plan, measure)
        except LostTrialError as error:
            metric, study = self.lose(candidate.name, error), None
        trial = Trial(
            key=self._key(candidate),
            name=candidate.name,
            metric=metric,
            passed=self.passing(metric),
            latency_s=candidate.latency_s if candidate.timed else None,
            plan_json=candidate.plan.to_json(),
        )
        if study is not None:
            study.add(trial)
        return trial

    def lose(self, name: str, error: LostTrialError) -> float:
        """Tell that the evaluation of a model ended its process; gives NaN, which misses.

        No study keeps it: an engine that was mended may compute the same model.
        """
        text = f"{name} was left out: its evaluation {error.what}"
        self.lost.append(text)
        self.progress(Notice(text), len(self.tried), len(self.tried))
        return math.nan

    def _holds(self, plan: Plan) -> bool:
        """Whether a plan keeps the criterion in enough orders of summation."""
        if self.spread_of is None:
            return True
        if plan.digest not in self.spreads:
            self.spreads[plan.digest] = self.spread_of(plan, self.passing)
        return self.spreads[plan.digest].holds

    def _judge(self, candidate: Candidate, trial: Trial) -> bool:
        passed = self.passing(trial.metric) and self._holds(candidate.plan)
        self.tried[candidate.plan.digest] = replace(trial, passed=passed)
        self.errors[candidate.plan.digest] = candidate.error
        self.progress("evaluation", len(self.tried), len(self.tried))
        return passed


SpreadOf: TypeAlias = Callable[[Plan, Callable[[float], bool]], OrderSpread]


def _ascending(metric: float, higher_is_better: bool) -> float:
    """The metric, negated if lower is better, so that larger is better; NaN is the worst."""
    if math.isnan(metric):
        return -math.inf
    return metric if higher_is_better else -metric


def nan_baseline(
    model: str, workload: Workload, first_nan: Callable[[], str]
) -> ModelError | UsageError:
    """The error if the fp32 model's metric is NaN: of the data, if that has NaN or Inf.

    Inf alone is no error, as masks have it: it is one where the model makes NaN of it. Where
    the data has none, ``first_nan`` gives the first op that gives NaN or Inf.
    """
    data = nonfinite_data(workload)
    if data:
        return UsageError(
            f"the fp32 model's metric is NaN: {data}",
            where="--data",
            fix="leave out samples with NaN or Inf, or put numbers in their place",
        )
    first = first_nan()
    where = f"; the first op to give NaN or Inf is {first!r}" if first else ""
    return ModelError(
        f"the fp32 model's metric is NaN{where}",
        where=model,
        fix="check data and metric with the fp32 model first",
    )


def _relative(snr_db: float) -> float:
    """The relative error that an SNR states, negative: a larger one is better, like an SNR."""
    return -math.inf if math.isnan(snr_db) else -(10 ** (-snr_db / 20))
