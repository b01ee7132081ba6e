"""What a device's emulation asks of a model, whatever library the model is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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
class Asked:
    """What plans are wanted for: a policy, a device, and what calibration data showed.

    ``measured`` if a plan will be evaluated: then an op's reputation does not count.
    """

    policy: Policy
    emulation: Emulation
    feeds: Sequence[Feeds]
    facts: Mapping[int, ValueFacts]
    progress: Progress
    user_rules: tuple[tuple[str, UserRule], ...] = ()
    measured: bool = True


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

    def examine(self, asked: Asked) -> Examined:
        """Let the rules judge every op of the model that plans are of."""
        ...

    def casts(self, plan: Plan) -> int:
        """The casts that a plan's model has."""
        ...
