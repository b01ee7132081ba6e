"""A model on one emulated device, and what the emulator needs of the model.

Law: a model's time is the roofline's, its metric the emulation's on all data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from finecast.devices.emulation import Emulation, Setting
from finecast.engines.base import EmulatedSession, Feeds, Session
from finecast.engines.exact import Exact
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.modelled import modelled_time_s, plan_time_s
from finecast.pipeline.workload import Workload
from finecast.planning.cost import RooflineCost
from finecast.planning.plan import Plan
from finecast.rules.facts import ValueFacts

CALIBRATION_FEEDS: Final = 8
"""Calibration batches on which output errors are measured."""


@dataclass(slots=True, kw_only=True)
class DeviceModel:
    """A model on a device, with what all its evaluations share: facts and exact outputs.

    Attributes:
        program: The model as the emulator takes it.
        workload: The data.
        reference: The fp32 model.
        feeds: Calibration data.
        facts: Facts of the fp32 model's values, by id in ``graph``.
        exact: The fp32 model's outputs on ``feeds``.
    """

    program: Program
    workload: Workload
    reference: Session
    feeds: Sequence[Feeds] = field(init=False)
    facts: Mapping[int, ValueFacts] = field(init=False)
    exact: Exact = field(init=False)

    def __post_init__(self) -> None:
        """Run the fp32 model on calibration data and observe its values."""
        self.feeds = list(islice(self.workload.calibration(), CALIBRATION_FEEDS))
        self.exact = Exact.of(self.reference, self.feeds, self.workload.of)
        self.facts = self.program.observe(self.feeds)

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
        return self.workload.evaluate(session.restart(), self.reference), errors

    def cost(self, emulation: Emulation) -> RooflineCost:
        """The device's roofline with the observed shapes."""
        shapes = {i: f.shape for i, f in self.facts.items()}
        return RooflineCost(target=emulation.target, shapes=shapes)

    def time_s(self, emulation: Emulation, setting: Setting) -> float:
        """Modelled time of one run under a setting."""
        reads = dict.fromkeys(setting.reads, emulation.format)
        writes = dict.fromkeys(setting.writes, emulation.format)
        cost = self.cost(emulation)
        return modelled_time_s(self.graph, cost, emulation, reads, writes)

    def plan_time_s(self, emulation: Emulation, plan: Plan) -> float:
        """Modelled time of one run of a plan's model."""
        formats = self.program.formats(plan)
        return plan_time_s(self.graph, self.cost(emulation), emulation, formats)


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
