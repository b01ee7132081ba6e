"""A choice of formats for a graph's units, and a plan made of one, with predicted costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.planning.problem import Analysis
from finecast.planning.units import Units
from finecast.solver.assignment import Bools, Ints
from finecast.solver.frontier import Step
from finecast.solver.labelling import Labelling, LabelProblem

SAME_TIME: Final = 1.03
"""Plans whose costs are within this ratio count as equally fast, if not told otherwise."""


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
