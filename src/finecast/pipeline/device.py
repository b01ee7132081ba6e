"""A model on one emulated device: what all evaluations of it share, made once.

Laws: the fp32 model is evaluated once; a proposal's time is the roofline's, its metric the
emulation's on all data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from finecast.data.criterion import Criterion
from finecast.devices.emulation import Emulation
from finecast.engines.base import Array, Feeds, Session
from finecast.engines.emulator.setting import EmulatedSession, Setting
from finecast.errors import ModelError
from finecast.frontends.onnx import Prepared
from finecast.graph import Graph
from finecast.measure.observe import first_nonfinite
from finecast.numbers.formats import Format
from finecast.pipeline.cached_session import Remembered
from finecast.pipeline.modelled import modelled_time_s, plan_time_s
from finecast.pipeline.program import Asked, Program, program_of, reference_session
from finecast.pipeline.search import Candidate
from finecast.pipeline.workload import Workload
from finecast.planning.choices import Proposal
from finecast.planning.cost import RooflineCost
from finecast.planning.plan import Plan
from finecast.planning.sensitivity import squared_error
from finecast.progress import Progress, silent
from finecast.rules import UserRule
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy

CALIBRATION_FEEDS: Final = 8
"""Batches that sensitivities are measured on: each op is run on all of them."""


@dataclass(slots=True, kw_only=True)
class DeviceModel:
    """A model on a target.

    Attributes:
        file: What was loaded: an ``OnnxFile``, or an ``ExportedFile`` of PyTorch.
        workload: The data.
        criterion: The accuracy to keep.
        emulation: States how accumulations are computed on the target.
        loaded: The fp32 model, where it is loaded already.
        program: The model as the emulator takes it.
        reference: The fp32 model.
        baseline: Its metric.
        feeds: Calibration data.
        facts: What the fp32 model's values are, by id in ``graph``.
        exact: Its outputs on ``feeds``.
    """

    file: Any
    workload: Workload
    criterion: Criterion
    emulation: Emulation
    loaded: Session | None = None
    progress: Progress = silent
    program: Program = field(init=False)
    reference: Session = field(init=False)
    baseline: float = field(init=False)
    feeds: Sequence[Feeds] = field(init=False)
    facts: Mapping[int, ValueFacts] = field(init=False)
    exact: list[Array] = field(init=False)

    def __post_init__(self) -> None:
        """Evaluate the fp32 model, and see what its values are.

        Raises:
            ModelError: If its metric is NaN.
        """
        self.progress("fp32", 0, 1)
        self.program = program_of(self.file, self.emulation)
        self.reference = Remembered(self.loaded or reference_session(self.file))
        self.baseline = self.workload.evaluate(self.reference, None)
        self.feeds = list(islice(self.workload.calibration(), CALIBRATION_FEEDS))
        self.exact = [a for f in self.feeds for a in self.reference.run(f).values()]
        self.facts = self.program.observe(self.feeds)
        if math.isnan(self.baseline):
            node = first_nonfinite(self.graph, dict(self.facts))
            raise ModelError(
                "the fp32 model gives NaN" + (f", first at {node}" if node else ""),
                where=self.file.name,
                fix="check the data and the metric with the fp32 model first",
            )
        self.criterion.check(self.baseline, self.workload.worst)
        self.progress("fp32", 1, 1)

    @property
    def graph(self) -> Graph:
        """The graph that is emulated."""
        return self.program.graph

    def session(self, emulation: Emulation, setting: Setting) -> EmulatedSession:
        """The model as the device runs it under ``setting``."""
        return self.program.session(emulation, setting)

    def evaluate(self, session: EmulatedSession) -> tuple[float, float]:
        """Metric on all data, and relative output error on calibration data."""
        error = self.error(session)
        return self.workload.evaluate(session.restart(), self.reference), error

    def error(self, session: Session) -> float:
        """Relative output error on calibration data."""
        outputs = [a for f in self.feeds for a in session.run(f).values()]
        return math.sqrt(squared_error(outputs, self.exact))

    def cost(self, emulation: Emulation) -> RooflineCost:
        """The target's roofline with the observed shapes."""
        shapes = {i: f.shape for i, f in self.facts.items()}
        return RooflineCost(target=emulation.target, shapes=shapes)

    def time_s(self, emulation: Emulation, setting: Setting) -> float:
        """Modelled time of one run."""
        reads = dict.fromkeys(setting.reads, emulation.format)
        writes = dict.fromkeys(setting.writes, emulation.format)
        cost = self.cost(emulation)
        return modelled_time_s(self.graph, cost, emulation, reads, writes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearch:
    """Plans by op on a device: what its compiler would be handed.

    ``planner`` made the ``proposals``, by the library that the model is of.
    """

    device: DeviceModel
    emulation: Emulation
    planner: Any
    proposals: Sequence[Proposal]
    probes: int

    def candidates(self) -> list[Candidate]:
        """The proposals with their modelled times; those of one plan once."""
        unique = {p.plan.digest: p for p in reversed(self.proposals)}
        return [
            Candidate(
                name=proposal.name,
                plan=proposal.plan,
                error=proposal.error,
                latency_s=self.time_s(proposal.plan),
                casts=self.device.program.casts(proposal.plan),
            )
            for proposal in unique.values()
        ]

    def time_s(self, plan: Plan) -> float:
        """Modelled time of the plan's model."""
        device, emulation = self.device, self.emulation
        formats: dict[int, Format] = device.program.formats(plan)
        return plan_time_s(device.graph, device.cost(emulation), emulation, formats)

    def evaluate(self, plan: Plan) -> tuple[float, float]:
        """Metric on all data, and relative output error on calibration data."""
        return self.device.evaluate(self._session(plan))

    def error(self, plan: Plan) -> float:
        """Relative output error on calibration data."""
        return self.device.error(self._session(plan))

    def _session(self, plan: Plan) -> EmulatedSession:
        return self.device.program.plan_session(plan, self.emulation)


def search_plans(
    device: DeviceModel,
    emulation: Emulation,
    policy: Policy,
    user_rules: tuple[tuple[str, UserRule], ...] = (),
    prepared: Prepared | None = None,
) -> PlanSearch:
    """The frontier of plans under ``policy``, and the plan of everything that may be low.

    ``prepared`` is the device's ONNX model prepared for ``policy``, where that is done.
    """
    asked = Asked(
        policy=policy,
        emulation=emulation,
        feeds=device.feeds,
        facts=device.facts,
        progress=device.progress,
        user_rules=user_rules,
        prepared=prepared,
    )
    found = device.program.propose(asked)
    return PlanSearch(
        device=device,
        emulation=emulation,
        planner=found.planner,
        proposals=found.proposals,
        probes=found.probes,
    )
