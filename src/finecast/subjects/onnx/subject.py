"""An ONNX model in an engine that is here: accuracy and times are measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from finecast.engines.base import Engine, Feeds, Session
from finecast.engines.integers import INTEGER_ENGINES
from finecast.engines.loading import load_model
from finecast.engines.probe import Speed, speed_of
from finecast.errors import EngineError
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import Applied, OnnxFile, Prepared
from finecast.measure.timing import Latency, latency
from finecast.numbers.formats import Format
from finecast.pipeline.subject import Built, UserRules
from finecast.pipeline.workload import Workload, run_all, thinned
from finecast.planning.edits import cast_count
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.proposing import MAX_STEPS, Analysis
from finecast.progress import Progress
from finecast.rules.facts import ValueFacts, first_nonfinite
from finecast.rules.policy import Policy, Scope
from finecast.subjects.onnx.conversion import kept_notes
from finecast.subjects.onnx.integers import check_on_integers, narrowed
from finecast.subjects.onnx.observing import observe
from finecast.subjects.onnx.planning import make_planner, measured_cost, profile_ends
from finecast.subjects.onnx.roundings import analysis_of, find_units, probe_sensitivity

if TYPE_CHECKING:
    import onnx_ir as ir


_REPEATS = 7
_WARMUP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxBuilt:
    """An ONNX model that a plan gives."""

    plan: Plan
    applied: Applied

    @property
    def model(self) -> ir.Model:
        """The model."""
        return self.applied.model

    @property
    def casts(self) -> int:
        """Casts inside."""
        return cast_count(self.applied.graph, self.applied.edits)

    @property
    def size_bytes(self) -> int:
        """Bytes of the model and its tensors."""
        return frontend.size_bytes(self.applied.model)


@dataclass(slots=True, kw_only=True)
class OnnxSubject:
    """An ONNX model in ``engine``, where ``reference`` is the fp32 model, loaded."""

    file: OnnxFile
    engine: Engine
    reference: Session
    truth: Session | None = None
    told: tuple[str, ...] = ()
    target: str = ""
    max_steps: int = MAX_STEPS
    _prepared: tuple[Policy, Prepared] | None = field(default=None, init=False)
    _dropped: dict[str, str] = field(default_factory=dict[str, str], init=False)

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
    def formats(self) -> tuple[Format, ...]:
        """bf16, and int8 where plans are made for it."""
        integers = (Format.INT8,) if self.engine.name in INTEGER_ENGINES else ()
        return (Format.BF16, *integers)

    @property
    def runner(self) -> str:
        """The engine."""
        return self.engine.name

    @property
    def original(self) -> ir.Model:
        """The fp32 model."""
        return self.file.model

    def check(self, policy: Policy) -> None:
        """Names that match nothing are refused as the model is prepared."""
        self.prepare(policy)

    def prepare(self, policy: Policy) -> Prepared:
        """The model as ``policy`` plans it; that of the last policy is kept."""
        if self._prepared is None or self._prepared[0] != policy:
            self._prepared = (policy, frontend.prepare(self.file, policy))
        return self._prepared[1]

    def speed(self, fmt: Format) -> Speed:
        """By short probes of the engine."""
        return speed_of(self.engine, fmt)

    def first_nan(self, workload: Workload) -> str:
        """By a run that shows all values."""
        prepared = self.prepare(Policy(scope=Scope.NONE))
        facts = observe(prepared, lambda: islice(workload.calibration(), 1))
        return first_nonfinite(prepared.graph, facts) or ""

    def examine(
        self, policy: Policy, user_rules: UserRules, workload: Workload, progress: Progress
    ) -> OnnxExamined:
        """Facts by calibration, then the rules."""
        prepared = self.prepare(policy)
        facts = observe(
            prepared,
            workload.calibration,
            on_step=lambda done, total: progress("calibration", done, total),
        )
        planner = make_planner(
            prepared,
            policy,
            self.engine,
            facts=facts,
            user_rules=tuple(user_rules),
            measured=True,
        )
        with suppress(EngineError):  # the analysis meets it again, and says so
            planner = narrowed(self.file, planner, self.engine, workload.timing()[0])
        return OnnxExamined(
            subject=self,
            prepared=prepared,
            facts=facts,
            planner=planner,
            workload=workload,
            progress=progress,
        )

    def notes(self, planner: Planner) -> Sequence[str]:
        """Of the file, of ops that keep a type of their own, and of plans that cannot run."""
        dropped = dict.fromkeys(self._dropped.values())
        return (*self.told, *kept_notes(planner.graph, planner.policy), *dropped)

    def build(self, plan: Plan) -> OnnxBuilt:
        """The plan replayed on the native model."""
        return OnnxBuilt(plan=plan, applied=frontend.apply(self.file, plan))

    def session(self, built: Built) -> Session:
        """Loaded in the engine."""
        return load_model(self.engine, built.model)

    def times(
        self, models: Mapping[str, Built | None], workload: Workload, min_time_s: float
    ) -> dict[str, Latency]:
        """All in turns, on the workload's timing feeds."""
        timing = workload.timing()
        calls: dict[str, Callable[[], object]] = {}
        for name, built in models.items():
            try:
                if isinstance(built, OnnxBuilt):
                    check_on_integers(self.engine, built.plan, built.applied, timing[0])
                session = self.reference if built is None else self.session(built)
            except EngineError as error:
                self._dropped.setdefault(name, f"a plan was dropped: {error.what}")
                continue
            calls[name] = partial(run_all, session, timing)
        return latency(calls, min_time_s=min_time_s, repeats=_REPEATS, warmup=_WARMUP)

    def feeds(self, workload: Workload) -> Sequence[Feeds]:
        """Those that are timed."""
        return workload.timing()


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxExamined:
    """A model whose values were observed, and its planner."""

    subject: OnnxSubject
    prepared: Prepared
    facts: Mapping[int, ValueFacts]
    planner: Planner
    workload: Workload
    progress: Progress

    def analysis(self) -> Analysis:
        """Times by profiles of the fp32 model and of the lowest plans; errors by probing."""
        subject, planner = self.subject, self.planner
        self.progress("profile", 0, 1)
        feeds = self.workload.timing()[0]
        profiles = profile_ends(subject.file, planner, subject.engine, feeds)
        cost = measured_cost(planner.graph, profiles, subject.engine, self.facts)
        self.progress("profile", 1, 1)
        units, points = find_units(planner, profiles)
        few = thinned(next(iter(self.workload.calibration())), subject.reference.inputs)
        errors = probe_sensitivity(planner, self.prepared, points, [few], self.progress)
        return analysis_of(planner, units, points, errors, cost, lowest_s=profiles.low_s)
