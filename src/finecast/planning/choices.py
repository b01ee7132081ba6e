"""The formats of a graph's units along the frontier of predicted time and error.

Of two formats every choice is exact, by one minimum cut; of more, by expansion moves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.planning.problem import Analysis, Priced, build_problem
from finecast.planning.units import Units
from finecast.rules import Permission
from finecast.solver.expansion import envelope
from finecast.solver.frontier import frontier
from finecast.solver.labelling import two_sided


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A format for each unit, what it is predicted to take, and its squared output error.

    ``casts`` counts the casts that take time; ``how`` it was found, in words, and the
    ``index`` of its step of the frontier, if it is one or lies before one. What it takes,
    ``time_s``, is seconds, or what else the plans are ``priced`` by.
    """

    how: str
    index: int | None
    formats: tuple[Format, ...]
    time_s: float
    error: float
    casts: int
    priced: Priced = Priced.TIME

    @property
    def lowers(self) -> bool:
        """Whether any unit has a low format."""
        return any(f is not Format.FP32 for f in self.formats)

    @property
    def because(self) -> str:
        """The reason that the plan made of it states."""
        step = "" if self.index is None else f", step {self.index} of the frontier"
        text = f"{self.how}{step}: predicted {self.priced.say(self.time_s)}"
        if self.priced is Priced.TIME:
            text += f" with {self.casts} casts"
        if self.error > 0:
            text += f", relative output error {math.sqrt(self.error):.3g}"
        return text

    def proposal(self, plan: Plan) -> Proposal:
        """``plan``, made of this choice, with what the choice predicts."""
        name = f"step {self.index}"
        return Proposal(name=name, plan=plan, time_s=self.time_s, error=self.error)

    def by_node(self, units: Units) -> dict[int, Format]:
        """The format of each node that is decided."""
        return {n: self.formats[u] for n, u in units.of.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan worth trying, its predicted cost and squared relative output error."""

    name: str
    plan: Plan
    time_s: float
    error: float


def choices(
    graph: Graph,
    permissions: Mapping[int, Permission],
    analysis: Analysis,
    *,
    most: int | None = None,
    errors: tuple[float, float] = (0.0, math.inf),
) -> tuple[Choice, ...]:
    """At most ``most`` choices, from the most accurate to the fastest.

    Laws: time falls and error grows strictly. Of one low format each choice costs the least
    at its price of error.

    Args:
        graph: The graph.
        permissions: What the rules left.
        analysis: What the choice rests on.
        most: How many; None for all of them.
        errors: Squared errors about which choices are wanted: others may be left out. Each
            choice among more than two formats takes several cuts.

    Raises:
        RuleConflictError: If a unit may have no format.
    """
    formats, adds_up = (*analysis.times,), analysis.saturation
    problem = build_problem(graph, permissions, analysis)
    if problem.labels == 2:
        return tuple(
            Choice(
                how="minimum cut",
                index=step.index,
                formats=tuple(formats[int(low)] for low in step.low),
                time_s=step.time_s,
                error=adds_up.together(step.error),
                casts=step.casts,
                priced=analysis.priced,
            )
            for step in frontier(two_sided(problem), max_steps=most)
        )
    apart, (low, high) = adds_up.apart, errors
    return tuple(
        Choice(
            how="expansion moves",
            index=index,
            formats=tuple(formats[label] for label in found.label),
            time_s=found.time_s,
            error=adds_up.together(found.error),
            casts=found.casts,
            priced=analysis.priced,
        )
        for index, found in enumerate(
            envelope(problem, max_steps=most or _MANY, errors=(apart(low), apart(high)))
        )
    )


# Where all choices are asked for: of more than two formats each takes several cuts, and there
# may be any number of them.
_MANY = 64
