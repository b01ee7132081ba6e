"""What is believed of plans that were not measured, from what was measured of others.

Predictions are sums over the parts of a plan: of the times of its kernels and casts, of the
squared errors of its roundings. How far a sum is off is a sum over the same parts. So plans
that have large parts in common are off alike. The logarithm of measured over predicted is a
Student-t process over plans: the covariance of two plans is the sum, over the parts that both
have, of the geometric mean of the shares that this part has in either. Source of the gain
that is expected under a constraint: M. Schonlau, W. J. Welch and D. R. Jones, "Global versus
local search in constrained optimization of computer models" (1998).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np

from finecast.measure.racing import LEAST_COST
from finecast.numbers.thresholds import SAME_TIME
from finecast.planning.alternatives import labels_of
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, Proposal
from finecast.solver.assignment import Floats, Ints
from finecast.solver.labelling import LabelProblem, evaluate
from finecast.tuning.decision_chances import DecisionChances

LOSS_OFF: Final = 1.3
"""The deviation of the logarithm of what the lowest plan loses over what may be lost, before
any was tried: of nets it is as likely a tenth as ten times as much, or anything between."""
CLOSELY: Final = 0.1
"""The deviation of the logarithm of what is known to some ten percent: of a measured over a
predicted time, of a plan in which all is low, and of a loss or an error that was measured,
from that on other samples. What an engine spares under its own hint is known as little as a
time; a squared error is off by twice as much as the error."""
ROUGHLY: Final = 0.5
"""The deviation of the logarithm of a measured over a predicted squared error: sums of single
errors are 2 dB off. As little is known of the error by a hint from that of the same plan by
casts, and of a loss from a measured error, from a stated error, or beyond what was counted."""


@dataclass(slots=True, kw_only=True)
class Process:
    """A Student-t process over the features of plans, with observations.

    Law: the covariance of two plans is the product of their features, times a scale that is 1
    before anything was observed; without observations the mean is 0. The scale is that of the
    observed values beside what was expected of them, where the features' own scale counts as
    much as one observation. So a value that is far off makes all others less certain, too.
    Source: A. Shah, A. G. Wilson and Z. Ghahramani, "Student-t processes as alternatives to
    Gaussian processes" (2014).
    """

    _features: list[Floats] = field(init=False, default_factory=list[Floats])
    _values: list[float] = field(init=False, default_factory=list[float])
    _noise: list[float] = field(init=False, default_factory=list[float])

    def observe(self, features: Floats, value: float, deviation: float) -> None:
        """Take the value of a plan, which is off by ``deviation``."""
        self._features.append(features)
        self._values.append(value)
        self._noise.append(deviation**2)

    def at(self, features: Floats) -> tuple[Floats, Floats]:
        """Mean and deviation of plans, float64[n] each, by their features, float64[n, k]."""
        variance = (features**2).sum(axis=1)
        if not self._values:
            return np.zeros(len(features)), np.sqrt(variance)
        seen = np.array(self._features)
        among = seen @ seen.T + np.diag(self._noise)
        to = seen @ features.T
        weights = np.linalg.solve(among, np.column_stack([to, self._values]))
        left = variance - (to * weights[:, :-1]).sum(axis=0)
        *mean, surprise = self._values @ weights
        scale = (1 + surprise) / (1 + len(seen))
        return np.array(mean), np.sqrt(scale * np.maximum(left, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A plan with what is predicted of it.

    Attributes:
        cost: The logarithm of its predicted cost over fp32's.
        error: The logarithm of its predicted squared error.
        costs: float64[k], the features of its cost.
        errors: float64[k], the features of its error: shares of each unit and low format, and
            of a hint.
    """

    cost: float
    error: float
    costs: Floats
    errors: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What is believed of plans; float64[n] each.

    Attributes:
        cost: The logarithm of the cost over fp32's.
        cost_off: The deviation of that.
        passes: The probability that the criterion is met.
    """

    cost: Floats
    cost_off: Floats
    passes: Floats

    def gain(self, limit: float, least: float = 0.0) -> Floats:
        """The expected gain over a plan in use, where only a cost below ``limit`` counts.

        The gain is the logarithm of the ratio of costs, times the probability to pass.

        Args:
            limit: The logarithm of a cost over fp32's.
            least: The least probability to pass that is reckoned with.
        """
        from scipy.special import ndtr

        off = np.maximum(self.cost_off, 1e-9)
        ahead = limit - self.cost
        score = ahead / off
        density = np.exp(-(score**2) / 2) / math.sqrt(2 * math.pi)
        return np.maximum(self.passes, least) * (ahead * ndtr(score) + off * density)


@dataclass(slots=True, kw_only=True)
class Belief:
    """What is believed of the plans of one analysis.

    Attributes:
        planner: Makes the plans.
        analysis: What was predicted.
        order: The power of the output's error that a small loss grows with.
        cost_off: The deviation of the logarithm of measured over predicted costs.
        loss_off: The deviation of the logarithm of what a plan loses over what may be lost,
            before any was tried.
        reference: The squared error with which a plan is then as likely to pass as to miss.
        decisions: Those on the data at hand; None where they are not known.
        fp32: The predicted cost of the fp32 model.
    """

    planner: Planner
    analysis: Analysis
    order: float = 1.0
    cost_off: float = CLOSELY
    loss_off: float = LOSS_OFF
    reference: float = 1.0
    decisions: DecisionChances | None = None
    _costs: Process = field(init=False, default_factory=Process)
    _errors: Process = field(init=False, default_factory=Process)
    _losses: Process = field(init=False, default_factory=Process)
    _measured: dict[str, tuple[float, float]] = field(
        init=False, default_factory=dict[str, tuple[float, float]]
    )
    # What was taken, in its order, with the plan that it was taken of.
    _taken: list[tuple[Proposal, Take]] = field(
        init=False, default_factory=list[tuple[Proposal, Callable[..., None]]]
    )
    _known: dict[str, Known] = field(init=False, default_factory=dict[str, Known])
    _problem: LabelProblem = field(init=False)
    fp32: float = field(init=False)
    _unit_errors: Floats = field(init=False)

    def __post_init__(self) -> None:
        """State the problem that plans are labellings of."""
        planner, analysis = self.planner, self.analysis
        self._problem = analysis.problem(planner.graph, planner.permissions)
        exact = labels_of(planner, analysis, self._problem, planner.highest())
        # Where all ops are in branches or loops, no kernel with a time is known.
        self.fp32 = max(evaluate(self._problem, exact).time_s, LEAST_COST)
        rounded = [r.units + r.by_unit for r in analysis.rounded.values()]
        self._unit_errors = np.maximum(np.stack([np.zeros(len(exact)), *rounded], axis=1), 0.0)

    def predicted(self, proposal: Proposal) -> float:
        """The cost that is predicted of a plan; of one of a hint by the same plan by casts."""
        return math.exp(self._of(proposal).cost) * self.fp32

    def measured(self, proposal: Proposal, slowdown: float, off: float) -> None:
        """Take a plan's cost over fp32's, and the relative deviation of that."""
        self._taken.append((proposal, lambda to, of: to.measured(of, slowdown, off)))
        known, value = self._of(proposal), math.log(slowdown)
        self._measured[proposal.plan.digest] = value, off
        # A model's speed differs from one load to the next by what counts as equally fast.
        noise = math.hypot(off, min(math.log(SAME_TIME), self.cost_off))
        self._costs.observe(known.costs, value - known.cost, noise)

    def erred(self, proposal: Proposal, error: float) -> None:
        """Take the squared relative error of a plan's outputs on a few samples."""
        self._taken.append((proposal, lambda to, of: to.erred(of, error)))
        known = self._of(proposal)
        if 0 < error < math.inf:
            self._errors.observe(known.errors, _log(error) - known.error, 2 * CLOSELY)

    def tried(
        self, proposal: Proposal, loss: float, off: float, margins: Floats | None = None
    ) -> None:
        """Take the logarithm of a plan's loss over what may be lost, and its deviation.

        ``margins`` are those of decisions under the plan, if known.
        """
        self._taken.append((proposal, lambda to, of: to.tried(of, loss, off, margins)))
        expected, spread = self._expected([proposal])
        features = self._loss_features([self._of(proposal)])[0]
        self._losses.observe(
            features, loss - float(expected[0]), math.hypot(off, float(spread[0]))
        )
        if self.decisions is not None and margins is not None:
            parts, errors = self._moving([proposal])
            self.decisions.tried(parts[0], float(errors[0]), margins)

    def sharpened(self, analysis: Analysis, sharper: Callable[[Proposal], Proposal]) -> Belief:
        """This by an analysis that knows the errors of single ops, with all that was taken.

        ``sharper`` gives a proposal with the error that ``analysis`` predicts.
        """
        decisions = None if self.decisions is None else replace(self.decisions)
        belief = replace(self, analysis=analysis, decisions=decisions)
        for proposal, take in self._taken:
            take(belief, sharper(proposal))
        return belief

    def of(self, proposals: Sequence[Proposal]) -> Estimate:
        """What is believed of plans."""
        from scipy.special import ndtr

        known = [self._of(one) for one in proposals]
        more, off = self._costs.at(np.array([one.costs for one in known]))
        cost = np.array([one.cost for one in known]) + more
        for i, one in enumerate(proposals):
            if one.plan.digest in self._measured:
                cost[i], off[i] = self._measured[one.plan.digest]
        expected, spread = self._expected(proposals)
        more, loss_off = self._losses.at(self._loss_features(known))
        spread = np.hypot(spread, loss_off)
        passes = ndtr(-(expected + more) / spread)
        if self.decisions is not None and self.decisions.are_known:
            passes = passes * self.decisions.passes(*self._moving(proposals))
        return Estimate(cost=cost, cost_off=off, passes=passes)

    def allowed(self, chances: Sequence[float]) -> list[float]:
        """Squared errors that plans pass with these chances, as far as all plans tell."""
        from scipy.special import ndtri

        common = np.zeros((1, len(self._unit_errors[:, 1:].ravel()) + 1))
        common[0, -1] = self.loss_off
        more, off = self._losses.at(common)
        apart = math.hypot(ROUGHLY, self.order * ROUGHLY / 2)
        spread = math.hypot(float(off[0]), apart)
        logs = [-float(more[0]) - spread * float(ndtri(c)) for c in chances]
        return [self.reference * math.exp(2 * log / self.order) for log in logs]

    def _expected(self, proposals: Sequence[Proposal]) -> tuple[Floats, Floats]:
        """The logarithm of the loss that plans' errors cause, and how far these are known."""
        _, error, off = self._erring(proposals)
        power = self.order / 2
        return power * (error - math.log(self.reference)), power * off

    def _moving(self, proposals: Sequence[Proposal]) -> tuple[Floats, Floats]:
        """The features of plans' errors, of length 1 each, and the errors, not squared."""
        features, error, _ = self._erring(proposals)
        length = np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
        return features / length, np.exp(error / 2)

    def _erring(self, proposals: Sequence[Proposal]) -> tuple[Floats, Floats, Floats]:
        """The features of plans' errors, the logarithms of their squares, and how far off."""
        known = [self._of(one) for one in proposals]
        features = np.array([one.errors for one in known])
        more, off = self._errors.at(features)
        return features, np.array([one.error for one in known]) + more, off

    def _loss_features(self, known: Sequence[Known]) -> Floats:
        """Of each unit and low format, and of all plans."""
        own = np.array([one.errors[:-1] for one in known])
        return np.column_stack([own, np.full(len(known), self.loss_off)])

    def _of(self, proposal: Proposal) -> Known:
        plan = proposal.plan
        if plan.digest not in self._known:
            label = labels_of(self.planner, self.analysis, self._problem, plan)
            priced = evaluate(self._problem, label).time_s
            cost_s = proposal.time_s if math.isfinite(proposal.time_s) else priced
            self._known[plan.digest] = Known(
                cost=_log(cost_s / self.fp32),
                error=_log(proposal.error),
                costs=self._cost_features(label, priced, plan),
                errors=self._error_features(label, plan),
            )
        known = self._known[plan.digest]
        if known.error != _log(proposal.error):  # a race told more of it
            known = self._known[plan.digest] = replace(known, error=_log(proposal.error))
        return known

    def _cost_features(self, label: Ints, priced: float, plan: Plan) -> Floats:
        """Of each unit and low format, of casts, and of a hint."""
        units = np.arange(len(label))
        own = self._problem.time[units, label]
        low = np.where(label > 0, own, 0.0)
        casts = max(priced - float(own.sum()), 0.0)
        shares = self._by_format(label, low / (priced or 1.0))
        hinted = self.cost_off if plan.by_hint else 0.0
        casting = self.cost_off * math.sqrt(casts / (priced or 1.0))
        return np.array([*(self.cost_off * np.sqrt(shares)), casting, hinted])

    def _error_features(self, label: Ints, plan: Plan) -> Floats:
        """Of each unit and low format, and of a hint."""
        own = self._unit_errors[np.arange(len(label)), label]
        shares = self._by_format(label, own / (float(own.sum()) or 1.0))
        hinted = ROUGHLY if plan.by_hint else 0.0
        return np.array([*(ROUGHLY * np.sqrt(shares)), hinted])

    def _by_format(self, label: Ints, values: Floats) -> Floats:
        """float64[n * (k - 1)]: each unit's value at its low format."""
        spread = np.zeros(self._unit_errors.shape)
        spread[np.arange(len(label)), label] = values
        return spread[:, 1:].ravel()


Take: TypeAlias = Callable[[Belief, Proposal], None]


def _log(value: float) -> float:
    """The logarithm of a positive number; of none at all that of the smallest one."""
    return math.log(min(max(value, float(np.finfo(float).tiny)), float(np.finfo(float).max)))
