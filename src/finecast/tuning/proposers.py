"""What may propose plans where none of those known is worth a measurement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from finecast.native.subject import Built, Subject
from finecast.planning.plan import Plan
from finecast.planning.problem import Proposal
from finecast.planning.proposing import between, lowered_by_one, near, raised_by_one
from finecast.tuning.belief import CLOSELY
from finecast.tuning.hint import coded_over_hints, stated_by_hint
from finecast.tuning.loop import TRIALS, Loop
from finecast.tuning.probing import Probing
from finecast.tuning.search import Corrections


def corrected(corrections: Corrections, loop: Loop) -> Sequence[Proposal]:
    """Plans with corrected biases, where faster plans with quantized integers missed.

    What the correction gains is measured on the most accurate plan that missed; where that is
    no more than noise, no plan is corrected. Those that are corrected are plans whose error
    then meets the criterion, and candidates near the allowed error, as far as they are
    predicted to be faster than the best plan.
    """
    trials, best, candidates = loop.models.trials, loop.best, loop.models.candidates
    if any(c.plan.adjustments for c in candidates):
        return []
    coded = [c for c in trials.missed(candidates, best) if c.plan.encodings]
    if not coded:
        return []
    nearest = min(coded, key=lambda c: c.error)
    allowed = trials.allowed_error() or nearest.error
    # An adjustment is taken to leave a tenth of a plan's error, of which more is not known.
    if not _any_within(loop, allowed, allowed / CLOSELY**2):
        return []
    loop.models.progress("adjusting", 0, 1)
    gain = corrections.gain(nearest.plan)
    if gain is None or not gain.gains:
        return []
    # What a plan may have that is then corrected.
    before = allowed / gain.share if gain.share else math.inf
    cost = math.inf if best is None else best.cost / loop.least_gain
    about = [c for c in candidates if c.plan.encodings and allowed < c.error <= before]
    fresh = near(loop.belief.planner, loop.belief.analysis, before)
    wanted = [
        *(p for p in fresh if p.time_s < loop.limit),
        *(c.proposal for c in about if c.cost < cost),
    ]
    return corrections.proposals(wanted, gain)


def _any_within(loop: Loop, least: float, most: float) -> bool:
    """Whether a known plan, or one between steps of the frontier, has such an error.

    Where plans far below the allowed error are followed by plans far above it, there is none
    that an adjustment could make pass, and what adjustments gain is not measured.
    """
    planner, analysis = loop.belief.planner, loop.belief.analysis
    known = any(least < one.error <= most for one in loop.pool.values())
    return known or bool(near(planner, analysis, most, (1.0,)))


def over_hint(
    subject: Subject, hints: Mapping[str, Built], corrections: Corrections, loop: Loop
) -> Sequence[Proposal]:
    """The quantized ops of the best plan, and in all other ops what the engine's hint lowers.

    If it has none, those of the fastest plan with some that no miss speaks against. Casts
    around quantized ops may cost more than they gain; under the hint the engine fuses its own.
    """
    best, candidates = loop.best, loop.models.candidates
    missed = (c.error for c in loop.models.trials.missed(candidates, None))
    least = min(missed, default=math.inf)
    among = [best] if best and best.plan.encodings else candidates
    coded = [c for c in among if c.plan.encodings and c.error < least]
    if not coded:
        return []
    fastest = min(coded, key=lambda c: c.cost)
    plans = coded_over_hints(subject, fastest.plan, hints.values())
    corrections.restated(fastest.plan, plans)
    planner, analysis = loop.belief.planner, loop.belief.analysis
    name = f"{fastest.name}, with the engine's hint for the rest"
    return [stated_by_hint(planner, analysis, name, plan) for plan in plans]


def more_steps(loop: Loop) -> Sequence[Proposal]:
    """Steps of the frontier between the best plan and the most accurate one that missed.

    Where a plan passes they are tried within a user's budget alone.
    """
    best, trials = loop.best, loop.models.trials
    if best is not None and not trials.budget.goal.goes_on:
        return []
    missed = trials.least_missed
    if missed is None:
        return []
    errors = (0.0 if best is None else best.error, missed)
    most = loop.models.subject.max_steps
    return between(loop.belief.planner, loop.belief.analysis, errors, most=most)


def single_changes(loop: Loop) -> Sequence[Proposal]:
    """Changes of single units, within a user's budget.

    From a plan that passes, one more unit is lowered. Where none passes, one unit of the plan
    nearest to the criterion is raised, and single units are lowered alone: a unit whose
    predicted error is small may be what fails the metric.
    """
    trials, best = loop.models.trials, loop.best
    if not trials.budget.goal.goes_on:
        return []
    planner, analysis = loop.belief.planner, loop.belief.analysis
    if best is not None:
        return lowered_by_one(planner, analysis, best.plan)
    nearest = trials.nearest(loop.models.candidates)
    raised = [] if nearest is None else raised_by_one(planner, analysis, nearest.plan)
    return [*raised, *lowered_by_one(planner, analysis, planner.highest())]


@dataclass(slots=True)
class Probed:
    """The fastest plan of which runs on calibration data say that it passes.

    For modelled devices, where such a run takes no compilation and no race.
    """

    probing: Probing | None = None
    searches: int = field(init=False, default=0)

    def __call__(self, loop: Loop) -> Sequence[Proposal]:
        """The plan, or none."""
        measuring, trials = loop.models.measuring, loop.models.trials

        def error(plan: Plan) -> float:
            return measuring.plan_error(plan) ** 2

        if self.probing is None:
            self.probing = Probing(
                planner=loop.belief.planner,
                analysis=loop.belief.analysis,
                error=error,
            )
        tried = [c for c in loop.models.candidates if c.plan.digest in trials.tried]
        known = {c.plan.digest: (c.plan, error(c.plan)) for c in tried}
        allowed = trials.allowed_error({digest: e for digest, (_, e) in known.items()})
        if not allowed or self.searches == TRIALS:
            return []
        loop.models.progress("probing plans", self.searches, TRIALS)
        better = self.probing.fastest(allowed, known.values(), loop.limit)
        if better is None:
            return []
        self.searches += 1
        probed = error(better.plan)
        loop.belief.tried(better, loop.belief.order * math.log(probed / allowed) / 2, CLOSELY)
        return [better]
