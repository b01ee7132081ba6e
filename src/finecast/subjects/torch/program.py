"""PyTorch programs in the form that the emulator runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.export import ExportedProgram

from finecast.devices.emulation import Emulation, Setting, setting_of_formats
from finecast.engines.base import Feeds
from finecast.engines.emulator import EmulatorEngine
from finecast.engines.emulator.torch_program import (
    PreparedProgram,
    observe_program,
    prepare_program,
)
from finecast.engines.emulator.torch_session import TorchEmulatorSession
from finecast.engines.torch.session import ProgramSignature
from finecast.frontends import torch as frontend
from finecast.frontends.torch import CASTS, Captured, TorchPrepared
from finecast.frontends.torch.reader import hinted_shapes
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.device import PlanRequest, Program
from finecast.pipeline.subject import Examined
from finecast.planning.cost import RooflineCost
from finecast.planning.edits import cast_count
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis
from finecast.rules.facts import ValueFacts, facts_in
from finecast.rules.policy import Scope
from finecast.rules.user_rules import check_names
from finecast.subjects.engine.planning import make_planner
from finecast.subjects.torch.planning import analysis_of, points_of, sensitivities


@dataclass(slots=True, kw_only=True)
class TorchProgram(Program):
    """A ``Program`` of an exported program."""

    program: ExportedProgram
    captured: Captured
    emulation: Emulation
    prepared: PreparedProgram = field(init=False)

    def __post_init__(self) -> None:
        """Write out ops that the device computes in steps."""
        prepared = prepare_program(self.captured, self.emulation)
        # Outputs have the names that the file gives them.
        signature = ProgramSignature.of(self.program)
        self.prepared = replace(prepared, signature=signature)

    @property
    def graph(self) -> Graph:
        """The graph that is emulated."""
        return self.prepared.graph

    def observe(self, feeds: Sequence[Feeds]) -> dict[int, ValueFacts]:
        """Facts of all float values."""
        return observe_program(self.prepared, feeds)

    def session(
        self, emulation: Emulation, setting: Setting, *, switched: bool = False
    ) -> TorchEmulatorSession:
        """A session under ``setting``; any session takes other settings later."""
        del switched
        return TorchEmulatorSession(self.prepared, emulation, setting)

    def formats(self, plan: Plan) -> dict[int, Format]:
        """The plan's formats by node id; each step of an op has the op's format."""
        steps = self.prepared.steps
        return {i: f for name, f in plan.formats.items() for i in steps.get(name, ())}

    def plan_session(self, plan: Plan, emulation: Emulation) -> TorchEmulatorSession:
        """A session of the program with the plan's formats."""
        low = {i: f for i, f in self.formats(plan).items() if f is not Format.FP32}
        setting = setting_of_formats(
            low, emulation, fp32_parameters=self.prepared.fp32_parameters
        )
        return TorchEmulatorSession(self.prepared, emulation, setting, formats=low)

    def examine(self, request: PlanRequest) -> TorchOnDevice:
        """Let the rules judge the captured graph.

        Raises:
            UsageError: If the policy names a format that PyTorch's ops do not compute in, or
                an op that the program does not have.
        """
        captured = self.captured
        check_names(request.policy, captured.graph)
        facts = facts_in(captured.graph, request.facts, self.graph)
        planner = make_planner(
            TorchPrepared(graph=captured.graph, captured=captured, of=CASTS),
            request.policy,
            # The casts are the plan's: the device's compiler adds none.
            EmulatorEngine(emulation=replace(request.emulation, scope=Scope.NONE)),
            facts=facts,
            user_rules=tuple(request.user_rules),
            measured=request.measured,
        )
        return TorchOnDevice(
            planner=planner,
            captured=captured,
            facts=facts,
            leaves=self.prepared.signature.leaves(request.feeds[0]),
            request=request,
        )

    def casts(self, plan: Plan) -> int:
        """Number of casts in the plan's module."""
        edits = frontend.planned_edits(self.captured, plan)
        return cast_count(self.captured.graph, edits)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOnDevice(Examined):
    """A program judged for a device; ``leaves`` are the inputs that errors are measured on."""

    planner: Planner
    captured: Captured
    facts: Mapping[int, ValueFacts]
    leaves: Sequence[Any]
    request: PlanRequest

    def analysis(self) -> Analysis:
        """Times by the roofline, errors by one backward pass."""
        points = points_of(self.planner)
        formats = self.planner.policy.formats
        errors = sensitivities(
            self.captured, points, formats, self.leaves, counted=self.request.counted
        )
        shapes = {
            **hinted_shapes(self.captured.binding),
            **{i: f.shape for i, f in self.facts.items()},
        }
        cost = RooflineCost(target=self.request.emulation.target, shapes=shapes)
        return analysis_of(self.planner, cost, points, errors)
