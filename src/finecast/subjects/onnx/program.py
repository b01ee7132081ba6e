"""An ONNX model for the emulation of a device."""

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
from finecast.frontends.onnx import Prepared
from finecast.numbers.formats import Format
from finecast.pipeline.program import Asked
from finecast.planning.plan import Plan
from finecast.rules.facts import facts_in
from finecast.rules.policy import Scope
from finecast.subjects.engine.on_device import OnDevice
from finecast.subjects.engine.program import EngineProgram
from finecast.subjects.onnx.source import OnnxSource


@dataclass(slots=True, kw_only=True)
class OnnxProgram(EngineProgram[OnnxSource, Prepared]):
    """A ``Program`` of an ONNX model; ``emulation`` states how accumulations are computed."""

    def __post_init__(self) -> None:
        """Write out what the device computes in steps."""
        self.prepared = prepare(self.source.file, self.emulation)

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

    def examine(self, asked: Asked) -> OnDevice:
        """The rules judge the model that the device's compiler is handed."""
        prepared = self.source.prepare(asked.policy)
        return OnDevice.of(prepared, asked, facts_in(prepared.graph, asked.facts, self.graph))


def _op_of(step: str) -> str:
    """The name of the op that ``step`` is of, if it is one."""
    return step.rpartition("/")[0]
