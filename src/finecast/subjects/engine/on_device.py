"""A native model examined for a device that is not here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from finecast.engines.emulator import EmulatorEngine
from finecast.frontends.prepared import PreparedModel
from finecast.ops.patterns import activation_kernels, bias_kernels, merged, norm_kernels
from finecast.pipeline.program import PlanRequest
from finecast.pipeline.roundings import points_of
from finecast.pipeline.subject import Examined
from finecast.planning.cost import RooflineCost
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis
from finecast.planning.units import make_units
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Scope
from finecast.subjects.engine.planning import make_planner
from finecast.subjects.engine.roundings import analysis_of, probe_sensitivity


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
    ) -> OnDevice:
        """Let the rules judge the model that the device's compiler is given."""
        engine = EmulatorEngine(emulation=replace(request.emulation, scope=Scope.NONE))
        planner = make_planner(
            prepared,
            request.policy,
            engine,
            facts=facts,
            user_rules=request.user_rules,
            measured=request.measured,
        )
        return cls(planner=planner, prepared=prepared, facts=facts, request=request)

    def analysis(self) -> Analysis:
        """Times by the roofline, errors by probing each rounding."""
        request, graph, low = self.request, self.planner.graph, self.planner.policy.formats
        kernels = merged(bias_kernels(graph) + activation_kernels(graph) + norm_kernels(graph))
        units = make_units(graph, self.planner.permissions, low, kernels)
        points = points_of(self.planner, units, dict.fromkeys(low, kernels))
        errors = probe_sensitivity(
            self.planner,
            self.prepared,
            points,
            feeds=lambda _: request.feeds,
            counted=request.counted,
            progress=request.progress,
        )
        shapes = {i: f.shape for i, f in self.facts.items()}
        cost = RooflineCost(target=request.emulation.target, shapes=shapes)
        return analysis_of(self.prepared, self.planner, units, points, errors, cost)
