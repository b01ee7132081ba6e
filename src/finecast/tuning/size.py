"""A bound on the size of the tuned model: which plans keep it, and what the smallest costs.

Law: a plan is chosen only if its model, as it is stored, keeps the bound. Predicted bytes only
guide the search: those of float constants in the types and encodings that a plan's ops read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from finecast.graph import Graph
from finecast.native.subject import Built
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.pricing import limited, weights_of
from finecast.planning.problem import Analysis, Proposal
from finecast.planning.proposing import propose, smallest_plan, weight_bytes
from finecast.tuning.goal import Goal, megabytes


@dataclass(slots=True, kw_only=True)
class SizeBound:
    """The bound of a goal on the size of one model.

    Attributes:
        max_size: The bound.
        file_bytes: Bytes of the fp32 model's file.
        numbers: How many numbers its float constants have.
        fp32_bytes: The bytes that these take.
        uncounted_bytes: What a stored model takes beside what is counted of it.
    """

    max_size: int
    file_bytes: float
    numbers: int
    fp32_bytes: float
    uncounted_bytes: float = field(init=False)

    def __post_init__(self) -> None:
        """Beside its constants the tuned model has what the fp32 model has."""
        self.uncounted_bytes = max(self.file_bytes - self.fp32_bytes, 0.0)

    @classmethod
    def of(cls, goal: Goal, file_bytes: float, graph: Graph) -> SizeBound | None:
        """The bound; None if the goal has none."""
        if goal.max_size is None:
            return None
        numbers, fp32_bytes = weights_of(graph)
        return cls(
            max_size=goal.max_size,
            file_bytes=file_bytes or fp32_bytes,
            numbers=numbers,
            fp32_bytes=fp32_bytes,
        )

    @property
    def excludes_fp32(self) -> bool:
        """Whether the fp32 model exceeds the bound."""
        return self.file_bytes > self.max_size

    @property
    def most_bytes(self) -> float:
        """The most that weights may take."""
        return self.max_size - self.uncounted_bytes

    def limited(self, planner: Planner, analysis: Analysis) -> Analysis:
        """``analysis`` of plans that are predicted to keep the bound."""
        return limited(planner, analysis, self.most_bytes)

    def fitted(
        self,
        planner: Planner,
        analysis: Analysis,
        build: Callable[[Plan], Built],
        max_steps: int,
    ) -> Analysis:
        """``limited``, by what models of the frontier take beside their weights, too."""
        while True:
            bounded = self.limited(planner, analysis)
            plans = [p.plan for p in propose(planner, bounded, max_steps=max_steps)]
            models = [build(plan) for plan in plans if plan.lowers]
            learned = {self.learn(planner, bounded, built) for built in models}
            if True not in learned:
                return bounded

    def keeps(self, built: Built) -> bool:
        """Whether a model, as it is stored, keeps the bound."""
        return built.size_bytes <= self.max_size

    def learn(self, planner: Planner, analysis: Analysis, built: Built) -> bool:
        """Take what the size of a stored model tells; whether it exceeds what was counted."""
        counted = weight_bytes(planner, analysis, built.plan)
        rest = built.size_bytes - counted
        more = rest > self.uncounted_bytes and counted <= self.most_bytes
        if more:
            self.uncounted_bytes = rest
        return more

    def smallest(self, planner: Planner, analysis: Analysis) -> tuple[Proposal, str] | None:
        """The smallest plan, and what it takes as text; None if it keeps the bound."""
        plan, size = smallest_plan(planner, analysis)
        if size <= self.most_bytes:
            return None
        whole = megabytes(size + self.uncounted_bytes)
        return plan, f"{whole}, {8 * size / max(self.numbers, 1):.3g} bits a weight"
