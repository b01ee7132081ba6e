"""Models that engines run, for the emulation of a device that is not here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Self, TypeVar

from finecast.devices.emulation import Emulation, Setting
from finecast.engines.base import Feeds
from finecast.engines.emulator import EmulatorEngine
from finecast.engines.emulator.native_session import (
    NativeEmulatorSession,
    check_emulation,
    plan_session,
)
from finecast.frontends.prepared import PreparedAsIs, PreparedModel
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.ops.patterns import activation_kernels, bias_kernels, merged, norm_kernels
from finecast.pipeline.device import PlanRequest, Program
from finecast.pipeline.subject import Examined
from finecast.planning.cost import RooflineCost
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis
from finecast.planning.units import make_units
from finecast.rules.facts import ValueFacts, facts_in
from finecast.rules.policy import Scope
from finecast.subjects.engine.native import AS_IT_IS, Source
from finecast.subjects.engine.observing import observe
from finecast.subjects.engine.planning import Judging, make_planner
from finecast.subjects.engine.roundings import (
    analysis_of,
    points_of,
    probe_sensitivity,
    switched_probe,
)

SourceT = TypeVar("SourceT", bound=Source)
PreparedT = TypeVar("PreparedT", bound=PreparedModel)
AsIsT = TypeVar("AsIsT", bound=PreparedAsIs)


@dataclass(slots=True, kw_only=True)
class EngineProgram(Program, Generic[SourceT, PreparedT]):
    """A ``Program`` of a model that engines run; ``prepared`` is what is emulated."""

    source: SourceT
    emulation: Emulation
    prepared: PreparedT = field(init=False)

    @property
    def graph(self) -> Graph:
        """The graph that is emulated."""
        return self.prepared.graph

    def observe(self, feeds: Sequence[Feeds]) -> dict[int, ValueFacts]:
        """Facts of all float values outside of bodies."""
        return observe(self.prepared, lambda: feeds)

    def casts(self, plan: Plan) -> int:
        """Number of casts in the plan's model."""
        return self.source.build(plan).casts


@dataclass(slots=True, kw_only=True)
class NativeProgram(EngineProgram[SourceT, AsIsT]):
    """A ``Program`` of a model that is emulated as it is."""

    def __post_init__(self) -> None:
        """Read the graph.

        Raises:
            UsageError: If ``emulation`` has options that are not emulated here.
        """
        self.prepared = self.source.prepare(AS_IT_IS)
        check_emulation(self.emulation, self.prepared.library)

    def session(
        self, emulation: Emulation, setting: Setting, *, switched: bool = False
    ) -> NativeEmulatorSession:
        """A session for the setting; it is built anew where another one is applied."""
        del switched
        copy = self.prepared.roundable
        return NativeEmulatorSession(copy=copy, emulation=emulation, setting=setting)

    def formats(self, plan: Plan) -> dict[int, Format]:
        """The plan's formats by node id."""
        ids = {n.name: n.id for n in self.graph.nodes}
        return {ids[name]: fmt for name, fmt in plan.formats.items()}

    def plan_session(self, plan: Plan, emulation: Emulation) -> NativeEmulatorSession:
        """A session of the model with the plan's casts."""
        copy = partial(self.source.roundable, plan.policy, plan.adjustments)
        return plan_session(copy, plan, emulation)

    def examine(self, request: PlanRequest) -> OnDevice:
        """Let the rules judge the model that the device's compiler is given."""
        prepared = self.source.prepare(request.policy)
        facts = facts_in(prepared.graph, request.facts, self.graph)
        return OnDevice.of(prepared, request, facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevice(Examined):
    """A model whose every op the rules have judged for a device."""

    planner: Planner
    prepared: PreparedModel
    facts: Mapping[int, ValueFacts]
    request: PlanRequest

    @classmethod
    def of(
        cls, prepared: PreparedModel, request: PlanRequest, facts: Mapping[int, ValueFacts]
    ) -> Self:
        """Let the rules judge the model that the device's compiler is given."""
        engine = EmulatorEngine(emulation=replace(request.emulation, scope=Scope.NONE))
        how = Judging(facts=facts, user_rules=request.user_rules, measured=request.measured)
        planner = make_planner(prepared, request.policy, engine, how)
        return cls(planner=planner, prepared=prepared, facts=facts, request=request)

    def analysis(self) -> Analysis:
        """Times by the roofline, errors by probing each rounding."""
        request, graph, low = self.request, self.planner.graph, self.planner.policy.formats
        kernels = merged(bias_kernels(graph) + activation_kernels(graph) + norm_kernels(graph))
        units = make_units(graph, self.planner.permissions, low, kernels)
        points = points_of(self.planner, units, dict.fromkeys(low, kernels))
        errors = probe_sensitivity(
            self.planner,
            points,
            lambda switches: switched_probe(self.prepared, switches, request.feeds),
            counted=request.counted,
            progress=request.progress,
        )
        shapes = {i: f.shape for i, f in self.facts.items()}
        cost = RooflineCost(target=request.emulation.target, shapes=shapes)
        return analysis_of(self.prepared, self.planner, units, points, errors, cost)
