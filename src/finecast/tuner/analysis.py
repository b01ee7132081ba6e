"""What is known before a plan is tried: permissions, costs, sensitivities, frontier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast import rules
from finecast.assign import highest, lowest, make_plan, pick
from finecast.cost import CostModel, MeasuredCost
from finecast.engines import EMULATOR
from finecast.engines.base import Engine, Feeds, KernelTime
from finecast.engines.kernels import kernel_query
from finecast.engines.loading import load_model
from finecast.facts import ValueFacts
from finecast.formats import Format
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import Prepared
from finecast.frontier import Step, frontier
from finecast.graph import Graph, Value
from finecast.measure.casting import measure_casts
from finecast.measure.observe import switched_probe
from finecast.plan import Plan
from finecast.policy import Policy
from finecast.problem import UnitTimes, build_problem
from finecast.progress import Progress
from finecast.rules import Context, Permission
from finecast.sensitivity import Sensitivity, measure
from finecast.units import RoundingPoints, Units, make_units, rounding_points

# Steps of the frontier that become candidates: each costs a conversion and a few timed runs.
MAX_STEPS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """Kernels of the fp32 model and of the lowest plan, by one engine on the same feeds."""

    high: Sequence[KernelTime]
    low: Sequence[KernelTime]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan worth trying, with what the models of cost and error predict for it."""

    name: str
    plan: Plan
    time_s: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Makes plans of one prepared model under one policy."""

    prepared: Prepared
    policy: Policy
    engine: Engine
    permissions: Mapping[int, Permission]

    @property
    def graph(self) -> Graph:
        """The model's graph."""
        return self.prepared.graph

    def plan(
        self,
        formats: Mapping[int, Format],
        because: str,
        evidence: Mapping[int, Mapping[str, float | str]] | None = None,
    ) -> Plan:
        """The plan that gives node i ``formats[i]``."""
        return make_plan(
            self.graph,
            formats,
            self.permissions,
            self.policy,
            opset=frontend.minimal_opset(self.prepared, formats),
            engine=self.engine.name,
            because=because,
            evidence=evidence,
        )

    def lowest(self) -> Plan:
        """Everything that may be low is."""
        formats = lowest(self.permissions, self.policy.format)
        return self.plan(formats, "every op that may be low is")

    def highest(self) -> Plan:
        """Everything that may stay fp32 does."""
        return self.plan(highest(self.permissions, self.policy.format), "fp32 where permitted")

    def unchanged(self, why: str) -> Plan:
        """Every op keeps the type it has."""
        nodes = self.graph.float_nodes
        return self.plan({n.id: n.format for n in nodes if n.format is not None}, why)

    def of_units(
        self,
        units: Units,
        low: NDArray[np.bool_],
        because: str,
        evidence: Mapping[int, Mapping[str, float | str]],
    ) -> Plan:
        """Units marked ``low`` are low."""
        side = {n: bool(low[u]) for n, u in units.of.items()}
        formats = {
            i: pick(p, self.policy.format, lowered=side.get(i, False))
            for i, p in self.permissions.items()
        }
        return self.plan(formats, because, evidence)


def make_planner(
    prepared: Prepared,
    policy: Policy,
    engine: Engine,
    *,
    facts: Mapping[int, ValueFacts] | None = None,
    user_rules: tuple[tuple[str, rules.UserRule], ...] = (),
    measured: bool = False,
) -> Planner:
    """Let the rules judge every op."""
    name = f"{EMULATOR}:{engine.device}" if engine.name == EMULATOR else engine.name
    context = Context(
        graph=prepared.graph,
        policy=policy,
        facts=facts or {},
        kernels=kernel_query(engine),
        engine=name,
        user_rules=user_rules,
        measured=measured,
        casts_around=frontend.can_cast(prepared, policy.format),
    )
    return Planner(
        prepared=prepared, policy=policy, engine=engine, permissions=rules.permit(context)
    )


def profile_ends(planner: Planner, feeds: Feeds) -> Profiles:
    """Profile the fp32 model and the lowest plan, once each."""
    file = planner.prepared.file
    kernels: list[list[KernelTime]] = []
    for plan in (planner.highest(), planner.lowest()):
        applied = frontend.apply(file, plan)
        session = load_model(planner.engine, applied.model, profiling=True)
        kernels.append(session.profile(feeds))
    return Profiles(high=kernels[0], low=kernels[1])


