"""An ONNX model on a device that is not here: accuracy by its emulator, time by its roofline.

Law: nothing of what is said of the device was measured on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from finecast.devices.emulation import Emulation
from finecast.engines.base import Feeds, Session
from finecast.engines.emulator import exact_session
from finecast.engines.emulator.model import Setting
from finecast.engines.probe import Speed
from finecast.errors import UsageError
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import OnnxFile
from finecast.measure.timing import Latency
from finecast.numbers.formats import Format
from finecast.ops import OpKind
from finecast.pipeline.cached_session import Remembered
from finecast.pipeline.conversion import kept_notes
from finecast.pipeline.device import DeviceModel, PlanSearch, search_plans
from finecast.pipeline.subject import Built, UserRules
from finecast.pipeline.workload import Workload
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.proposing import MAX_STEPS
from finecast.progress import Progress, silent
from finecast.rules.policy import Policy
from finecast.subjects.onnx import OnnxBuilt

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(slots=True, kw_only=True)
class EmulatedSubject:
    """An ONNX model on the device of ``emulation``."""

    file: OnnxFile
    emulation: Emulation
    truth: Session | None = None
    told: tuple[str, ...] = ()
    max_steps: int = MAX_STEPS
    reference: Session = field(init=False)
    _device: DeviceModel | None = field(default=None, init=False)
    _search: PlanSearch | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Load the fp32 model; metrics that compare with it run it on the same data again."""
        self.reference = Remembered(exact_session(self.file.path))

    @property
    def name(self) -> str:
        """The file as it was named."""
        return self.file.name

    @property
    def digest(self) -> str:
        """Of the file and its external data."""
        return self.file.digest

    @property
    def size_bytes(self) -> int:
        """Of the file and its external data."""
        return self.file.size_bytes

    @property
    def target(self) -> str:
        """The device."""
        return self.emulation.target.name

    @property
    def original(self) -> ir.Model:
        """The fp32 model."""
        return self.file.model

    @property
    def runner(self) -> str:
        """The device and what of it touches numbers: trials of others do not count."""
        parts = (
            self.target,
            self.emulation.rounding.value,
            self.emulation.seed,
            self.emulation.mixed_accumulation,
            self.emulation.saturate_infinity,
        )
        return ":".join(("emulator", *map(str, parts)))

    def check(self, policy: Policy) -> None:
        """Refuse formats that the device has no arithmetic for, and names of nothing."""
        rates = self.emulation.target.engine_for(OpKind.MATMUL)
        for low in policy.formats:
            if rates.computes_in(low) is None:
                raise UsageError(
                    f"{self.target} has no {low.label} arithmetic",
                    where="--auto-cast-type",
                    fix=f"use one of {', '.join(f.label for f in rates.rates_tflops)}",
                )
        frontend.prepare(self.file, policy)

    def speed(self, fmt: Format) -> Speed:
        """By the data sheet."""
        return Speed(gains=True, text=f"{self.target} computes in {fmt.label}")

    def first_nan(self, workload: Workload) -> str:
        """By a run that shows all values."""
        return self._model(workload, self.emulation, silent).first_nonfinite

    def examine(
        self, policy: Policy, user_rules: UserRules, workload: Workload, progress: Progress
    ) -> PlanSearch:
        """Facts by the fp32 model, then the rules; ``low`` ops compute as the device does."""
        emulation = replace(self.emulation, format=policy.format)
        device = self._model(workload, emulation, progress)
        self._device = device
        self._search = search_plans(device, emulation, policy, tuple(user_rules))
        return self._search

    def _model(
        self, workload: Workload, emulation: Emulation, progress: Progress
    ) -> DeviceModel:
        return DeviceModel(
            file=self.file,
            workload=workload,
            emulation=emulation,
            reference=self.reference,
            truth=self.truth,
            progress=progress,
        )

    def notes(self, planner: Planner) -> Sequence[str]:
        """Of the file, and of ops that keep a type of their own."""
        return (*self.told, *kept_notes(planner.graph, planner.policy))

    def build(self, plan: Plan) -> OnnxBuilt:
        """The model that the device's compiler would be handed."""
        return OnnxBuilt(plan=plan, applied=frontend.apply(self.file, plan))

    def session(self, built: Built) -> Session:
        """As the device would run it."""
        assert isinstance(built, OnnxBuilt)
        assert self._search is not None
        return self._search.session(built.plan).restart()

    def times(
        self, models: Mapping[str, Built | None], workload: Workload, min_time_s: float
    ) -> dict[str, Latency]:
        """By the roofline: one sample each."""
        del workload, min_time_s
        search, device = self._search, self._device
        assert search is not None
        assert device is not None
        found: dict[str, Latency] = {}
        for name, built in models.items():
            if built is None:
                seconds = device.time_s(search.emulation, Setting())
            else:
                assert isinstance(built, OnnxBuilt)
                seconds = search.time_s(built.plan)
            found[name] = Latency(samples_s=(seconds,))
        return found

    def feeds(self, workload: Workload) -> Sequence[Feeds]:
        """Those that the errors of single roundings are taken on."""
        del workload
        assert self._device is not None
        return self._device.feeds
