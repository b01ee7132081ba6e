"""An OpenVINO model for the emulation of a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from finecast.devices.emulation import Emulation
from finecast.devices.setting import Setting
from finecast.engines.base import Feeds
from finecast.engines.emulator.openvino_session import (
    OvEmulatorSession,
    check_emulation,
    plan_session,
)
from finecast.frontends.openvino import OvPrepared
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.program import Asked
from finecast.planning.plan import Plan
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy, Scope
from finecast.subjects.engine.observing import observe
from finecast.subjects.engine.on_device import OnDevice
from finecast.subjects.openvino.source import OvSource


@dataclass(slots=True, kw_only=True)
class OvProgram:
    """A ``Program`` of an OpenVINO model: what is emulated is the model as it is."""

    source: OvSource
    emulation: Emulation
    prepared: OvPrepared = field(init=False)

    def __post_init__(self) -> None:
        """Read the graph.

        Raises:
            UsageError: If ``emulation`` has options that are not emulated here.
        """
        check_emulation(self.emulation)
        self.prepared = self.source.prepare(Policy(scope=Scope.NONE))

    @property
    def graph(self) -> Graph:
        """The graph that is emulated."""
        return self.prepared.graph

    def observe(self, feeds: Sequence[Feeds]) -> dict[int, ValueFacts]:
        """Facts of all float values outside of bodies."""
        return observe(self.prepared, lambda: feeds)

    def session(
        self, emulation: Emulation, setting: Setting, *, switched: bool = False
    ) -> OvEmulatorSession:
        """Built for the setting; another one is built anew."""
        del switched
        check_emulation(emulation)
        return OvEmulatorSession(model=self.source.model, emulation=emulation, setting=setting)

    def formats(self, plan: Plan) -> dict[int, Format]:
        """The plan's formats by id."""
        ids = {n.name: n.id for n in self.graph.nodes}
        return {ids[name]: fmt for name, fmt in plan.formats.items()}

    def plan_session(self, plan: Plan, emulation: Emulation) -> OvEmulatorSession:
        """The plan's casts, each op in the format that it has there."""
        return plan_session(self.source.model, self.graph, plan, emulation)

    def examine(self, asked: Asked) -> OnDevice:
        """The rules judge the model that the device's compiler is handed."""
        return OnDevice.of(self.source.prepare(asked.policy), asked, asked.facts)

    def casts(self, plan: Plan) -> int:
        """The casts in the plan's model."""
        return self.source.build(plan).casts
