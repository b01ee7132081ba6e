"""An ONNX model for the emulation of a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from finecast.devices.emulation import Emulation
from finecast.devices.setting import Setting
from finecast.engines.base import Feeds
from finecast.engines.emulator import (
    EmulatorEngine,
    EmulatorSession,
    prepare,
    setting_of_plan,
)
from finecast.engines.loading import load_model
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import Prepared
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.ops.patterns import activation_kernels, bias_kernels, merged, norm_kernels
from finecast.pipeline.program import Asked
from finecast.planning.cost import RooflineCost
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis
from finecast.planning.units import make_units
from finecast.rules.facts import ValueFacts, facts_in
from finecast.rules.policy import Scope
from finecast.subjects.onnx.observing import observe
from finecast.subjects.onnx.planning import make_planner
from finecast.subjects.onnx.roundings import analysis_of, points_of, probe_sensitivity
from finecast.subjects.onnx.source import OnnxSource


@dataclass(slots=True, kw_only=True)
class OnnxProgram:
    """A ``Program`` of an ONNX model; ``emulation`` states how accumulations are computed."""

    source: OnnxSource
    emulation: Emulation
    prepared: Prepared = field(init=False)

    def __post_init__(self) -> None:
        """Write out what the device computes in steps."""
        self.prepared = prepare(self.source.file, self.emulation)

    @property
    def graph(self) -> Graph:
        """The graph that is emulated."""
        return self.prepared.graph

    def observe(self, feeds: Sequence[Feeds]) -> dict[int, ValueFacts]:
        """Facts of all float values outside of bodies."""
        return observe(self.prepared, lambda: feeds)

    def session(
        self, emulation: Emulation, setting: Setting, *, switched: bool = False
    ) -> EmulatorSession:
        """Built for the setting, which runs faster, or switched."""
        engine = EmulatorEngine(emulation=emulation)
        session = engine.session(self.prepared, fixed=None if switched else setting)
        return session.apply(setting)

    def formats(self, plan: Plan) -> dict[int, Format]:
        """The plan's formats by id; the steps of an op are named after it."""
        given = plan.formats
        found = {n.id: given.get(n.name, given.get(_op_of(n.name))) for n in self.graph.nodes}
        return {i: f for i, f in found.items() if f is not None}

    def plan_session(self, plan: Plan, emulation: Emulation) -> EmulatorSession:
        """A setting where the plan has one low format, else a session of the plan's model.

        A plan of one low format is the same whatever others were to choose from.
        """
        formats = self.formats(plan)
        low = set(formats.values()) - {Format.FP32}
        if len(low) <= 1:
            coded = {d.node: d.encodings for d in plan.decisions if d.format.scaled}
            emulation = replace(
                emulation,
                format=next(iter(low), emulation.format),
                encodings={n.id: coded[n.name] for n in self.graph.nodes if n.name in coded},
            )
            return self.session(emulation, setting_of_plan(formats, emulation))
        engine = EmulatorEngine(emulation=replace(emulation, scope=Scope.NONE))
        session = load_model(engine, frontend.apply(self.source.file, plan).model)
        assert isinstance(session, EmulatorSession)
        return session

    def examine(self, asked: Asked) -> OnnxOnDevice:
        """The rules judge the model that the device's compiler is handed."""
        engine = EmulatorEngine(emulation=replace(asked.emulation, scope=Scope.NONE))
        prepared = self.source.prepare(asked.policy)
        facts = facts_in(prepared.graph, asked.facts, self.graph)
        planner = make_planner(
            prepared,
            asked.policy,
            engine,
            facts=facts,
            user_rules=asked.user_rules,
            measured=asked.measured,
        )
        return OnnxOnDevice(planner=planner, prepared=prepared, facts=facts, asked=asked)

    def casts(self, plan: Plan) -> int:
        """The casts in the plan's model."""
        return self.source.build(plan).casts


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxOnDevice:
    """An ONNX model examined for a device."""

    planner: Planner
    prepared: Prepared
    facts: Mapping[int, ValueFacts]
    asked: Asked

    def analysis(self) -> Analysis:
        """Times by the roofline, errors by probing."""
        asked, graph, low = self.asked, self.planner.graph, self.planner.policy.formats
        kernels = merged(bias_kernels(graph) + activation_kernels(graph) + norm_kernels(graph))
        units = make_units(graph, self.planner.permissions, low, kernels)
        points = points_of(self.planner, units, dict.fromkeys(low, kernels))
        errors = probe_sensitivity(
            self.planner, self.prepared, points, asked.feeds, asked.progress
        )
        shapes = {i: f.shape for i, f in self.facts.items()}
        cost = RooflineCost(target=asked.emulation.target, shapes=shapes)
        return analysis_of(self.planner, units, points, errors, cost)


def _op_of(step: str) -> str:
    """The name of the op that ``step`` is of, if it is one."""
    return step.rpartition("/")[0]
