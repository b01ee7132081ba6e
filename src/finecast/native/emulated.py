"""A model on a device that is not here: accuracy by its emulator, time by its roofline.

It is judged, probed and searched as on an engine of this machine. What differs is who answers:
a plan's session is its emulation, and a race states modelled times. Law: nothing is measured
on the device itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from finecast.data.workload import Workload
from finecast.devices.emulation import Emulation, Setting
from finecast.engines.base import Feeds, KernelTime, Session
from finecast.engines.emulator import EmulatorEngine
from finecast.engines.emulator.session import (
    EmulatorSession,
    check_emulation,
    plan_session,
)
from finecast.engines.exact import CachedSession, Exact
from finecast.engines.probe import Speed, speed_of
from finecast.frontends.prepared import PreparedModel
from finecast.graph import Graph
from finecast.measure.racing import Effort, Race
from finecast.native.device import DeviceModel
from finecast.native.engine_subject import EngineExamined, EngineSubject
from finecast.native.observing import observe, unseen
from finecast.native.orders import OrderSpread
from finecast.native.roundings import Times
from finecast.native.source import AS_IT_IS, Source
from finecast.native.subject import Built, UserRules
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounding
from finecast.ops.patterns import activation_kernels, bias_kernels, merged, norm_kernels
from finecast.planning.cost import RooflineCost
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.progress import Progress
from finecast.rules.facts import ValueFacts, facts_in
from finecast.rules.policy import Adjust, Policy


@dataclass(slots=True, kw_only=True)
class EmulatedSubject(EngineSubject):
    """A model on the device that ``engine`` emulates."""

    engine: EmulatorEngine  # pyright: ignore[reportIncompatibleVariableOverride]
    reference: Session = field(init=False)
    device: DeviceModel | None = field(default=None, init=False)
    emulation: Emulation = field(init=False)

    def __post_init__(self) -> None:
        """Load the fp32 model, cached: metrics that compare with it run it often."""
        self.reference = CachedSession(self.model.reference())
        self.emulation = self.engine.emulation

    @property
    def target(self) -> str:
        """The name of the device."""
        return self.engine.device

    @property
    def formats(self) -> tuple[Format, ...]:
        """The device's low formats that the model can state as the device rounds to them."""
        stated = set(self._plain.states)
        if self.emulation.rounding is not Rounding.NEAREST_EVEN:
            stated.discard(Format.TF32)  # stated by arithmetic, which rounds to nearest
        return tuple(f for f in self.emulation.target.low_formats if f in stated)

    @property
    def runner(self) -> str:
        """The device and every setting that changes numbers, to tell trials apart."""
        parts = (
            self.target,
            self.emulation.rounding.value,
            self.emulation.seed,
            self.emulation.mixed_accumulation,
            self.emulation.saturate_infinity,
        )
        return ":".join(("emulator", *map(str, parts)))

    def speed(self, fmt: Format) -> Speed:
        """Whether the device has arithmetic in ``fmt``, by its data sheet."""
        return speed_of(self.engine, fmt)

    def examine(
        self, policy: Policy, user_rules: UserRules, workload: Workload, progress: Progress
    ) -> EngineExamined:
        """Observe the fp32 model, then let the rules judge for the device."""
        self.emulation = replace(self.emulation, format=policy.format)
        return EngineSubject.examine(self, policy, user_rules, workload, progress)

    def judged(self, **parts: Any) -> EngineExamined:
        """The model as the rules judged it for the device."""
        return OnDevice(subject=self, **parts)

    def observed(
        self, prepared: PreparedModel, workload: Workload, progress: Progress
    ) -> Mapping[int, ValueFacts]:
        """Facts of the model as it is emulated, whose ops may be written out in steps."""
        device = DeviceModel(
            program=self.model.program(self.emulation),
            workload=workload,
            reference=self.reference,
        )
        self.device = device
        facts = facts_in(prepared.graph, device.facts, device.graph)
        return facts | unseen(prepared, lambda: device.feeds)

    def original(self, planner: Planner) -> Built | None:
        """None: a quantized model is another one on the device."""

    def session(self, built: Built) -> Session:
        """A plan's model as the device would run it."""
        program = self._device.program
        return program.plan_session(built.plan, self.emulation).restart()

    def spread(
        self,
        plan: Plan,
        workload: Workload,
        keeps: Callable[[float], bool],
        progress: Progress,
    ) -> OrderSpread:
        """Metric and error over orders of summation, as the device may have any of them."""
        reference = self.truth or self.reference
        trials = self._device.order_trials(workload, reference, progress)
        session = partial(self._device.program.plan_session, plan)
        return trials.spread(session, self.emulation, keeps)

    def tried(self, built: Built) -> Session:
        """The same: nothing is compiled, and no engine can crash."""
        return self.session(built)

    def times(self, built: Mapping[str, Built], workload: Workload, effort: Effort) -> Race:
        """Times by the roofline."""
        device, emulation = self._device, self.emulation
        seconds = {n: device.plan_time_s(emulation, one.plan) for n, one in built.items()}
        return Race.stated(device.time_s(emulation, Setting()), seconds)

    def kernels(self, built: Built | None, workload: Workload) -> Sequence[KernelTime]:
        """None: the device is not here."""
        return ()

    def feeds(self, workload: Workload) -> Sequence[Feeds]:
        """The calibration feeds, on which the errors of single roundings are measured."""
        return self._device.feeds

    def told_on(self, workload: Workload) -> Sequence[Feeds]:
        """The same."""
        return self.feeds(workload)

    @property
    def _device(self) -> DeviceModel:
        assert self.device is not None  # ``examine`` made it
        return self.device


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevice(EngineExamined):
    """A model whose every op the rules have judged for a device."""

    subject: EmulatedSubject

    @property
    def adjusts(self) -> Collection[Adjust]:
        """None for a device: what adjustments gain is measured in engines."""
        return ()

    def probed(self, calls: Sequence[Feeds], count: int) -> Sequence[Feeds]:
        """All of them; the first where rows are matched, which is done within a call."""
        return calls[:1] if self.subject.reference.free else calls

    def times(self, exact: Exact, *, of_time: bool) -> Times:
        """Times by the roofline."""
        graph = self.planner.graph
        kernels = merged(bias_kernels(graph) + activation_kernels(graph) + norm_kernels(graph))
        shapes = {i: f.shape for i, f in self.facts.items()}
        cost = RooflineCost(target=self.subject.emulation.target, shapes=shapes)
        return Times.modelled(self.planner, cost, kernels, kernels)

    @property
    def device(self) -> DeviceModel:
        """The model on the device."""
        assert self.subject.device is not None
        return self.subject.device


