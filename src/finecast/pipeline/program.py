"""What a device's emulation asks of a model, whatever library the model is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from finecast.devices.emulation import Emulation
from finecast.engines.base import Feeds, Session
from finecast.engines.emulator import exact_session
from finecast.engines.emulator.setting import EmulatedSession, Setting
from finecast.frontends.onnx import OnnxFile, Prepared
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.choices import Proposal
from finecast.planning.plan import Plan
from finecast.progress import Progress
from finecast.rules import UserRule
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What plans are wanted for: a policy, a device, and what calibration data showed.

    ``prepared`` is an ONNX model prepared for the policy, where that is done already.
    """

    policy: Policy
    emulation: Emulation
    feeds: Sequence[Feeds]
    facts: Mapping[int, ValueFacts]
    progress: Progress
    user_rules: tuple[tuple[str, UserRule], ...] = ()
    prepared: Prepared | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """Plans worth trying, the planner that made them, and the runs that it took."""

    planner: Any
    proposals: Sequence[Proposal]
    probes: int


class Program(Protocol):
    """A model that the emulator can run; ``graph`` is what it runs."""

    @property
    def graph(self) -> Graph:
        """The graph that is emulated: accumulations as the device computes them."""
        ...

    def observe(self, feeds: Sequence[Feeds]) -> dict[int, ValueFacts]:
        """Facts of the fp32 model's values, by id in ``graph``."""
        ...

    def session(
        self, emulation: Emulation, setting: Setting, *, switched: bool = False
    ) -> EmulatedSession:
        """The model as the device runs it; ``switched`` if other settings will be applied."""
        ...

    def formats(self, plan: Plan) -> dict[int, Format]:
        """The plan's formats by id in ``graph``; a step has its op's."""
        ...

    def plan_session(self, plan: Plan, emulation: Emulation) -> EmulatedSession:
        """The model of a plan as the device runs it."""
        ...

    def propose(self, asked: Asked) -> Proposed:
        """Plans by op along the frontier of modelled time and error."""
        ...

    def casts(self, plan: Plan) -> int:
        """The casts that a plan's model has."""
        ...


def program_of(file: Any, emulation: Emulation) -> Program:
    """The model in ``file``, an ``OnnxFile`` or an ``ExportedFile``.

    Raises:
        ModelError: If it cannot be emulated.
    """
    if isinstance(file, OnnxFile):
        from finecast.pipeline.onnx_program import OnnxProgram

        return OnnxProgram(file=file, emulation=emulation)
    from finecast.pipeline.torch_program import TorchProgram

    return TorchProgram(file=file, emulation=emulation)


def reference_session(file: Any) -> Session:
    """The model's own numbers in fp32; no time of it counts.

    Raises:
        EngineError: If it cannot be run.
    """
    if isinstance(file, OnnxFile):
        return exact_session(file.path)
    from finecast.pipeline.torch_program import exact_program

    return exact_program(file)
