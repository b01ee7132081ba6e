"""A bound on the size of the tuned model: which plans keep it, and what the smallest costs.

Law: a plan is chosen only if its model, as it is stored, keeps the bound. Predicted bytes only
guide the search: those of float constants in the types and encodings that a plan's ops read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from finecast.graph import Graph
from finecast.native.subject import Built
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.pricing import limited, weights_of
from finecast.planning.problem import Analysis, Proposal
from finecast.planning.proposing import propose, smallest_plan, weight_bytes
from finecast.tuning.goal import Goal, megabytes

# What a cast, and the nodes that decode a constant, take at most in a file, with long names.
_CAST_BYTES: Final = 400
_DECODED_BYTES: Final = 2000


@dataclass(slots=True, kw_only=True)
class SizeBound:
    """The bounds of a goal on the size of one model.

    Attributes:
        goal: Has the bounds.
        file_bytes: Bytes of the fp32 model's file.
        numbers: How many numbers its float constants have.
        fp32_bytes: The bytes that these take.
        uncounted_bytes: What a stored model takes beside what is counted of it.
    """

    goal: Goal
    file_bytes: float
    numbers: int
    fp32_bytes: float
    uncounted_bytes: float = field(init=False)

    def __post_init__(self) -> None:
        """Beside its constants the tuned model has what the fp32 model has."""
        self.uncounted_bytes = max(self.file_bytes - self.fp32_bytes, 0.0)

    @classmethod
    def of(cls, goal: Goal, file_bytes: float, graph: Graph) -> SizeBound | None:
        """The bounds; None if the goal has none."""
        if not goal.bounds_size:
            return None
        numbers, fp32_bytes = weights_of(graph)
        return cls(
            goal=goal,
            file_bytes=file_bytes or fp32_bytes,
            numbers=numbers,
            fp32_bytes=fp32_bytes,
        )

    @property
    def excludes_fp32(self) -> bool:
        """Whether the fp32 model exceeds a bound."""
        bits = self.goal.max_bits or math.inf
        size = math.inf if self.goal.max_size is None else self.goal.max_size
        return self.file_bytes > size or 8 * self.fp32_bytes > bits * self.numbers

    @property
    def most_bytes(self) -> float:
        """The most that weights may take."""
        bits = self.goal.max_bits or math.inf
        size = math.inf if self.goal.max_size is None else self.goal.max_size
        return min(size - self.uncounted_bytes, bits * self.numbers / 8)

    def limited(self, planner: Planner, analysis: Analysis) -> Analysis:
        """``analysis`` of plans that are predicted to keep the bounds."""
        counts_nodes = self.goal.max_size is not None
        return limited(planner, analysis, self.most_bytes, nodes=counts_nodes)

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
        """Whether a model, as it is stored, keeps the bounds."""
        goal, size = self.goal, built.size_bytes
        if goal.max_size is not None and size > goal.max_size:
            return False
        decoded = sum(len(one.encodings.constants) for one in built.plan.decisions)
        nodes = _CAST_BYTES * built.casts + _DECODED_BYTES * decoded
        rest = max(self.file_bytes - self.fp32_bytes, 0.0) + nodes
        return size - rest <= (goal.max_bits or math.inf) * self.numbers / 8

    def learn(self, planner: Planner, analysis: Analysis, built: Built) -> bool:
        """Take what the size of a stored model tells; whether it exceeds what was counted."""
        if self.goal.max_size is None:
            return False
        counted = weight_bytes(planner, analysis, built.plan)
        rest = built.size_bytes - counted
        more = rest > self.uncounted_bytes and counted <= self.most_bytes
        self.uncounted_bytes = (
            max(rest, self.uncounted_bytes) if more else self.uncounted_bytes
        )
        return more

    def smallest(self, planner: Planner, analysis: Analysis) -> tuple[Proposal, str] | None:
        """The smallest plan, and what it takes as text; None if it keeps the bounds."""
        plan, size = smallest_plan(planner, analysis)
        if size <= self.most_bytes:
            return None
        whole = megabytes(size + self.uncounted_bytes)
        return plan, f"{whole}, {8 * size / max(self.numbers, 1):.3g} bits a weight"
