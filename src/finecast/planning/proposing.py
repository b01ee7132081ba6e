"""Plans worth trying: the frontier of predicted time and error, and the lowest plans."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from finecast.naming import percent
from finecast.numbers.formats import Format
from finecast.planning.alternatives import explained, labels_of
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner, chosen, pick
from finecast.planning.problem import (
    Analysis,
    Choice,
    Proposal,
    predicted_error,
)
from finecast.solver.assignment import Floats, Ints
from finecast.solver.expansion import envelope, fastest_within, smallest
from finecast.solver.flips import Flips, flips
from finecast.solver.frontier import frontier
from finecast.solver.labelling import Labelling, LabelProblem, evaluate, two_sided

# Steps of the frontier that become candidates: each costs a conversion and a few timed runs.
MAX_STEPS: Final = 10
# The limit where all choices are asked for and there are more than two formats: each choice
# then takes several cuts, and their number is not bounded.
_MANY: Final = 64
# The same under a limit of size, where each choice takes cuts at several prices of bytes.
_MANY_LIMITED: Final = 16

# Shares of the error that the criterion is estimated to allow after a first miss. Predictions
# of errors, and of the metric from errors, are accurate to some ten percent.
_SHARES: Final = (1.0, 0.9, 0.8, 0.7)


def frontier_of(
    planner: Planner,
    analysis: Analysis,
    *,
    most: int | None = None,
    errors: tuple[float, float] = (0.0, math.inf),
) -> tuple[Choice, ...]:
    """At most ``most`` choices, from the most accurate to the fastest.

    Laws: time falls and error grows strictly. With a single low format each choice has the
    least cost at its price of error, and is found by one minimum cut; among more formats
    expansion moves approximate it, and an integer program solves small ones. Where no unit's
    own error is negative, the choices of a single low format are nested, and found together.
    Under a limit of stored weights all choices keep it, and prices of bytes find them; there
    are none if nothing keeps it.

    Args:
        planner: The graph, and what the rules left.
        analysis: Times, casts and errors.
        most: The largest number of choices; None for all.
        errors: Range of squared errors of interest: choices outside may be left out, which
            saves cuts where there are more than two formats.

    Raises:
        RuleConflictError: If a unit may have no format.
    """
    problem = analysis.problem(planner.graph, planner.permissions)
    if problem.labels == 2 and problem.is_monotone and problem.limit is None:
        return tuple(
            Choice.of(step, step.low, analysis, index=step.index)
            for step in frontier(two_sided(problem), max_steps=most)
        )
    fewest = _MANY if problem.limit is None else _MANY_LIMITED
    steps = envelope(problem, max_steps=most or fewest, errors=_apart(analysis, errors))
    choices = [Choice.of(step, step.label, analysis) for step in steps]
    better = accumulate((c.error for c in reversed(choices)), min, initial=math.inf)
    # Errors of several formats saturate apart, so a faster choice may err less in all.
    kept = [c for c, least in zip(reversed(choices), better, strict=False) if c.error < least]
    return tuple(replace(c, index=index) for index, c in enumerate(reversed(kept)))


def _apart(analysis: Analysis, errors: tuple[float, float]) -> tuple[float, float]:
    """Bounds of the sums of single squared errors of choices whose errors lie in a range."""
    adding = [rounded.saturation for rounded in analysis.rounded.values()]
    least, most = errors
    steepest = max([1.0, *(1 / s.least for s in adding if s.least)])
    return least / steepest, sum(s.apart(most) for s in adding)


def proposal(planner: Planner, analysis: Analysis, choice: Choice, name: str = "") -> Proposal:
    """The plan of one choice, with its reasons; by default named by its number."""
    formats = chosen(planner.permissions, analysis.units, choice)
    plan = planner.plan(formats, "")
    return Proposal(
        name=name or f"plan {choice.index}",
        plan=explained(planner, analysis, plan),
        time_s=choice.time_s,
        error=choice.error,
    )


def labelled(planner: Planner, analysis: Analysis, found: Labelling, how: str) -> Proposal:
    """The plan of a labelling of the analysis' problem, named after ``how`` and its error."""
    choice = Choice.of(found, found.label, analysis)
    return proposal(planner, analysis, choice, f"{how}, error {math.sqrt(choice.error):.3g}")


