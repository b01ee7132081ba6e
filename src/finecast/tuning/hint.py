"""What an engine lowers by itself: a candidate like any other, and a baseline for the result.

A user may set the engine's own precision hint instead of tuning. What the engine then lowers
is stated as a plan, which is a candidate; and the fp32 model under that hint, the baseline, is
evaluated and timed beside the tuned model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from finecast.measure.racing import Interval
from finecast.native.subject import Built, Hinted, Subject
from finecast.planning.alternatives import explained
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, Proposal, predicted_error
from finecast.tuning.goal import MIN_SPEEDUP


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What a user gets without tuning, measured like the result and beside it.

    ``cost`` is what the objective counts, and ``how`` says how it is run, unless it is run as
    any model. ``passed`` says whether it may be used: where certificates are asked for it has
    none, and so may not.
    """

    name: str
    metric: float
    passed: bool
    latency_s: float
    cost: float
    how: str = ""


def better_alone(
    baselines: Sequence[Baseline],
    no_worse: Callable[[float], bool],
    beside: Callable[[str], Interval],
    again: Callable[[Sequence[str]], Callable[[str], Interval]],
    *,
    result: str,
    cost: float,
) -> tuple[str, ...]:
    """A text for each baseline that is faster than the result for certain, and as accurate.

    Law: less than what counts as faster is no advice, and nothing is said that one race alone
    shows. Baselines that may be faster race again with
    the result, and are named if that race shows for certain what the first one suggests. How
    much faster they are is said by the first race, whose times stand beside the result's.

    Args:
        baselines: The baselines.
        no_worse: Whether a metric is at least as good as the result's.
        beside: The cost of a baseline over the result's, by its name, in the first race.
        again: Races the baselines of these names once more; gives the same of that race.
        result: What the result is called: the fp32 model, where no plan was taken.
        cost: The cost of the result in the first race.
    """
    good = [
        baseline for baseline in baselines if baseline.passed and no_worse(baseline.metric)
    ]
    doubtful = [baseline.name for baseline in good if beside(baseline.name).low < 1]
    if not doubtful:
        return ()
    second = again(doubtful)
    how = {baseline.name: f": {baseline.how}" if baseline.how else "" for baseline in good}
    return tuple(
        f"{baseline.name} is {cost / baseline.cost - 1:.1%} faster than {result} and no less"
        f" accurate: use it instead{how[baseline.name]}"
        for baseline in good
        if baseline.name in doubtful
        and baseline.cost * MIN_SPEEDUP <= cost
        and second(baseline.name).high < 1
    )


def with_hints(subject: Subject, proposals: Sequence[Proposal]) -> list[Proposal]:
    """The proposals, and each again stated by the engine's hint where that is possible."""
    plans = ((p, subject.by_hint(p.plan)) for p in proposals)
    return [
        *proposals,
        *(replace(p, name=f"{p.name}, as a hint", plan=plan) for p, plan in plans if plan),
    ]


def with_hinted_errors(
    proposals: Mapping[str, Proposal],
    raced: Mapping[str, Built],
    error: Callable[[Built], float],
) -> dict[str, Proposal]:
    """The proposals, with errors of those by a hint that tell what the engine does not round.

    Law: the predicted error of a plan by the hint is to that of the same plan by casts as
    their measured ones are.

    Args:
        proposals: Proposals by the plan's digest.
        raced: The models that run, by the plan's digest.
        error: Measures the relative error of a model.
    """
    proposals_by_digest = dict(proposals)
    for digest, proposal in proposals.items():
        casts = replace(proposal.plan, by_hint=False).digest
        if casts == digest or not raced.keys() >= {digest, casts}:
            continue
        ratio = error(raced[digest]) / (error(raced[casts]) or math.nan)
        if math.isfinite(ratio):
            proposals_by_digest[digest] = replace(proposal, error=proposal.error * ratio**2)
    return proposals_by_digest


def hinted_proposals(
    subject: Subject, planner: Planner, analysis: Analysis
) -> tuple[dict[str, Built], list[Proposal]]:
    """What stands beside the tuned model, by name, and the plans that the hints give.

    The plans' errors are predicted; their times are infinite, as none is predicted.
    """
    hints = subject.hints(planner)
    beside: dict[str, Built] = {f"the engine's {b.format.label} hint": b for b in hints}
    original = subject.original(planner)
    if original is not None:
        beside["the model given"] = original
    return beside, [
        stated_by_hint(planner, analysis, name, plan)
        for hint in hints
        for name, plan in hint.choices
    ]


def stated_by_hint(planner: Planner, analysis: Analysis, name: str, plan: Plan) -> Proposal:
    """A plan of what a hint lowers: its error is predicted, and no time of it."""
    ids = {n.name: n.id for n in planner.graph.nodes}
    formats = {ids[node]: fmt for node, fmt in plan.formats.items()}
    error = predicted_error(analysis, formats)
    explained_plan = explained(planner, analysis, plan)
    return Proposal(name=name, plan=explained_plan, time_s=math.inf, error=error)


def coded_over_hints(subject: Subject, plan: Plan, beside: Iterable[Built]) -> list[Plan]:
    """The codes of ``plan`` over what each hint lowers, where that hint can state both."""
    if not plan.encodings:
        return []
    plan = replace(plan, by_hint=False)
    hinted = (one.plan for one in beside if isinstance(one, Hinted))
    plans = (subject.by_hint(_codes_over(plan, one)) for one in hinted)
    return [coded_plan for coded_plan in plans if coded_plan is not None]


def _codes_over(plan: Plan, hinted: Plan) -> Plan:
    """The codes of ``plan``, and in all other ops what a hint lowers by itself."""
    coded = {d.node: d for d in plan.decisions if d.format.has_scales}
    decisions = tuple(coded.get(d.node, d) for d in hinted.decisions)
    return replace(plan, decisions=decisions)
