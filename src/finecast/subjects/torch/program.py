"""PyTorch programs in the form that the emulator runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.export import ExportedProgram

from finecast.devices.emulation import Emulation, Setting, setting_of_formats
from finecast.engines.base import Feeds
from finecast.engines.emulator.torch_program import (
    PreparedProgram,
    observe_program,
    prepare_program,
)
from finecast.engines.emulator.torch_session import TorchEmulatorSession
from finecast.engines.torch.session import ProgramSignature
from finecast.frontends.prepared import PreparedModel
from finecast.frontends.torch import CASTS, Captured, TorchPrepared
from finecast.frontends.torch.reader import hinted_shapes
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.device import Program
from finecast.planning.cost import RooflineCost
from finecast.planning.plan import Plan
from finecast.planning.problem import Analysis
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy
from finecast.subjects.engine.emulated import EmulatedSubject, OnDevice
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


@dataclass(slots=True, kw_only=True)
class TorchEmulatedSubject(EmulatedSubject):
    """A program on a device."""

    def prepared(self, policy: Policy) -> PreparedModel:
        """The program prepared for ``policy``: codes are not emulated."""
        return replace(self.model.prepare(policy), of=CASTS)

    def judged(self, **parts: Any) -> TorchOnDevice:
        """The program as the rules judged it for the device."""
        return TorchOnDevice(subject=self, **parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOnDevice(OnDevice):
    """A program judged for a device."""

    prepared: TorchPrepared

    def analysis(self) -> Analysis:
        """Times by the roofline, errors by one backward pass."""
        captured, device = self.prepared.captured, self.device
        assert captured is not None
        assert isinstance(device.program, TorchProgram)
        points = points_of(self.planner)
        errors = sensitivities(
            captured,
            points,
            self.planner.policy.formats,
            device.program.prepared.signature.leaves(device.feeds[0]),
            counted=device.exact.counted,
        )
        shapes = {
            **hinted_shapes(captured.binding),
            **{i: f.shape for i, f in self.facts.items()},
        }
        cost = RooflineCost(target=self.subject.emulation.target, shapes=shapes)
        return analysis_of(self.planner, cost, points, errors)
