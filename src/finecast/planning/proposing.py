"""Plans worth trying: the frontier of predicted time and error, and the lowest plans."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from finecast.numbers.formats import Format
from finecast.planning.alternatives import explained
from finecast.planning.assign import chosen
from finecast.planning.choices import Choice, Proposal, choices
from finecast.planning.filling import within
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, build_problem

# Steps of the frontier that become candidates: each costs a conversion and a few timed runs.
MAX_STEPS: Final = 10

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
    """At most ``most`` choices, the most accurate first, with errors in about this range."""
    return choices(planner.graph, planner.permissions, analysis, most=most, errors=errors)


def proposal(planner: Planner, analysis: Analysis, choice: Choice, name: str = "") -> Proposal:
    """The plan of one choice, with its reasons; named after its step by default."""
    formats = chosen(planner.permissions, analysis.units, choice)
    plan = planner.plan(formats, "")
    return Proposal(
        name=name or f"step {choice.index}",
        plan=explained(planner, analysis, plan, choice.problem),
        time_s=choice.time_s,
        error=choice.error,
    )


def propose(
    planner: Planner, analysis: Analysis, *, max_steps: int = MAX_STEPS
) -> list[Proposal]:
    """Plans along the frontier of predicted time and error, fastest last."""
    found = frontier_of(planner, analysis, most=max_steps)
    return [proposal(planner, analysis, choice) for choice in found]


def between(
    planner: Planner, analysis: Analysis, errors: tuple[float, float], *, most: int
) -> list[Proposal]:
    """At most ``most`` plans of the frontier with squared errors strictly in a range."""
    low, high = errors
    found = frontier_of(planner, analysis, errors=errors)
    steps = [c for c in found if c.lowers and low < c.error < high]
    places = sorted({round(i) for i in np.linspace(0, len(steps) - 1, min(most, len(steps)))})
    return [proposal(planner, analysis, steps[i]) for i in places]


def near(planner: Planner, analysis: Analysis, error: float) -> list[Proposal]:
    """Plans between steps of the frontier, with this squared error or somewhat less."""
    about = (min(_SHARES) ** 2 * error, error)
    steps = [
        c for c in frontier_of(planner, analysis, errors=about) if math.isfinite(c.time_s)
    ]
    found: dict[tuple[Format, ...], Proposal] = {}
    for share in _SHARES:
        graph, permissions = planner.graph, planner.permissions
        choice = within(graph, permissions, analysis, steps, share**2 * error)
        if choice is not None and choice.lowers and choice.formats not in found:
            name = f"between steps, error {math.sqrt(choice.error):.3g}"
            found[choice.formats] = proposal(planner, analysis, choice, name)
    return list(found.values())


def lowest(planner: Planner, analysis: Analysis) -> list[Proposal]:
    """The plans in which every op that may be low is, whatever costs are predicted.

    One uses all of the policy's formats, in their order of preference; the others one format
    each. The frontier may lack them, because it relies on predicted costs of casts.
    """
    problem = build_problem(planner.graph, planner.permissions, analysis)
    found: list[Proposal] = []
    for formats in dict.fromkeys((planner.policy.formats, *((f,) for f in analysis.rounded))):
        plan = explained(planner, analysis, planner.lowest(*formats), problem)
        used = set(plan.formats.values())
        added = sum(r.total for fmt, r in analysis.rounded.items() if fmt in used)
        error = analysis.saturation.together(added)
        name = "lowest"
        if len(analysis.rounded) > 1:
            name += f" in {', '.join(f.label for f in formats)}"
        found.append(Proposal(name=name, plan=plan, time_s=analysis.lowest_s, error=error))
    return found
