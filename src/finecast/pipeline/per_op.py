"""Per-op plans beside the ladder: casts in the model itself, for ``--auto-cast none``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from finecast.devices.emulation import Emulation
from finecast.devices.neuron import CompilerChoice
from finecast.pipeline.device import search_plans
from finecast.pipeline.ladder import CASTABLE, LadderOutcome, LadderWalk
from finecast.pipeline.search import Candidate, chain, fastest_passing
from finecast.planning.plan import Plan
from finecast.rules.policy import Policy, Scope

# A per-op plan has to be faster than the best rung by this factor: the roofline tells no
# smaller difference.
_WORTHWHILE: Final = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """A per-op plan that passes on all data: metric, errors by output, modelled time."""

    plan: Plan
    metric: float
    errors: Mapping[str, float]
    time_s: float

    @property
    def error(self) -> float:
        """Relative error of the worst output."""
        return max(self.errors.values(), default=0.0)


def search_per_op(
    walk: LadderWalk, outcome: LadderOutcome, named: CompilerChoice | None = None
) -> tuple[PlanResult | None, str]:
    """The fastest passing per-op plan that beats the best rung, and a text on the result.

    Args:
        walk: The ladder.
        outcome: Its rungs.
        named: The formats that the user names, which may be those of no rung.
    """
    best = outcome.best
    if named is None and best is not None and best.time_s <= outcome.fastest_s:
        return None, "the fastest rung passes: no choice by op can be faster"
    limit = best.time_s if best is not None else math.inf
    found = [r for e, p in _bases(outcome, named) if (r := _fastest(walk, e, p, limit))]
    if found:
        return min(found, key=lambda r: r.time_s), "faster than the best passing rung"
    return None, "no plan by op that was tried passes and is faster than the best passing rung"


def _bases(
    outcome: LadderOutcome, named: CompilerChoice | None
) -> list[tuple[Emulation, Policy]]:
    """Emulations and policies to search: those named, else each castable format of a rung."""
    if named is not None and named.emulation is not None:
        return [(named.emulation, named.policy)]
    chosen: dict[str, Emulation] = {}
    for result in outcome.rungs:
        emulation = result.rung.options.emulation()
        if emulation.format in CASTABLE and emulation.scope is not Scope.NONE:
            chosen.setdefault(emulation.format.label, emulation)
    return [(e, Policy(scope=Scope.AUTO, formats=(e.format,))) for e in chosen.values()]


def _fastest(
    walk: LadderWalk, emulation: Emulation, policy: Policy, limit: float
) -> PlanResult | None:
    search = search_plans(walk.device, emulation, policy)
    results: dict[str, PlanResult] = {}

    def passes(candidate: Candidate) -> bool:
        metric, errors = search.evaluate(candidate.plan)
        results[candidate.plan.digest] = PlanResult(
            plan=candidate.plan, metric=metric, errors=errors, time_s=candidate.latency_s
        )
        return walk.criterion.passes(metric, walk.baseline)

    worthwhile = [c for c in search.candidates() if c.latency_s * _WORTHWHILE < limit]
    best = fastest_passing(chain(worthwhile, limit), passes)
    return None if best is None else results[best.plan.digest]
