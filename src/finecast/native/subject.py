"""A model joined with what runs it, as the search asks for it.

The search knows these classes and no frontend or engine by name. A class of a frontend states
what differs from the defaults here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from finecast.data.workload import Workload
from finecast.engines.base import Engine, Feeds, KernelTime, Session
from finecast.engines.exact import Exact
from finecast.engines.probe import Speed
from finecast.errors import EngineError, Unfit, UsageError
from finecast.measure.environment import environment
from finecast.measure.racing import Effort, Race
from finecast.measure.study import Study
from finecast.native.orders import OrderSpread
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis
from finecast.planning.proposing import MAX_STEPS
from finecast.plugin import title_of
from finecast.progress import Progress
from finecast.rules import UserRule
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Adjust, Policy

if TYPE_CHECKING:
    from finecast.native.engine_times import EngineTime
    from finecast.native.model import OpenedModel

UserRules = Sequence[tuple[str, UserRule]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a model to run is made from: its plan, or an engine's hint.

    Or it is the model that the fp32 one was made from, as it is.
    """

    plan: Plan
    is_original: bool = False
    hint: Format | None = None


@dataclass(slots=True, kw_only=True)
class Built:
    """The model that a plan gives, in its frontend's form.

    Attributes:
        plan: The plan that it was built from.
        size_bytes: Bytes of the model where it is stored.
        casts: Number of casts, without those of the model's inputs and outputs, and without
            those that an engine puts in by itself.
        loaded: Its session, once it was run.
        stays_loaded: Whether ``release`` leaves it loaded: it is timed again at the end.
        unfit: The ops that the engine did not run as planned where it was to be timed.
    """

    model: Any
    plan: Plan
    size_bytes: int
    casts: int = 0
    loaded: Session | None = field(default=None, repr=False)
    stays_loaded: bool = False
    unfit: Unfit = field(default_factory=dict[str, tuple[str, str]])

    @property
    def origin(self) -> Origin:
        """What it is made from."""
        return Origin(plan=self.plan, is_original=isinstance(self.model, Path))

    def dropped(self, error: EngineError) -> str:
        """A note that the engine does not run it, by the formats of its ops."""
        formats = ", ".join(f"{count} {label}" for label, count in self.plan.counts.items())
        return f"a plan was dropped ({formats}): {error.what}"

    def release(self) -> None:
        """Unload what was loaded to run it."""
        if not self.stays_loaded:
            self.loaded = None


@dataclass(slots=True, kw_only=True)
class Hinted(Built):
    """The fp32 model under an engine's precision hint; ``plan`` states what it lowers there.

    Attributes:
        format: The format of the hint.
        exact: ``plan`` with those products in fp32 whose results the engine leaves unrounded.
            A low product in a model rounds its result.
    """

    format: Format
    exact: Plan
    stays_loaded: bool = True

    @property
    def origin(self) -> Origin:
        """The hint."""
        return Origin(plan=self.plan, hint=self.format)

    @property
    def choices(self) -> tuple[tuple[str, Plan], ...]:
        """Names and plans of what the engine lowers under the hint."""
        fewer = "the hint's formats, fp32 for products with fp32 results"
        return ("the hint's formats", self.plan), (fewer, self.exact)


