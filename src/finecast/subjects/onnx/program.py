"""ONNX models in the form that the emulator runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from finecast.devices.emulation import Emulation
from finecast.devices.setting import Setting
from finecast.engines.emulator import (
    EmulatorEngine,
    EmulatorSession,
    prepare,
    setting_of_plan,
)
from finecast.engines.loading import load_model
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import OnnxFile, Prepared
from finecast.numbers.formats import Format
from finecast.pipeline.program import PlanRequest
from finecast.planning.plan import Plan
from finecast.rules.facts import facts_in
from finecast.rules.policy import Scope
from finecast.subjects.engine.native import NativeSource
from finecast.subjects.engine.on_device import OnDevice
from finecast.subjects.engine.program import EngineProgram


@dataclass(slots=True, kw_only=True)
class OnnxProgram(EngineProgram[NativeSource[OnnxFile, Prepared], Prepared]):
    """A ``Program`` of an ONNX model; ``emulation`` tells how accumulations are computed."""

    def __post_init__(self) -> None:
        """Write out ops that the device computes in steps."""
        self.prepared = prepare(self.source.file, self.emulation)

    def session(
        self, emulation: Emulation, setting: Setting, *, switched: bool = False
    ) -> EmulatorSession:
        """A session built for the setting, which runs faster, or a switched one."""
        engine = EmulatorEngine(emulation=emulation)
        session = engine.session(self.prepared, fixed=None if switched else setting)
        return session.apply(setting)

    def formats(self, plan: Plan) -> dict[int, Format]:
        """The plan's formats by node id; the steps of an op are found by their names."""
        given = plan.formats
        found = {n.id: given.get(n.name, given.get(_op_of(n.name))) for n in self.graph.nodes}
        return {i: f for i, f in found.items() if f is not None}

    def plan_session(self, plan: Plan, emulation: Emulation) -> EmulatorSession:
        """A session under the plan's setting if it has one low format, else of its own model.

        The low format may be another than that of ``emulation``.
        """
        formats = self.formats(plan)
        low = set(formats.values()) - {Format.FP32}
        if len(low) <= 1:
            coded = {d.node: d.encodings for d in plan.decisions if d.format.has_scales}
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

    def examine(self, request: PlanRequest) -> OnDevice:
        """Let the rules judge the model that the device's compiler is given."""
        prepared = self.source.prepare(request.policy)
        facts = facts_in(prepared.graph, request.facts, self.graph)
        return OnDevice.of(prepared, request, facts)


def _op_of(step: str) -> str:
    """The name of the op that a step belongs to: a step is named ``OP/STEP``."""
    return step.rpartition("/")[0]