def measured_cost(
    graph: Graph,
    profiles: Profiles,
    low: Format,
    engine: Engine,
    facts: Mapping[int, ValueFacts],
) -> MeasuredCost:
    """Times by node: a kernel's time is shared evenly by the ops in it."""
    known = {n.name for n in graph.nodes}
    times: dict[Format, dict[str, float]] = {Format.FP32: {}, low: {}}
    for fmt, kernels in ((Format.FP32, profiles.high), (low, profiles.low)):
        for kernel in kernels:
            inside = [name for name in kernel.ops if name in known]
            for name in inside:
                times[fmt][name] = times[fmt].get(name, 0.0) + kernel.time_s / len(inside)
    rate = measure_casts(engine, low)
    return MeasuredCost(
        times_s=times,
        shapes={i: f.shape for i, f in facts.items()},
        cast_overhead_s=rate.overhead_s,
        cast_bandwidth_gb_s=rate.bandwidth_gb_s,
    )


def kernel_nodes(graph: Graph, kernels: Sequence[KernelTime]) -> list[frozenset[int]]:
    """Node ids of each kernel."""
    ids = {n.name: n.id for n in graph.nodes}
    return [frozenset(ids[name] for name in k.ops if name in ids) for k in kernels]


def propose(
    planner: Planner,
    units: Units,
    points: RoundingPoints,
    cost: CostModel,
    sensitivity: Sensitivity,
    *,
    max_steps: int = MAX_STEPS,
) -> list[Proposal]:
    """Plans along the frontier of predicted time and error, fastest last."""
    graph, low = planner.graph, planner.policy.format
    times = _unit_times(graph, units, cost, low)
    problem = build_problem(
        graph,
        units,
        points,
        planner.permissions,
        times,
        lambda value: _cast_cost(cost, value, low),
        sensitivity,
        io=frontend.resolve_io(graph, planner.highest().io),
    )
    evidence = _evidence(units, points, times, sensitivity, low)
    return [
        _proposal(planner, units, step, evidence)
        for step in frontier(problem, max_steps=max_steps)
    ]


def _proposal(
    planner: Planner,
    units: Units,
    step: Step,
    evidence: Mapping[int, Mapping[str, float | str]],
) -> Proposal:
    because = (
        f"minimum cut, step {step.index} of the frontier: predicted"
        f" {1e3 * step.time_s:.4g} ms with {step.casts} casts"
    )
    if step.error > 0:
        because += f", relative output error {np.sqrt(step.error):.3g}"
    return Proposal(
        name=f"step {step.index}",
        plan=planner.of_units(units, step.low, because, evidence),
        time_s=step.time_s,
        error=step.error,
    )


def _evidence(
    units: Units,
    points: RoundingPoints,
    times: UnitTimes,
    sensitivity: Sensitivity,
    low: Format,
) -> dict[int, dict[str, float | str]]:
    """What the choice of each op is based on: its unit's times and its weights' error."""
    weights = dict(zip(points.weight_units, sensitivity.weights.tolist(), strict=True))
    found: dict[int, dict[str, float | str]] = {}
    for node, unit in units.of.items():
        found[node] = {
            "ops in one kernel": float(len(units.members[unit])),
            "fp32 us": 1e6 * float(times.high_s[unit]),
            f"{low.label} us": 1e6 * float(times.low_s[unit]),
            "error of weights": float(np.sqrt(weights.get(unit, 0.0))),
        }
    return found


def _unit_times(graph: Graph, units: Units, cost: CostModel, low: Format) -> UnitTimes:
    def total(nodes: tuple[int, ...], fmt: Format) -> float:
        return sum(cost.node_time_s(graph, graph.nodes[i], fmt) for i in nodes)

    return UnitTimes(
        high_s=np.array([total(nodes, Format.FP32) for nodes in units.members]),
        low_s=np.array([total(nodes, low) for nodes in units.members]),
    )


def _cast_cost(cost: CostModel, value: Value, low: Format) -> tuple[float, float]:
    return (
        cost.cast_time_s(value, Format.FP32, low),
        cost.cast_time_s(value, low, Format.FP32),
    )


def find_units(planner: Planner, profiles: Profiles) -> tuple[Units, RoundingPoints]:
    """Units by the kernels of both profiles, and the points at which plans round."""
    graph, low = planner.graph, planner.policy.format
    high_kernels = kernel_nodes(graph, profiles.high)
    low_kernels = kernel_nodes(graph, profiles.low)
    units = make_units(graph, planner.permissions, low, [*high_kernels, *low_kernels])
    return units, rounding_points(graph, units, low_kernels)


def probe_sensitivity(
    planner: Planner, points: RoundingPoints, feeds: Sequence[Feeds], progress: Progress
) -> Sensitivity:
    """Round each point alone in one switched session and compare the outputs."""
    probe = switched_probe(planner.prepared, points, planner.policy.format, feeds)
    return measure(
        points, probe, on_probe=lambda done, total: progress("sensitivity", done, total)
    )