def propose(
    planner: Planner, analysis: Analysis, *, max_steps: int = MAX_STEPS
) -> list[Proposal]:
    """Plans along the frontier of predicted time and error, fastest last."""
    choices = frontier_of(planner, analysis, most=max_steps)
    return [proposal(planner, analysis, choice) for choice in choices]


def between(
    planner: Planner, analysis: Analysis, errors: tuple[float, float], *, most: int
) -> list[Proposal]:
    """At most ``most`` plans of the frontier with squared errors strictly in a range."""
    low, high = errors
    choices = frontier_of(planner, analysis, errors=errors)
    steps = [c for c in choices if c.lowers and low < c.error < high]
    places = sorted({round(i) for i in np.linspace(0, len(steps) - 1, min(most, len(steps)))})
    return [proposal(planner, analysis, steps[i]) for i in places]


def near(
    planner: Planner,
    analysis: Analysis,
    error: float,
    shares: Sequence[float] = _SHARES,
) -> list[Proposal]:
    """Plans between steps of the frontier, of these shares of an error at the most.

    ``error`` is squared; the shares are of its root.
    """
    about = (min(shares) ** 2 * error, error)
    steps = [
        c for c in frontier_of(planner, analysis, errors=about) if math.isfinite(c.time_s)
    ]
    proposals: dict[tuple[Format, ...], Proposal] = {}
    for share in shares:
        choice = within(planner, analysis, steps, share**2 * error)
        if choice is not None and choice.lowers and choice.formats not in proposals:
            name = f"plan of error {percent(math.sqrt(choice.error))}"
            proposals[choice.formats] = proposal(planner, analysis, choice, name)
    return list(proposals.values())


def near_alone(
    planner: Planner, analysis: Analysis, error: float, shares: Sequence[float]
) -> list[Proposal]:
    """As ``near``, of plans with one low format each; none where there is no other one.

    What casts between several formats take is predicted worst.
    """
    if len(analysis.rounded) < 2:
        return []
    ids = {node.name: node.id for node in planner.graph.nodes}
    proposals: list[Proposal] = []
    for fmt in analysis.rounded:
        for one in near(planner, analysis.only(fmt), error, shares):
            formats = {ids[name]: own for name, own in one.plan.formats.items()}
            name = f"{one.name}, {fmt.label} alone"
            proposals.append(stated(planner, analysis, formats, name))
    return proposals


def lowest(planner: Planner, analysis: Analysis) -> list[Proposal]:
    """The plans in which every op that may be low is, whatever costs are predicted.

    One uses all of the policy's formats that have costs, in their order of preference; the
    others one format each. The frontier may lack them, because it relies on predicted costs
    of casts. Each is named by the formats that its ops have: all of them may have the first.
    """
    problem = analysis.problem(planner.graph, planner.permissions)
    proposals: list[Proposal] = []
    costed = tuple(f for f in planner.policy.formats if f in analysis.rounded)
    for formats in dict.fromkeys((costed, *((f,) for f in analysis.rounded))):
        plan = explained(planner, analysis, planner.lowest(*formats))
        used = set(plan.formats.values())
        error = analysis.together(
            r.total if fmt in used else 0.0 for fmt, r in analysis.rounded.items()
        )
        low = sorted(plan.low_formats, key=[*formats, *Format].index)
        name = f"{', '.join(f.label for f in low or [Format.FP32])} where supported"
        time_s = evaluate(problem, labels_of(planner, analysis, problem, plan)).time_s
        proposals.append(Proposal(name=name, plan=plan, time_s=time_s, error=error))
    return proposals


def smallest_plan(planner: Planner, analysis: Analysis) -> tuple[Proposal, float]:
    """The plan whose stored weights take the fewest bytes, and these bytes."""
    problem = analysis.problem(planner.graph, planner.permissions)
    assert problem.limit is not None
    least = smallest(problem)
    size = problem.limit.size(least.label)
    return labelled(planner, analysis, least, "the smallest plan"), size


