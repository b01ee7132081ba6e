"""The fastest plan within an error, found by runs on calibration data.

Predicted errors are sums over single roundings. Where roundings are not independent they are
off by some decibels, and the fastest plan that keeps the criterion is predicted to miss it. On
a modelled device the error of a plan takes one run, without a compilation and a race, so plans
are probed before any is evaluated on all data. Each probe says how far predictions are off for
the plans around it. Next is the plan of the largest expected gain: the time that it saves,
times the probability that its error is allowed, with the logarithm of the ratio between
measured and predicted errors as a Gaussian process over plans, by the units in which they
differ. Shares of errors, as in ``tuning/belief.py``, find 73 of 80 best plans in place of 76:
what matters here is how errors cancel. Source: M. Schonlau,
W. J. Welch and D. R. Jones, "Global versus local search in constrained optimization of
computer models" (1998).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from finecast.numbers.thresholds import MODELLED_GAIN
from finecast.planning.alternatives import labels_of
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, Proposal
from finecast.planning.proposing import labelled, near
from finecast.solver.assignment import Bools, Floats, Ints
from finecast.solver.expansion import highest
from finecast.solver.flips import flips
from finecast.solver.labelling import Labelling, LabelProblem, evaluate
from finecast.tuning.belief import CLOSELY, ROUGHLY

# Probes of one search, and units of which pairs change together, those whose single change
# promises most.
_MOST: Final = 24
# The expected gain, as a share of the time, that is worth a probe: a gain that counts, of one
# chance in ten.
_WORTH: Final = (MODELLED_GAIN - 1) / 10
# A ratio of errors beyond six deviations is of another kind, such as an overflow, and says no
# more.
_BOUND: Final = 6 * ROUGHLY


@dataclass(slots=True, kw_only=True)
class Probing:
    """Searches by probes; what they told is kept from one search to the next.

    Attributes:
        planner: Makes the plans.
        analysis: Times, casts and errors that are predicted.
        error: Measures the squared relative output error of a plan.
    """

    planner: Planner
    analysis: Analysis
    error: Callable[[Plan], float]
    _problem: LabelProblem = field(init=False)
    _pool: dict[bytes, Labelling] = field(init=False, default_factory=dict[bytes, Labelling])
    # The logarithms of the predicted squared errors of the pool.
    _predicted: dict[bytes, float] = field(init=False, default_factory=dict[bytes, float])
    _errors: dict[bytes, float] = field(init=False, default_factory=dict[bytes, float])
    _widened: set[bytes] = field(init=False, default_factory=set[bytes])

    def __post_init__(self) -> None:
        """State the problem that plans are labellings of."""
        graph, permissions = self.planner.graph, self.planner.permissions
        self._problem = self.analysis.problem(graph, permissions)

    def fastest(
        self, allowed: float, known: Iterable[tuple[Plan, float]], limit: float
    ) -> Proposal | None:
        """The fastest plan found whose measured error is allowed; None if there is none.

        Law: its measured squared error is at most ``allowed``, and its predicted cost below
        ``limit`` and below that of fp32. At most ``_MOST`` plans are probed. Deterministic.

        Args:
            allowed: The squared error.
            known: Plans whose squared errors were measured, with these.
            limit: The predicted cost that a plan has to stay below.
        """
        for plan, error in known:
            key = self._added(self._label(plan))
            self._errors[key] = error
            self._widen(self._pool[key])
        for start in near(self.planner, self.analysis, allowed):
            self._added(self._label(start.plan))
        incumbent, least = None, min(limit, highest(self._problem).time_s)
        for _ in range(_MOST):
            wanted = self._next(allowed, least)
            if wanted is None:
                break
            proposed = labelled(self.planner, self.analysis, self._pool[wanted], "probed")
            self._errors[wanted] = error = self.error(proposed.plan)
            if error <= allowed:
                incumbent, least = proposed, proposed.time_s
        return incumbent

    def _label(self, plan: Plan) -> Ints:
        return labels_of(self.planner, self.analysis, self._problem, plan)

    def _widen_to(self, label: Ints) -> None:
        """Let a labelling that keeps the problem's limit be chosen."""
        if self._problem.fits(label):
            self._added(label)

    def _added(self, label: Ints) -> bytes:
        """The key of a labelling, which is in the pool from now on."""
        key = label.tobytes()
        if key not in self._pool:
            self._pool[key] = labelling = evaluate(self._problem, label)
            self._predicted[key] = _log(self.analysis.together(labelling.errors[1:]))
        return key

    def _next(self, allowed: float, least: float) -> bytes | None:
        """The plan to probe next; None if no gain is expected that is worth it.

        Around the most promising one all plans that differ in one or two units are looked at,
        until none of them promises more.
        """
        while True:
            keys = [
                key
                for key, one in self._pool.items()
                if one.time_s < least and one.label.any() and key not in self._errors
            ]
            if not keys:
                return None
            gains = self._gains(keys, allowed, least)
            best = keys[int(gains.argmax())]
            if best in self._widened:
                return best if gains.max() >= _WORTH else None
            self._widen(self._pool[best])

    def _gains(self, keys: list[bytes], allowed: float, least: float) -> Floats:
        """The share of time that each plan saves, times the probability that it may."""
        from scipy.special import ndtr

        errors, off = self._believed(keys)
        passes = ndtr((math.log(allowed) - errors) / off)
        saved = 1 - np.array([self._pool[key].time_s for key in keys]) / least
        return passes * saved

    def _believed(self, keys: list[bytes]) -> tuple[Floats, Floats]:
        """The logarithms of plans' squared errors that are expected, and how far off."""
        labels = self._labels(keys)
        expected = np.array([self._predicted[key] for key in keys])
        if not self._errors:
            return expected, np.full(len(keys), ROUGHLY)
        seen = self._labels([*self._errors])
        logs = [_log(error) - self._predicted[key] for key, error in self._errors.items()]
        ratios: Floats = np.clip(np.array(logs, dtype=np.float64), -_BOUND, _BOUND)
        noise = CLOSELY**2
        to = _alike(seen, labels)
        weights = np.linalg.solve(_alike(seen, seen) + noise * np.eye(len(seen)), to)
        left = np.maximum(1 - (to * weights).sum(axis=0), noise)
        return expected + ratios @ weights, ROUGHLY * np.sqrt(left)

    def _labels(self, keys: list[bytes]) -> Ints:
        return np.array([self._pool[key].label for key in keys], dtype=np.int64)

    def _widen(self, at: Labelling) -> None:
        """Add all labellings that differ from ``at`` in one unit or in two."""
        if at.label.tobytes() in self._widened:
            return
        self._widened.add(at.label.tobytes())
        neighbours = flips(self._problem, at.label)
        changes = np.argwhere(_changed(at.label, neighbours.total_s))
        rank = np.argsort(-np.abs(neighbours.total_s[*changes.T]), kind="stable")
        paired = changes[rank[:_MOST]]
        for unit, label in changes:
            self._widen_to(_with(at.label, (unit, label)))
        for i, one in enumerate(paired):
            for other in paired[:i]:
                if one[0] != other[0]:
                    self._widen_to(_with(at.label, tuple(one), tuple(other)))


def _alike(some: Ints, others: Ints) -> Floats:
    """How much what is known of plans says of others, float64[n, m], from 0 to 1.

    Of plans that differ in half of the units little is known from one another.
    """
    return np.exp(-2 * (some[:, None] != others[None]).mean(axis=2))


def _log(error: float) -> float:
    """The logarithm of an error; of none at all that of the smallest number."""
    return math.log(max(error, float(np.finfo(float).tiny)))


def _changed(label: Ints, total_s: Floats) -> Bools:
    """bool[n, k]: which changes of one unit are permitted and change anything."""
    permitted = np.isfinite(total_s)
    permitted[np.arange(len(label)), label] = False
    return permitted


def _with(label: Ints, *changes: tuple[int, int]) -> Ints:
    changed = label.copy()
    for unit, to in changes:
        changed[unit] = to
    return changed
