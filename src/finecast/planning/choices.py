"""The formats of a graph's units along the frontier of predicted time and error.

Among two formats each choice is optimal, found by one minimum cut; among more formats
expansion moves approximate it, and an integer program solves small ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.planning.problem import Analysis, build_problem
from finecast.planning.units import Units
from finecast.rules import Permission
from finecast.solver.assignment import Bools, Ints
from finecast.solver.expansion import envelope
from finecast.solver.frontier import Step, frontier
from finecast.solver.labelling import Labelling, LabelProblem, two_sided


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A format for each unit, with the predicted cost and squared relative output error.

    Attributes:
        formats: The format of each unit.
        time_s: Predicted seconds, or bytes where plans are priced in bytes.
        error: Predicted squared relative output error.
        index: Its step of the frontier; None for none.
        problem: The problem that it solves; None if that was not built.
    """

    formats: tuple[Format, ...]
    time_s: float
    error: float
    index: int | None = None
    problem: LabelProblem | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        found: Labelling | Step,
        problem: LabelProblem,
        label: Ints | Bools,
        analysis: Analysis,
        *,
        index: int | None = None,
    ) -> Choice:
        """What the solver ``found``; ``label`` numbers the formats of ``analysis``."""
        formats = (*analysis.times,)
        return cls(
            formats=tuple(formats[int(number)] for number in label),
            time_s=found.time_s,
            error=analysis.saturation.together(found.error),
            index=index,
            problem=problem,
        )

    @property
    def lowers(self) -> bool:
        """Whether any unit has a low format."""
        return any(f is not Format.FP32 for f in self.formats)

    def by_node(self, units: Units) -> dict[int, Format]:
        """Format by id of the nodes that belong to a unit."""
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

    Laws: time falls and error grows strictly. With a single low format each choice has the
    least cost at its price of error.

    Args:
        graph: The graph.
        permissions: What the rules left.
        analysis: Times, casts and errors.
        most: The largest number of choices; None for all.
        errors: Range of squared errors of interest: choices outside may be left out, which
            saves cuts where there are more than two formats.

    Raises:
        RuleConflictError: If a unit may have no format.
    """
    problem = build_problem(graph, permissions, analysis)
    if problem.labels == 2:
        return tuple(
            Choice.of(step, problem, step.low, analysis, index=step.index)
            for step in frontier(two_sided(problem), max_steps=most)
        )
    low, high = (analysis.saturation.apart(error) for error in errors)
    steps = envelope(problem, max_steps=most or _MANY, errors=(low, high))
    return tuple(
        Choice.of(step, problem, step.label, analysis, index=index)
        for index, step in enumerate(steps)
    )


# The limit where all choices are asked for and there are more than two formats: each choice
# then takes several cuts, and their number is not bounded.
_MANY = 64
