"""A model in TensorFlow, here: accuracy and times are measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from finecast.engines.base import Feeds, Session
from finecast.engines.probe import Speed, speed_of
from finecast.engines.tensorflow import TensorFlowEngine
from finecast.errors import EngineError
from finecast.measure.racing import Effort, Race
from finecast.numbers.formats import Format
from finecast.pipeline.roundings import analysis_of, find_units, probe_sensitivity
from finecast.pipeline.subject import Built, UserRules
from finecast.pipeline.workload import Workload, run_all, thinned
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis
from finecast.planning.proposing import MAX_STEPS
from finecast.progress import Progress
from finecast.rules.facts import ValueFacts, first_nonfinite
from finecast.rules.policy import Policy
from finecast.subjects.tensorflow.hint import LoweredByGrappler, lowered_models
from finecast.subjects.tensorflow.observing import observe, switched_probe
from finecast.subjects.tensorflow.planning import make_planner, measured_cost, profile_ends
from finecast.subjects.tensorflow.source import (
    TensorFlowBuilt,
    TensorFlowSource,
    check_formats,
)


@dataclass(slots=True, kw_only=True)
class TensorFlowSubject:
    """A model in ``engine``, where ``reference`` is the fp32 model, loaded.

    ``timed`` are the feeds of the workload that was examined last.
    """

    model: TensorFlowSource
    engine: TensorFlowEngine
    reference: Session
    truth: Session | None = None
    told: tuple[str, ...] = ()
    target: str = ""
    max_steps: int = MAX_STEPS
    formats: tuple[Format, ...] = (Format.BF16,)
    timed: Sequence[Feeds] = ()

    @property
    def runner(self) -> str:
        """The engine."""
        return self.engine.name

    def check_formats(self, policy: Policy) -> None:
        """Those that TensorFlow's ops compute in."""
        check_formats(policy)

    def speed(self, fmt: Format) -> Speed:
        """By short probes."""
        return speed_of(self.engine, fmt)

    def first_nan(self, workload: Workload) -> str:
        """By a run that shows all values."""
        captured = self.model.captured
        facts = observe(captured, lambda: islice(workload.calibration(), 1))
        return first_nonfinite(captured.graph, facts) or ""

    def examine(
        self, policy: Policy, user_rules: UserRules, workload: Workload, progress: Progress
    ) -> TensorFlowExamined:
        """Facts by calibration, then the rules."""
        self.timed = workload.timing()
        facts = observe(
            self.model.captured,
            workload.calibration,
            on_step=lambda done, total: progress("calibration", done, total),
        )
        planner = make_planner(
            self.model.captured,
            policy,
            self.engine,
            facts=facts,
            user_rules=user_rules,
            measured=True,
        )
        return TensorFlowExamined(
            subject=self, facts=facts, planner=planner, workload=workload, progress=progress
        )

    def hints(self, planner: Planner) -> Sequence[LoweredByGrappler]:
        """Under Grappler's automatic mixed precision, what a user would try instead."""
        if not self.timed:
            return ()
        model = self.model
        try:
            found = lowered_models(
                model.model, model.size_bytes, self.engine, planner, self.timed[0]
            )
            return tuple(found)
        except EngineError:
            return ()

    def session(self, built: Built) -> Session:
        """Loaded once."""
        if isinstance(built, LoweredByGrappler):
            return built.loaded
        assert isinstance(built, TensorFlowBuilt)
        if built.loaded is None:
            built.loaded = self.engine.open(built.model)
        return built.loaded

    def times(self, built: Mapping[str, Built], workload: Workload, effort: Effort) -> Race:
        """All on the workload's timing feeds."""
        timing = workload.timing()
        calls: dict[str, Callable[[], object]] = {}
        for name, one in built.items():
            try:
                session = self.session(one)
                session.run(timing[0])  # a kernel that is missing shows as it runs
                calls[name] = partial(run_all, session, timing)
            except EngineError as error:
                note = f"a plan was dropped: {error.what}"
                self.told = (*dict.fromkeys((*self.told, note)),)
        return Race.of(partial(run_all, self.reference, timing), calls, effort)

    def feeds(self, workload: Workload) -> Sequence[Feeds]:
        """Those that are timed."""
        return workload.timing()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFlowExamined:
    """A model whose values were observed, and its planner."""

    subject: TensorFlowSubject
    facts: Mapping[int, ValueFacts]
    planner: Planner
    workload: Workload
    progress: Progress

    def analysis(self) -> Analysis:
        """Times by profiles of the fp32 model and of the lowest plans; errors by probing."""
        subject, planner = self.subject, self.planner
        captured, engine = subject.model.captured, subject.engine
        self.progress("profile", 0, 1)
        profiles = profile_ends(captured, planner, engine, self.workload.timing()[0])
        cost = measured_cost(planner.graph, profiles, engine, self.facts)
        self.progress("profile", 1, 1)
        units, points = find_units(planner, profiles)
        few = thinned(next(iter(self.workload.calibration())), subject.reference.inputs)
        prober = partial(switched_probe, captured, feeds=[few])
        errors = probe_sensitivity(planner, points, prober, self.progress)
        return analysis_of(planner, units, points, errors, cost, lowest_s=profiles.low_s)