def weight_bytes(planner: Planner, analysis: Analysis, plan: Plan) -> float:
    """The bytes of a plan's stored weights, counted as the limit of ``analysis`` counts."""
    problem = analysis.problem(planner.graph, planner.permissions)
    assert problem.limit is not None
    return problem.limit.size(labels_of(planner, analysis, problem, plan))


def stated(
    planner: Planner, analysis: Analysis, formats: Mapping[int, Format], name: str
) -> Proposal:
    """The plan of these formats, by node id; an op that may not have its format is fp32."""
    plan = planner.plan(
        {
            i: pick(permission, formats.get(i, Format.FP32), Format.FP32)
            for i, permission in planner.permissions.items()
        },
        "",
    )
    at = _Stated.of(planner, analysis, plan)
    choice = Choice.of(evaluate(at.problem, at.label), at.label, analysis)
    return proposal(planner, analysis, choice, name)


def sharpened(
    planner: Planner, before: Analysis, analysis: Analysis, proposal: Proposal
) -> Proposal:
    """A proposal with error and reasons by an analysis that knows the errors of single ops.

    Law: what was measured of the plan's error, over what ``before`` predicted, stays.
    """
    plan = proposal.plan
    ids = {n.name: n.id for n in planner.graph.nodes}
    formats = {ids[name]: fmt for name, fmt in plan.formats.items()}
    was, now = (predicted_error(one, formats) for one in (before, analysis))
    error = proposal.error * (now / was) if was else now
    return replace(proposal, plan=explained(planner, analysis, plan), error=error)


def predicted_cost(planner: Planner, analysis: Analysis, plan: Plan) -> float:
    """The cost of a plan by the analysis: of its units and of its casts."""
    problem = analysis.problem(planner.graph, planner.permissions)
    return evaluate(problem, labels_of(planner, analysis, problem, plan)).time_s


# Choices between two steps of the frontier: as fast as possible within a given error.
#
# The frontier is convex, so several units may change at once from one step to the next, and
# the error that the criterion allows mostly lies between two steps.

# Units that are changed one by one: each turn prices all changes anew.
_MOST_UNITS: Final = 64
# Turns in which the sum of single errors is found that keeps an error of several formats.
_TURNS: Final = 4


def within(
    planner: Planner, analysis: Analysis, steps: Sequence[Choice], error: float
) -> Choice | None:
    """A choice of at most this squared error, faster than every step that keeps to it.

    ``steps`` are those of the frontier, the most accurate first.

    Returns:
        None if ``error`` lies outside the steps' errors, or no faster choice was found
        between the two steps around it.
    """
    pair = next(((a, b) for a, b in pairwise(steps) if a.error <= error < b.error), None)
    if pair is None:
        return None
    numbers = {f: number for number, f in enumerate(analysis.times)}
    slow, fast = (np.array([numbers[f] for f in choice.formats]) for choice in pair)
    problem = analysis.problem(planner.graph, planner.permissions)
    choice = pair[1]
    for _ in range(_TURNS):
        # Of several formats this is how the errors of the last choice add up, not of the next.
        apart = choice.saturation.apart(error)
        labelling = fastest_within(problem, apart, _descend(problem, slow, fast, apart))
        choice = Choice.of(labelling, labelling.label, analysis)
        if choice.error <= error:
            break
    return choice if choice.time_s < pair[0].time_s and choice.error <= error else None


def _descend(problem: LabelProblem, slow: Ints, fast: Ints, error: float) -> Labelling:
    """Change units from ``fast`` to ``slow``, the best trade first, until ``error`` is kept.

    Then units are changed back as long as that gains time within ``error``. ``slow`` as a
    whole keeps the error. Under a limit of size it may be that no single change leads further:
    then ``slow`` is the answer, too.
    """
    at = evaluate(problem, fast)
    differ = np.flatnonzero(slow != fast)
    price = _price(*_changes(problem, at, differ, slow))
    tried = differ[np.argsort(price, kind="stable")[:_MOST_UNITS]]
    while at.error > error:
        ahead = tried[at.label[tried] != slow[tried]]
        if not len(ahead):
            return evaluate(problem, slow)
        price = _price(*_changes(problem, at, ahead, slow))
        if problem.limit is not None and not np.isfinite(price).any():
            return evaluate(problem, slow)
        at = _with(problem, at, ahead[np.argmin(price)], slow)
    while True:
        back = tried[at.label[tried] != fast[tried]]
        more_s, more = _changes(problem, at, back, fast)
        gains = np.where(at.error + more <= error, more_s, np.inf)
        if not len(back) or gains.min() >= 0:
            return at
        at = _with(problem, at, back[np.argmin(gains)], fast)