class Examined(ABC):
    """A subject whose every op the rules have judged under one policy.

    ``planner`` makes plans that the rules permit.
    """

    planner: Planner

    @property
    def observed(self) -> Mapping[int, ValueFacts]:
        """What calibration data showed of the model's values, by id; none if not observed."""
        return {}

    def prior(self, *, of_time: bool = True) -> Analysis | None:
        """``analysis`` with the error of all ops in a format shared out evenly over them.

        None where that error is not known without a probe of each op, or where the errors of
        single ops are known from an earlier run.

        Args:
            of_time: Whether plans are chosen by time.

        Raises:
            EngineError: If no plan in a low format can be run at all.
        """

    def outline(self, formats: Collection[Format], *, of_time: bool = True) -> Analysis:
        """``prior``, with the ops of the largest errors in ``formats`` found by few probes.

        It explains a plan. Other plans are not chosen by it.

        Raises:
            EngineError: If a probe fails.
        """
        raise NotImplementedError("there is no prior")

    @abstractmethod
    def analysis(
        self, *, of_time: bool = True, lost: Mapping[Format, float] = MappingProxyType({})
    ) -> Analysis:
        """Units, their times and the errors of rounding, measured or modelled.

        Args:
            of_time: Whether plans are chosen by time. If not, a format that gains none stays,
                as it may make the model smaller.
            lost: The share of what may be lost that all ops in a format lose, where that was
                measured. If it is small, the error of all of them is shared out evenly, where
                there is a ``prior``.

        Raises:
            EngineError: If no plan in a low format can be run at all.
        """

    @abstractmethod
    def without(self, unfit: Unfit) -> Self:
        """This without formats in which ops turned out not to run as planned.

        Raises:
            EngineError: If the user left such an op no other format.
        """

    @property
    def adjusts(self) -> Collection[Adjust]:
        """The kinds of adjustments that a plan's operands can have."""
        return ()

    def rounded_error(self, plan: Plan) -> float:
        """The relative output error of a plan with scaled values, by arithmetic in fp32."""
        raise NotImplementedError("operands are adjusted where this is")

    def corrected(self, plan: Plan) -> Plan:
        """``plan`` with corrected biases; itself if there are none to correct."""
        return plan


