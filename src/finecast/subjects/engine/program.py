"""Models for the emulation of a device, where copies of the model can be rounded in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from finecast.devices.emulation import Emulation
from finecast.devices.setting import Setting
from finecast.engines.base import Feeds
from finecast.engines.emulator.native_session import (
    NativeEmulatorSession,
    check_emulation,
    plan_session,
)
from finecast.frontends.prepared import PreparedModel
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.program import PlanRequest, Program
from finecast.planning.plan import Plan
from finecast.rules.facts import ValueFacts, facts_in
from finecast.subjects.engine.native import AS_IT_IS, Source
from finecast.subjects.engine.observing import observe
from finecast.subjects.engine.on_device import OnDevice

SourceT = TypeVar("SourceT", bound=Source)
PreparedT = TypeVar("PreparedT", bound=PreparedModel)


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
class NativeProgram(EngineProgram[Source, PreparedModel]):
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
        return NativeEmulatorSession(
            copy=partial(self.source.roundable, AS_IT_IS.label),
            emulation=emulation,
            setting=setting,
        )

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