def _changes(
    problem: LabelProblem, at: Labelling, units: Ints, label: Ints
) -> tuple[Floats, Floats]:
    """Additional seconds and squared error if one of ``units`` alone takes its ``label``.

    The seconds are infinite where that breaks the problem's limit.
    """
    changes, to = flips(problem, at.label), label[units]
    more_s = changes.total_s[units, to]
    if problem.limit is not None:
        room = problem.limit.most - problem.limit.size(at.label)
        more = flips(problem.limit.sizes, at.label).total_s[units, to]
        more_s = np.where(more <= room, more_s, np.inf)
    return more_s, changes.error[units, to]


def _with(problem: LabelProblem, at: Labelling, unit: int, label: Ints) -> Labelling:
    changed = at.label.copy()
    changed[unit] = label[unit]
    return evaluate(problem, changed)


def _price(more_s: Floats, more: Floats) -> Floats:
    """Seconds lost per squared error removed; infinite where none is removed."""
    return np.divide(more_s, -more, out=np.full(len(more), np.inf), where=more < 0)


# Plans that differ from a given plan in one unit, those nearest to their thresholds first.
#
# A unit's threshold is the price of error at which the optimal plan changes its format.
# Predicted errors are sums over units, measured on calibration data; the metric may judge
# otherwise, and then one unit more or less can decide.


_MOST: Final = 6


def lowered_by_one(planner: Planner, analysis: Analysis, plan: Plan) -> list[Proposal]:
    """Faster plans with one unit changed, those that gain most time per added error first."""
    stated = _Stated.of(planner, analysis, plan)
    gained_s, added = -stated.flips.total_s, stated.flips.error
    faster = np.argwhere(gained_s > 0)
    gains = _ratio(gained_s, added)[*faster.T]
    changes = faster[np.argsort(-gains, kind="stable")[:_MOST]]
    return stated.proposals(
        planner, analysis, changes, "with one more group in reduced precision"
    )


def raised_by_one(
    planner: Planner, analysis: Analysis, plan: Plan, *, most: int = _MOST
) -> list[Proposal]:
    """More accurate plans with one unit changed, least time lost per removed error first."""
    stated = _Stated.of(planner, analysis, plan)
    lost_s, removed = stated.flips.total_s, -stated.flips.error
    others_low = np.count_nonzero(stated.label) - (stated.label > 0)
    lowers = (others_low[:, None] > 0) | (np.arange(stated.problem.labels) > 0)
    exact = np.argwhere((removed > 0) & np.isfinite(lost_s) & lowers)
    losses = _ratio(lost_s, removed)[*exact.T]
    changes = exact[np.argsort(losses, kind="stable")[:most]]
    return stated.proposals(planner, analysis, changes, "with one more group in fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stated:
    """A plan as a labelling of the problem, and what each change of one unit makes of it."""

    problem: LabelProblem
    label: Ints
    flips: Flips

    @classmethod
    def of(cls, planner: Planner, analysis: Analysis, plan: Plan) -> _Stated:
        problem = analysis.problem(planner.graph, planner.permissions)
        label = labels_of(planner, analysis, problem, plan)
        return cls(problem=problem, label=label, flips=flips(problem, label))

    def proposals(
        self, planner: Planner, analysis: Analysis, found: Ints, how: str
    ) -> list[Proposal]:
        made: list[Proposal] = []
        for unit, label in found:
            changed = self.label.copy()
            changed[unit] = label
            found_here = evaluate(self.problem, changed)
            made.append(labelled(planner, analysis, found_here, how))
        return made


def _ratio(time_s: Floats, error: Floats) -> Floats:
    """Seconds per squared error; infinite where the error is not positive."""
    return np.divide(time_s, error, out=np.full(error.shape, np.inf), where=error > 0)
