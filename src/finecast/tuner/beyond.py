"""Past the ladder: a plan by op, stated by casts in the model, for ``--auto-cast none``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from finecast.emulation import Emulation
from finecast.engines.emulator import EmulatorEngine, setting_of_plan
from finecast.facts import ValueFacts
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import Prepared
from finecast.frontends.onnx.emulation import Setting
from finecast.patterns import activation_kernels, bias_kernels, merged, norm_kernels
from finecast.plan import Plan
from finecast.policy import Policy, Scope
from finecast.tuner.analysis import Proposal, make_planner, probe_sensitivity, propose
from finecast.tuner.ladder import STATED, LadderOutcome, LadderWalk
from finecast.tuner.modelled import modelled_time_s
from finecast.units import make_units, rounding_points

# A per-op plan has to beat the rung by more than the roofline's own coarseness.
_WORTHWHILE = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """A per-op plan that passes on all data, with its modelled time."""

    plan: Plan
    metric: float
    error: float
    time_s: float


def beyond(walk: LadderWalk, outcome: LadderOutcome) -> tuple[PlanResult | None, str]:
    """The fastest passing per-op plan that beats the best rung, and what was found."""
    if outcome.best is not None and outcome.best.time_s <= outcome.fastest_s:
        return None, "the fastest rung passes: no choice by op can be faster"
    limit = outcome.best.time_s if outcome.best is not None else None
    found: list[PlanResult] = []
    for emulation in _bases(outcome):
        best = _fastest(walk, emulation, limit)
        if best is not None:
            found.append(best)
    if found:
        one = min(found, key=lambda r: r.time_s)
        return one, "faster than the best passing rung"
    return None, "no plan by op passes and is faster than the best passing rung"


def _bases(outcome: LadderOutcome) -> list[Emulation]:
    """One emulation for each format that a cast in the model can state."""
    chosen: dict[str, Emulation] = {}
    for result in outcome.rungs:
        emulation = result.rung.options.emulation()
        if emulation.format in STATED and emulation.scope is not Scope.NONE:
            chosen.setdefault(emulation.format.label, emulation)
    return list(chosen.values())


def _fastest(walk: LadderWalk, emulation: Emulation, limit: float | None) -> PlanResult | None:
    propositions, setting = _proposals(walk, emulation)
    cost = walk.cost(emulation)
    passing: PlanResult | None = None
    timed = [
        (modelled_time_s(walk.prepared.graph, cost, emulation, setting(p)), p)
        for p in propositions
    ]
    for time_s, proposal in sorted(timed, key=lambda t: t[0]):
        if limit is not None and time_s * _WORTHWHILE >= limit:
            break
        metric, error = walk.evaluate(emulation, setting(proposal))
        if walk.criterion.passes(metric, walk.baseline):
            passing = PlanResult(plan=proposal.plan, metric=metric, error=error, time_s=time_s)
            break
    return passing


def _proposals(
    walk: LadderWalk, emulation: Emulation
) -> tuple[list[Proposal], Callable[[Proposal], Setting]]:
    policy = Policy(scope=Scope.AUTO, format=emulation.format)
    engine = EmulatorEngine(emulation=replace(emulation, scope=Scope.NONE))
    prepared = frontend.prepare(walk.file, policy)
    facts = _by_name(walk, prepared)
    planner = make_planner(prepared, policy, engine, facts=facts, measured=True)
    graph = planner.graph
    kernels = merged(bias_kernels(graph) + activation_kernels(graph) + norm_kernels(graph))
    units = make_units(graph, planner.permissions, emulation.format, kernels)
    points = rounding_points(graph, units, kernels)
    sensitivity = probe_sensitivity(planner, points, walk.feeds, walk.progress)
    cost = replace(walk.cost(emulation), shapes={i: f.shape for i, f in facts.items()})
    found = propose(planner, units, points, cost, sensitivity)
    ids = {n.name: n.id for n in walk.prepared.graph.nodes}

    def setting(proposal: Proposal) -> Setting:
        formats = {ids[n]: f for n, f in proposal.plan.formats.items() if n in ids}
        return setting_of_plan(formats, emulation)

    return found, setting


def _by_name(walk: LadderWalk, prepared: Prepared) -> dict[int, ValueFacts]:
    """Facts of the emulated model's values, by the ids of the planner's."""
    values = walk.prepared.graph.values
    names = {v.name: v.id for v in prepared.graph.values}
    return {names[values[i].name]: f for i, f in walk.facts.items() if values[i].name in names}
