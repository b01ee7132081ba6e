"""Searches that the lab judges: functions of a simulation that give what they chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from benchmarks.lab.simulation import Simulation
from benchmarks.lab.subject import SimulatedSubject, SimulatedWorkload
from finecast.planning.plan import Plan
from finecast.rules.policy import Policy
from finecast.tuning.goal import Goal
from finecast.tuning.result import Verdict
from finecast.tuning.tune import Place, tune


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What a search chose.

    Attributes:
        plan: The plan; None for fp32.
        evaluations: Evaluations on all data, those of fp32 and of the hint among them.
        speedup: What it says the plan's speed over fp32 is.
        loss: What it expects to be lost on new data, over what may be lost; None if it says
            nothing of that.
    """

    plan: Plan | None
    evaluations: int
    speedup: float = 1.0
    loss: float | None = None


Search: TypeAlias = Callable[[Simulation], Chosen]


def by_tune(simulation: Simulation) -> Chosen:
    """Today's ``tune``, without a budget."""
    start_s = simulation.clock.now_s
    simulation.start()
    place = Place(
        subject=SimulatedSubject.of(simulation),
        workload=SimulatedWorkload(simulation=simulation),
    )
    result = tune(
        place,
        Goal(criterion=simulation.net.criterion, start_s=start_s),
        Policy(formats=simulation.net.formats[1:]),
    )
    improved = result.verdict is Verdict.IMPROVED
    return Chosen(
        plan=result.plan if improved else None,
        evaluations=result.evaluations,
        speedup=result.speedup if improved else 1.0,
    )


SEARCHES: Final[Mapping[str, Search]] = {"tune": by_tune}
"""By name. A search that is to replace ``tune`` gets its row here."""
