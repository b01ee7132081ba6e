"""A model of ``engine`` examined for a device that is not here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from finecast.engines.emulator import EmulatorEngine
from finecast.ops.patterns import activation_kernels, bias_kernels, merged, norm_kernels
from finecast.pipeline.program import Asked
from finecast.planning.cost import RooflineCost
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis
from finecast.planning.units import make_units
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Scope
from finecast.subjects.engine.native import PreparedModel
from finecast.subjects.engine.planning import make_planner
from finecast.subjects.engine.roundings import analysis_of, points_of, probe_sensitivity


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevice:
    """A model examined for a device."""

    planner: Planner
    prepared: PreparedModel
    facts: Mapping[int, ValueFacts]
    asked: Asked

    @classmethod
    def of(
        cls, prepared: PreparedModel, asked: Asked, facts: Mapping[int, ValueFacts]
    ) -> OnDevice:
        """The rules judge the model that the device's compiler is handed."""
        engine = EmulatorEngine(emulation=replace(asked.emulation, scope=Scope.NONE))
        planner = make_planner(
            prepared,
            asked.policy,
            engine,
            facts=facts,
            user_rules=asked.user_rules,
            measured=asked.measured,
        )
        return cls(planner=planner, prepared=prepared, facts=facts, asked=asked)

    def analysis(self) -> Analysis:
        """Times by the roofline, errors by probing."""
        asked, graph, low = self.asked, self.planner.graph, self.planner.policy.formats
        kernels = merged(bias_kernels(graph) + activation_kernels(graph) + norm_kernels(graph))
        units = make_units(graph, self.planner.permissions, low, kernels)
        points = points_of(self.planner, units, dict.fromkeys(low, kernels))
        errors = probe_sensitivity(
            self.planner,
            self.prepared,
            points,
            feeds=lambda _: asked.feeds,
            progress=asked.progress,
        )
        shapes = {i: f.shape for i, f in self.facts.items()}
        cost = RooflineCost(target=asked.emulation.target, shapes=shapes)
        return analysis_of(self.prepared, self.planner, units, points, errors, cost)
