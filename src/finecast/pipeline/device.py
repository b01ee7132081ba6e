"""A model on one emulated device, what that needs of the model, and the search for its plans.

Law: a plan's time is the roofline's, its metric the emulation's on all data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from finecast.devices.emulation import Emulation, Setting
from finecast.engines.base import EmulatedSession, Feeds, Session
from finecast.engines.exact import Exact
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.modelled import modelled_time_s, plan_time_s
from finecast.pipeline.search import Candidate
from finecast.pipeline.subject import Examined
from finecast.pipeline.workload import Workload
from finecast.planning.cost import RooflineCost
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis
from finecast.planning.proposing import lowest, propose
from finecast.progress import Progress, silent
from finecast.rules import UserRule
from finecast.rules.facts import ValueFacts, first_nonfinite
from finecast.rules.policy import Policy

CALIBRATION_FEEDS: Final = 8
"""Calibration batches on which output errors are measured."""


@dataclass(slots=True, kw_only=True)
class DeviceModel:
    """A model on a device, with what all its evaluations share: facts and exact outputs.

    Attributes:
        program: The model as the emulator takes it.
        workload: The data.
        reference: The fp32 model.
        truth: The fp64 model that the fp32 one was converted from, whose accuracy is then
            the one to keep.
        progress: Told of long work.
        feeds: Calibration data.
        facts: Facts of the fp32 model's values, by id in ``graph``.
        exact: The fp32 model's outputs on ``feeds``.
    """

    program: Program
    workload: Workload
    reference: Session
    truth: Session | None = None
    progress: Progress = silent
    feeds: Sequence[Feeds] = field(init=False)
    facts: Mapping[int, ValueFacts] = field(init=False)
    exact: Exact = field(init=False)

    def __post_init__(self) -> None:
        """Run the fp32 model on calibration data and observe its values."""
        self.feeds = list(islice(self.workload.calibration(), CALIBRATION_FEEDS))
        self.exact = Exact.of(self.reference, self.feeds, self.workload.of)
        self.facts = self.program.observe(self.feeds)

    @property
    def first_nonfinite(self) -> str:
        """The op that first gives NaN or Inf in fp32; empty if none does."""
        return first_nonfinite(self.graph, dict(self.facts)) or ""

    @property
    def graph(self) -> Graph:
        """The graph that is emulated."""
        return self.program.graph

    def session(self, emulation: Emulation, setting: Setting) -> EmulatedSession:
        """The model as the device runs it under ``setting``."""
        return self.program.session(emulation, setting)

    def evaluate(self, session: EmulatedSession) -> tuple[float, Mapping[str, float]]:
        """Metric on all data, and relative errors by output on calibration data."""
        errors = self.exact.errors(session)
        judge = self.truth or self.reference
        return self.workload.evaluate(session.restart(), judge), errors

    def cost(self, emulation: Emulation) -> RooflineCost:
        """The device's roofline with the observed shapes."""
        shapes = {i: f.shape for i, f in self.facts.items()}
        return RooflineCost(target=emulation.target, shapes=shapes)

    def time_s(self, emulation: Emulation, setting: Setting) -> float:
        """Modelled time of one run."""
        reads = dict.fromkeys(setting.reads, emulation.format)
        writes = dict.fromkeys(setting.writes, emulation.format)
        cost = self.cost(emulation)
        return modelled_time_s(self.graph, cost, emulation, reads, writes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearch(Examined):
    """Per-op plans on a device: the models that its compiler would be given."""

    device: DeviceModel
    emulation: Emulation
    examined: Examined
    planner: Planner

    def analysis(self) -> Analysis:
        """Modelled times, and the measured errors of roundings."""
        return self.examined.analysis()

    def candidates(self) -> list[Candidate]:
        """The plans worth trying, each once, with their modelled times."""
        analysis = self.analysis()
        proposals = (*propose(self.planner, analysis), *lowest(self.planner, analysis))
        unique = {p.plan.digest: p for p in reversed(proposals)}
        return [
            Candidate(
                name=proposal.name,
                plan=proposal.plan,
                error=proposal.error,
                cost=(time_s := self.time_s(proposal.plan)),
                latency_s=time_s,
                casts=self.device.program.casts(proposal.plan),
            )
            for proposal in unique.values()
        ]

    def time_s(self, plan: Plan) -> float:
        """Modelled time of the plan's model."""
        device, emulation = self.device, self.emulation
        formats = device.program.formats(plan)
        return plan_time_s(device.graph, device.cost(emulation), emulation, formats)

    def evaluate(self, plan: Plan) -> tuple[float, Mapping[str, float]]:
        """Metric on all data, and relative errors by output on calibration data."""
        return self.device.evaluate(self.session(plan))

    def session(self, plan: Plan) -> EmulatedSession:
        """The plan's model as the device runs it."""
        return self.device.program.plan_session(plan, self.emulation)


def search_plans(
    device: DeviceModel,
    emulation: Emulation,
    policy: Policy,
    user_rules: tuple[tuple[str, UserRule], ...] = (),
) -> PlanSearch:
    """The search among the plans that the rules permit under ``policy``."""
    request = PlanRequest(
        policy=policy,
        emulation=emulation,
        feeds=device.feeds,
        facts=device.facts,
        progress=device.progress,
        user_rules=user_rules,
        counted=device.exact.counted,
    )
    examined = device.program.examine(request)
    return PlanSearch(
        device=device, emulation=emulation, examined=examined, planner=examined.planner
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What to plan for: a policy, a device, and the facts of values on calibration data.

    With ``measured`` plans will be evaluated, and rules of thumb about ops do not count.
    ``counted`` are numbers of the outputs that errors are of; None for all.
    """

    policy: Policy
    emulation: Emulation
    feeds: Sequence[Feeds]
    facts: Mapping[int, ValueFacts]
    progress: Progress
    user_rules: tuple[tuple[str, UserRule], ...] = ()
    measured: bool = True
    counted: Collection[int] | None = None


class Program(ABC):
    """A model that the emulator can run."""

    @property
    @abstractmethod
    def graph(self) -> Graph:
        """The emulated graph: accumulations are written out as the device computes them."""

    @abstractmethod
    def observe(self, feeds: Sequence[Feeds]) -> dict[int, ValueFacts]:
        """Facts of the fp32 model's values, by id in ``graph``."""

    @abstractmethod
    def session(
        self, emulation: Emulation, setting: Setting, *, switched: bool = False
    ) -> EmulatedSession:
        """The model as the device runs it under ``setting``.

        A ``switched`` session takes other settings later.
        """

    @abstractmethod
    def formats(self, plan: Plan) -> dict[int, Format]:
        """The plan's formats by id in ``graph``; each step of an op has the op's format."""

    @abstractmethod
    def plan_session(self, plan: Plan, emulation: Emulation) -> EmulatedSession:
        """The model of a plan as the device runs it."""

    @abstractmethod
    def examine(self, request: PlanRequest) -> Examined:
        """Let the rules judge every op of the model that plans are made for."""

    @abstractmethod
    def casts(self, plan: Plan) -> int:
        """Number of casts in a plan's model."""