@dataclass(slots=True, kw_only=True)
class Program:
    """A model that engines run, in the form that a device's emulator takes: here as it is.

    ``prepared`` is the ``PreparedModel`` that is emulated.
    """

    source: Source
    emulation: Emulation
    prepared: Any = field(init=False)

    def __post_init__(self) -> None:
        """Read the graph.

        Raises:
            UsageError: If ``emulation`` has options that are not emulated here.
        """
        self.prepared = self.source.prepare(AS_IT_IS)
        check_emulation(self.emulation, self.prepared.library)

    @property
    def graph(self) -> Graph:
        """The emulated graph, in which a library may write out what a device does in steps."""
        return self.prepared.graph

    def observe(self, feeds: Sequence[Feeds]) -> dict[int, ValueFacts]:
        """Facts of the fp32 model's values, by id in ``graph``."""
        return observe(self.prepared, lambda: feeds)

    def session(
        self, emulation: Emulation, setting: Setting, *, switched: bool = False
    ) -> EmulatorSession:
        """The model as the device runs it under ``setting``.

        A ``switched`` session takes other settings later; here it is built anew for each.
        """
        copy = self.prepared.roundable
        return EmulatorSession(copy=copy, emulation=emulation, setting=setting)

    def formats(self, plan: Plan) -> dict[int, Format]:
        """The plan's formats by id in ``graph``; each step of an op has the op's format."""
        ids = {n.name: n.id for n in self.graph.nodes}
        return {ids[name]: fmt for name, fmt in plan.formats.items()}

    def plan_session(self, plan: Plan, emulation: Emulation) -> EmulatorSession:
        """The model of a plan as the device runs it."""
        copy = partial(self.source.roundable, plan.policy, plan.adjustments)
        return plan_session(copy, plan, emulation)
