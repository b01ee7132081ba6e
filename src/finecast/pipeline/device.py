"""A model on one emulated device, and the search for its plans.

Law: a plan's time is the roofline's, its metric the emulation's on all data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from finecast.devices.emulation import Emulation
from finecast.devices.setting import Setting
from finecast.engines.base import EmulatedSession, Feeds, Session
from finecast.engines.exact import Exact
from finecast.graph import Graph
from finecast.pipeline.modelled import modelled_time_s, plan_time_s
from finecast.pipeline.program import PlanRequest, Program
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