@dataclass(slots=True, kw_only=True)
class Subject(ABC):
    """A model joined with the engine that runs it here, or the emulator of another device.

    Attributes:
        reference: The fp32 model, loaded.
        truth: The fp64 model that the fp32 one was made from, if any: its accuracy is kept.
        told: Notes for the user on how the model was read and run, whatever tuning finds.
        study: Where trials and sensitivities are kept for later runs, if anywhere.
        reused: Labels of the formats whose sensitivities were found there.
        uses_timing_cache: Whether measured times of kernels are taken from the user's timing
            cache and kept there, where kernels are timed at all.
    """

    model: OpenedModel
    reference: Session
    truth: Session | None = None
    told: Sequence[str] = ()
    study: Study | None = None
    reused: tuple[str, ...] = ()
    uses_timing_cache: bool = False

    @property
    @abstractmethod
    def runner(self) -> str:
        """Identifies what runs plans, with every setting that changes numbers."""

    @property
    def runs_in(self) -> str:
        """The engine and its device, ``NAME:DEVICE``; empty if none runs it here."""
        return ""

    @property
    def threads(self) -> int:
        """On how many threads calls are timed."""
        return environment().cores

    def engine_times(self, workload: Workload, *, hint: bool) -> Sequence[EngineTime]:
        """How fast the fp32 model runs here by engine, its own first; empty if that is one.

        Args:
            workload: The calls that are timed.
            hint: Whether the engine's hint for bf16 may be of use.
        """
        return ()

    @property
    def target(self) -> str:
        """The device that is emulated, with modelled times; empty if times are measured."""
        return ""

    @property
    @abstractmethod
    def formats(self) -> tuple[Format, ...]:
        """Low formats that are tried if the user names none, in order of preference."""

    @property
    def kv_caches(self) -> tuple[Format, ...]:
        """Formats, beside fp32, in which a KV cache may be kept by what runs the model."""
        return ()

    @property
    def max_steps(self) -> int:
        """The most plans of the frontier that are built and timed."""
        return MAX_STEPS

    @property
    def compiles(self) -> bool:
        """Whether a plan's model is compiled to be timed, and runs without that.

        Compiling takes far longer than running: plans are then evaluated before it.
        """
        return False

    @property
    def verifiers(self) -> Sequence[Engine]:
        """Engines that verify a model that was tuned here, as it is written."""
        return ()

    def tell(self, *notes: str) -> None:
        """Add notes for the user, each once."""
        self.told = (*dict.fromkeys((*self.told, *notes)),)

    @property
    def untried(self) -> str:
        """What is not tried where nobody names a format, and how to have it tried."""
        return ""

    @abstractmethod
    def check_formats(self, policy: Policy) -> None:
        """Raise UsageError for a format that the engine or device does not compute in."""

    @abstractmethod
    def speed(self, fmt: Format) -> Speed:
        """Whether a format is faster than fp32, by short probes or the device's data sheet."""

    def first_nan(self, workload: Workload) -> str:
        """The op that first gives NaN or Inf in fp32; empty if none is seen."""
        return ""

    @abstractmethod
    def examine(
        self, policy: Policy, user_rules: UserRules, workload: Workload, progress: Progress
    ) -> Examined:
        """Observe values on calibration data, and let the rules judge every op."""

    @abstractmethod
    def session(self, built: Built) -> Session:
        """A session of a plan's model.

        Raises:
            EngineError: If the engine has no kernels for it.
        """

    def tried(self, built: Built) -> Session:
        """A session of a plan's model for its outputs alone, never to be timed; not kept.

        Raises:
            EngineError: As ``session``.
        """
        return self.session(replace(built))

    def check(self, built: Built, exact: Exact) -> None:
        """Check a loaded model before it is evaluated, by what the fp32 model gives.

        Raises:
            EngineError: If it is wrong in a way in which the metric would not show.
        """

    @abstractmethod
    def times(self, built: Mapping[str, Built], workload: Workload, effort: Effort) -> Race:
        """Each model timed in turns with the fp32 model, the anchor of the race.

        Models that cannot be loaded are left out. Modelled times are given without a spread.
        """

    def kernels(self, built: Built | None, workload: Workload) -> Sequence[KernelTime]:
        """The kernels in which a plan's model runs, or the fp32 model for None.

        Empty where the engine does not tell.
        """
        return ()

    def feeds(self, workload: Workload) -> Sequence[Feeds]:
        """The inputs on which the output error of a plan is measured."""
        return workload.compared()

    def told_on(self, workload: Workload) -> Sequence[Feeds]:
        """The inputs on which errors are predicted, and those of the result measured."""
        return self.feeds(workload)

    def exact(self, workload: Workload, calls: Sequence[Feeds]) -> Exact:
        """The fp32 model's outputs on ``calls``, those that ``workload`` names."""
        return Exact.of(self.reference, calls, workload.of, workload.slices)

    def spread(
        self,
        plan: Plan,
        workload: Workload,
        keeps: Callable[[float], bool],
        progress: Progress,
    ) -> OrderSpread:
        """Metric and error of a plan's model over orders of summation.

        ``keeps`` says whether a metric keeps the criterion. Here none is tried: the engine has
        the order that it will have.
        """
        return OrderSpread()

    def made_from(self, origin: Origin) -> Built:
        """The model of an origin, as another process of the same subject made it there.

        Raises:
            ModelError, EngineError: If it cannot be made.
        """
        return self.model.build(origin.plan)

    def hints(self, planner: Planner) -> Sequence[Hinted]:
        """The model under each precision hint of the engine, if it has any.

        Each can be run and timed like the model of a plan. A hint under which the engine
        lowers nothing, or cannot run the model, is left out.
        """
        return ()

    def by_hint(self, plan: Plan) -> Plan | None:
        """``plan`` stated by the engine's hint instead of by casts; None if it cannot be."""
        return None

    def original(self, planner: Planner) -> Built | None:
        """The model that the fp32 one was made from, quantized by another tool and faster.

        None if there is none to compare with, or it does not run.
        """
        return None

    def check_streams(self) -> None:
        """Raise UsageError if requests run one at a time."""
        where = self.target or title_of(self.runner)
        raise UsageError(
            f"{where} is run with one request at a time here: its throughput is not measured",
            where="--objective throughput",
            fix="use --objective latency, or a model that OpenVINO or ONNX Runtime runs",
        )

    def streamed(self, built: Mapping[str, Built], workload: Workload, effort: Effort) -> Race:
        """Each model timed in turns with the fp32 model, with many requests in flight.

        The engine decides how many. A time is that of all requests divided by their number.
        """
        raise NotImplementedError("check_streams refuses it")

    def stream_session(self, built: Built) -> Session:
        """A session of a plan's model in the configuration that ``streamed`` times.

        Raises:
            EngineError: If the engine has no kernels for it.
        """
        raise NotImplementedError("check_streams refuses it")
