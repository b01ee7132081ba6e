"""A model on a device that is not here: accuracy by its emulator, time by its roofline.

Law: nothing is measured on the device itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from finecast.devices.emulation import Emulation, Setting, check_formats
from finecast.engines.base import Engine, Feeds, Session
from finecast.engines.probe import Speed
from finecast.measure.racing import Effort, Race
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounding
from finecast.pipeline.cached_session import CachedSession
from finecast.pipeline.device import DeviceModel, PlanSearch, search_plans
from finecast.pipeline.model import OpenedModel
from finecast.pipeline.subject import Built, Subject, UserRules
from finecast.pipeline.workload import Workload
from finecast.progress import Progress, silent
from finecast.rules.policy import Policy


@dataclass(slots=True, kw_only=True)
class EmulatedSubject(Subject):
    """A model on the device of ``emulation``; ``states`` are formats that models can state."""

    model: OpenedModel  # pyright: ignore[reportIncompatibleVariableOverride]  # never set anew
    emulation: Emulation
    states: Collection[Format]
    reference: Session = field(init=False)
    _search: PlanSearch | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Load the fp32 model, cached: metrics that compare with it run it often."""
        self.reference = CachedSession(self.model.reference())

    @property
    def target(self) -> str:
        """The name of the device."""
        return self.emulation.target.name

    @property
    def formats(self) -> tuple[Format, ...]:
        """The device's low formats that the model can state as the device rounds to them."""
        stated = set(self.states)
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

    @property
    def verifiers(self) -> Sequence[Engine]:
        """The device's emulator."""
        from finecast.engines.emulator import EmulatorEngine

        return [EmulatorEngine(emulation=self.emulation)]

    def check_formats(self, policy: Policy) -> None:
        """Raise UsageError for a format that the device does not compute in."""
        check_formats(self.emulation, policy)

    def speed(self, fmt: Format) -> Speed:
        """Whether the device has arithmetic in ``fmt``, by its data sheet."""
        if self.emulation.target.computes_in(fmt):
            return Speed(gains=True, text=f"{self.target} computes in {fmt.label}")
        return Speed(gains=False, text=f"{self.target} computes {fmt.label} in a wider format")

    def first_nan(self, workload: Workload) -> str:
        """The op that first gives NaN or Inf, by a run that outputs all values."""
        return self._model(workload, self.emulation, silent).first_nonfinite

    def examine(
        self, policy: Policy, user_rules: UserRules, workload: Workload, progress: Progress
    ) -> PlanSearch:
        """Observe the fp32 model, then let the rules judge for the device."""
        emulation = replace(self.emulation, format=policy.format)
        device = self._model(workload, emulation, progress)
        self._search = search_plans(device, emulation, policy, tuple(user_rules))
        return self._search

    def _model(
        self, workload: Workload, emulation: Emulation, progress: Progress
    ) -> DeviceModel:
        return DeviceModel(
            program=self.model.program(emulation),
            workload=workload,
            reference=self.reference,
            truth=self.truth,
            progress=progress,
        )

    def session(self, built: Built) -> Session:
        """A plan's model as the device would run it."""
        assert self._search is not None
        return self._search.session(built.plan).restart()

    def times(self, built: Mapping[str, Built], workload: Workload, effort: Effort) -> Race:
        """Times by the roofline."""
        del workload, effort
        search = self._search
        assert search is not None
        fp32_s = search.device.time_s(search.emulation, Setting())
        return Race.stated(fp32_s, {n: search.time_s(one.plan) for n, one in built.items()})

    def feeds(self, workload: Workload) -> Sequence[Feeds]:
        """The calibration feeds, on which the errors of single roundings are measured."""
        del workload
        assert self._search is not None
        return self._search.device.feeds
