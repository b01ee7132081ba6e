"""What the emulation of a device needs of a model, whatever its library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from finecast.devices.emulation import Emulation
from finecast.devices.setting import Setting
from finecast.engines.base import EmulatedSession, Feeds
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.subject import Examined
from finecast.planning.plan import Plan
from finecast.progress import Progress
from finecast.rules import UserRule
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy


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
