"""A model on one emulated device: what all evaluations of it share, made once.

Laws: the fp32 model is evaluated once; a proposal's time is the roofline's, its metric the
emulation's on all data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from finecast.cost import RooflineCost
from finecast.edits import cast_count
from finecast.emulation import Emulation
from finecast.engines.base import Array, Feeds, Session
from finecast.engines.emulator import EmulatorEngine, prepare, setting_of_plan
from finecast.engines.loading import exact_engine
from finecast.errors import ModelError
from finecast.facts import ValueFacts
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import OnnxFile, Prepared
from finecast.frontends.onnx.emulation import Setting
from finecast.measure.criterion import Criterion
from finecast.measure.observe import first_nonfinite, observe
from finecast.patterns import activation_kernels, bias_kernels, merged, norm_kernels
from finecast.plan import Plan
from finecast.policy import Policy, Scope
from finecast.progress import Progress, silent
from finecast.rules import UserRule
from finecast.sensitivity import squared_error
from finecast.tuner.analysis import (
    Planner,
    Proposal,
    make_planner,
    probe_sensitivity,
    propose,
)
from finecast.tuner.modelled import modelled_time_s
from finecast.tuner.remembered import Remembered
from finecast.tuner.search import Candidate
from finecast.tuner.workload import Workload
from finecast.units import make_units, rounding_points

CALIBRATION_FEEDS: Final = 8
"""Batches that sensitivities are measured on: each op is run on all of them."""


@dataclass(slots=True, kw_only=True)
class DeviceModel:
    """A model on a target; ``emulation`` states how accumulations are computed there."""

    file: OnnxFile
    workload: Workload
    criterion: Criterion
    emulation: Emulation
    progress: Progress = silent
    prepared: Prepared = field(init=False)
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
        self.prepared = prepare(self.file, self.emulation)
        self.reference = Remembered(exact_engine().load(self.file.path))
        self.baseline = self.workload.evaluate(self.reference, None)
        self.feeds = list(islice(self.workload.calibration(), CALIBRATION_FEEDS))
        self.exact = [a for f in self.feeds for a in self.reference.run(f).values()]
        self.facts = observe(self.prepared, lambda: self.feeds)
        if math.isnan(self.baseline):
            node = first_nonfinite(self.prepared.graph, dict(self.facts))
            raise ModelError(
                "the fp32 model gives NaN" + (f", first at {node}" if node else ""),
                where=str(self.file.path),
                fix="check the data and the metric with the fp32 model first",
            )
        self.progress("fp32", 1, 1)

    def evaluate(self, emulation: Emulation, setting: Setting) -> tuple[float, float]:
        """Metric on all data, and relative output error on calibration data."""
        session = EmulatorEngine(emulation=emulation).session(self.prepared, fixed=setting)
        error = self._error(session)
        session.apply(setting)  # the stream of samples starts anew
        return self.workload.evaluate(session, self.reference), error

    def error(self, emulation: Emulation, setting: Setting) -> float:
        """Relative output error on calibration data."""
        engine = EmulatorEngine(emulation=emulation)
        return self._error(engine.session(self.prepared, fixed=setting))

    def _error(self, session: Session) -> float:
        outputs = [a for f in self.feeds for a in session.run(f).values()]
        return math.sqrt(squared_error(outputs, self.exact))

    def cost(self, emulation: Emulation) -> RooflineCost:
        """The target's roofline with the observed shapes."""
        shapes = {i: f.shape for i, f in self.facts.items()}
        return RooflineCost(target=emulation.target, shapes=shapes)

    def time_s(self, emulation: Emulation, setting: Setting) -> float:
        """Modelled time of one run."""
        return modelled_time_s(self.prepared.graph, self.cost(emulation), emulation, setting)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearch:
    """Plans by op for one format on a device: what its compiler would be handed."""

    device: DeviceModel
    emulation: Emulation
    planner: Planner
    ids: Mapping[str, int]
    proposals: Sequence[Proposal]
    probes: int

    def setting(self, plan: Plan) -> Setting:
        """What the plan's casts set in the emulated model."""
        formats = {self.ids[n]: f for n, f in plan.formats.items() if n in self.ids}
        return setting_of_plan(formats, self.emulation)

    def candidates(self) -> list[Candidate]:
        """The proposals with their modelled times; those of one plan once."""
        unique = {p.plan.digest: p for p in reversed(self.proposals)}
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
        return self.device.time_s(self.emulation, self.setting(plan))

    def evaluate(self, plan: Plan) -> tuple[float, float]:
        """Metric on all data, and relative output error on calibration data."""
        return self.device.evaluate(self.emulation, self.setting(plan))

    def error(self, plan: Plan) -> float:
        """Relative output error on calibration data."""
        return self.device.error(self.emulation, self.setting(plan))


def search_plans(
    device: DeviceModel,
    emulation: Emulation,
    policy: Policy,
    user_rules: tuple[tuple[str, UserRule], ...] = (),
) -> PlanSearch:
    """The frontier of plans under ``policy``, and the plan of everything that may be low."""
    engine = EmulatorEngine(emulation=replace(emulation, scope=Scope.NONE))
    prepared = frontend.prepare(device.file, policy)
    facts = _by_name(device, prepared)
    planner = make_planner(
        prepared, policy, engine, facts=facts, user_rules=user_rules, measured=True
    )
    graph = planner.graph
    kernels = merged(bias_kernels(graph) + activation_kernels(graph) + norm_kernels(graph))
    units = make_units(graph, planner.permissions, policy.format, kernels)
    points = rounding_points(graph, units, kernels)
    sensitivity = probe_sensitivity(planner, points, device.feeds, device.progress)
    cost = replace(device.cost(emulation), shapes={i: f.shape for i, f in facts.items()})
    lowest = Proposal(
        name="lowest", plan=planner.lowest(), time_s=math.inf, error=sensitivity.total
    )
    return PlanSearch(
        device=device,
        emulation=emulation,
        planner=planner,
        ids={n.name: n.id for n in device.prepared.graph.nodes},
        proposals=[*propose(planner, units, points, cost, sensitivity), lowest],
        probes=sensitivity.probes,
    )


def _by_name(device: DeviceModel, prepared: Prepared) -> dict[int, ValueFacts]:
    """Facts of the emulated model's values, by the ids of the planner's."""
    values = device.prepared.graph.values
    names = {v.name: v.id for v in prepared.graph.values}
    return {
        names[values[i].name]: f for i, f in device.facts.items() if values[i].name in names
    }
