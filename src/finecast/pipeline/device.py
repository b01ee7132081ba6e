"""A model on one emulated device: what all evaluations of it share, made once.

Law: a plan's time is the roofline's, its metric the emulation's on all data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from finecast.devices.emulation import Emulation
from finecast.engines.base import Array, Feeds, Session
from finecast.engines.emulator import (
    EmulatorEngine,
    EmulatorSession,
    prepare,
    setting_of_plan,
)
from finecast.engines.emulator.model import Setting
from finecast.engines.loading import load_model
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import OnnxFile, Prepared
from finecast.measure.observe import first_nonfinite, observe
from finecast.numbers.formats import Format
from finecast.ops.patterns import activation_kernels, bias_kernels, merged, norm_kernels
from finecast.pipeline.analysis import make_planner
from finecast.pipeline.modelled import modelled_time_s, plan_time_s
from finecast.pipeline.proposing import analysis_of, probe_sensitivity
from finecast.pipeline.search import Candidate
from finecast.pipeline.workload import Workload
from finecast.planning.cost import RooflineCost
from finecast.planning.edits import cast_count
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.proposing import Analysis, lowest, propose
from finecast.planning.sensitivity import squared_error
from finecast.planning.units import make_units, rounding_points
from finecast.progress import Progress, silent
from finecast.rules import UserRule
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy, Scope

CALIBRATION_FEEDS: Final = 8
"""Batches that sensitivities are measured on: each op is run on all of them."""


@dataclass(slots=True, kw_only=True)
class DeviceModel:
    """A model on a target; ``emulation`` states how accumulations are computed there.

    ``truth`` is the model whose accuracy is to be kept, where it is not the fp32 model's.
    """

    file: OnnxFile
    workload: Workload
    emulation: Emulation
    reference: Session
    truth: Session | None = None
    progress: Progress = silent
    prepared: Prepared = field(init=False)
    feeds: Sequence[Feeds] = field(init=False)
    facts: Mapping[int, ValueFacts] = field(init=False)
    exact: list[Array] = field(init=False)

    def __post_init__(self) -> None:
        """See what the fp32 model's values are."""
        self.prepared = prepare(self.file, self.emulation)
        self.feeds = list(islice(self.workload.calibration(), CALIBRATION_FEEDS))
        self.exact = [a for f in self.feeds for a in self.reference.run(f).values()]
        self.facts = observe(self.prepared, lambda: self.feeds)

    @property
    def first_nonfinite(self) -> str:
        """The op that first gives NaN or Inf in fp32; empty if none does."""
        return first_nonfinite(self.prepared.graph, dict(self.facts)) or ""

    def session(self, emulation: Emulation, setting: Setting) -> EmulatorSession:
        """The model as the device runs it under ``setting``."""
        return EmulatorEngine(emulation=emulation).session(self.prepared, fixed=setting)

    def evaluate(self, session: EmulatorSession) -> tuple[float, float]:
        """Metric on all data, and relative output error on calibration data."""
        error = self.error(session)
        judge = self.truth or self.reference
        return self.workload.evaluate(session.restart(), judge), error

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
        return modelled_time_s(self.prepared.graph, cost, emulation, reads, writes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearch:
    """Plans by op on a device: what its compiler would be handed.

    Plans of one format are settings of the model that ``device`` prepared; others are
    emulated by their own casts.
    """

    device: DeviceModel
    emulation: Emulation
    planner: Planner
    prepared: Prepared
    facts: Mapping[int, ValueFacts]
    ids: Mapping[str, int]

    def analysis(self) -> Analysis:
        """Times by the roofline, errors by probing."""
        graph, device = self.planner.graph, self.device
        formats = self.planner.policy.formats
        kernels = merged(bias_kernels(graph) + activation_kernels(graph) + norm_kernels(graph))
        units = make_units(graph, self.planner.permissions, formats, kernels)
        points = dict.fromkeys(formats, rounding_points(graph, units, kernels))
        errors = probe_sensitivity(self.prepared, points, device.feeds, device.progress)
        shapes = {i: f.shape for i, f in self.facts.items()}
        cost = replace(device.cost(self.emulation), shapes=shapes)
        return analysis_of(self.planner, units, points, errors, cost)

    def candidates(self) -> list[Candidate]:
        """The plans worth trying with their modelled times; those of one plan once."""
        analysis = self.analysis()
        proposals = (*propose(self.planner, analysis), *lowest(self.planner, analysis))
        unique = {p.plan.digest: p for p in reversed(proposals)}
        found: list[Candidate] = []
        for proposal in unique.values():
            applied = frontend.apply(self.device.file, proposal.plan)
            found.append(
                Candidate(
                    name=proposal.name,
                    plan=proposal.plan,
                    error=proposal.error,
                    latency_s=self.time_s(proposal.plan),
                    casts=cast_count(applied.graph, applied.edits),
                )
            )
        return found

    def time_s(self, plan: Plan) -> float:
        """Modelled time of the plan's model."""
        device, emulation = self.device, self.emulation
        cost, formats = device.cost(emulation), self._formats(plan)
        return plan_time_s(device.prepared.graph, cost, emulation, formats)

    def evaluate(self, plan: Plan) -> tuple[float, float]:
        """Metric on all data, and relative output error on calibration data."""
        return self.device.evaluate(self.session(plan))

    def _formats(self, plan: Plan) -> dict[int, Format]:
        return {self.ids[n]: f for n, f in plan.formats.items() if n in self.ids}

    def session(self, plan: Plan) -> EmulatorSession:
        """A plan of one low format is the same whatever others were to choose from."""
        formats, device = self._formats(plan), self.device
        low = set(formats.values()) - {Format.FP32}
        if len(low) <= 1:
            emulation = replace(self.emulation, format=next(iter(low), self.emulation.format))
            return device.session(emulation, setting_of_plan(formats, emulation))
        engine = EmulatorEngine(emulation=replace(self.emulation, scope=Scope.NONE))
        session = load_model(engine, frontend.apply(device.file, plan).model)
        assert isinstance(session, EmulatorSession)
        return session


def search_plans(
    device: DeviceModel,
    emulation: Emulation,
    policy: Policy,
    user_rules: tuple[tuple[str, UserRule], ...] = (),
    prepared: Prepared | None = None,
) -> PlanSearch:
    """The plans under ``policy``, once the rules have judged every op.

    ``prepared`` is the device's model prepared for ``policy``, where that is done already.
    """
    engine = EmulatorEngine(emulation=replace(emulation, scope=Scope.NONE))
    prepared = prepared or frontend.prepare(device.file, policy)
    facts = _by_name(device, prepared)
    return PlanSearch(
        device=device,
        emulation=emulation,
        planner=make_planner(
            prepared, policy, engine, facts=facts, user_rules=user_rules, measured=True
        ),
        prepared=prepared,
        facts=facts,
        ids={n.name: n.id for n in device.prepared.graph.nodes},
    )


def _by_name(device: DeviceModel, prepared: Prepared) -> dict[int, ValueFacts]:
    """Facts of the emulated model's values, by the ids of the planner's."""
    values = device.prepared.graph.values
    names = {v.name: v.id for v in prepared.graph.values}
    return {
        names[values[i].name]: f for i, f in device.facts.items() if values[i].name in names
    }
