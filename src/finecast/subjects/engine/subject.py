"""A model in an engine that is here: accuracy and times are measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final

from finecast.engines.base import Engine, Feeds, Session, StreamingEngine, outputs_on
from finecast.engines.integers import FUSIONS, fuses
from finecast.engines.loading import from_memory, load_model
from finecast.engines.probe import Speed, speed_of
from finecast.errors import EngineError
from finecast.measure.racing import Effort, Race
from finecast.numbers.formats import Format
from finecast.pipeline.measuring import no_streams
from finecast.pipeline.subject import Built, UserRules
from finecast.pipeline.workload import (
    MOST_PROBED_ROWS,
    Workload,
    probed,
    probed_rows,
    run_all,
)
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis
from finecast.planning.proposing import MAX_STEPS
from finecast.planning.sensitivity import squared_error
from finecast.progress import Progress
from finecast.rules.calibration import uncalibrated
from finecast.rules.facts import ValueFacts, first_nonfinite
from finecast.rules.policy import Adjust, Policy, Scope
from finecast.subjects.engine.adjusting import Adjuster
from finecast.subjects.engine.hint import (
    HintedModel,
    OriginalModel,
    hinted_models,
    original_model,
)
from finecast.subjects.engine.integers import (
    check_on_integers,
    computed_otherwise,
    narrowed,
)
from finecast.subjects.engine.native import EngineBuilt, NativeSource, PreparedModel
from finecast.subjects.engine.observing import observe
from finecast.subjects.engine.planning import (
    check_stated,
    make_planner,
    measured_cost,
    profile_ends,
)
from finecast.subjects.engine.roundings import analysis_of, find_units, probe_sensitivity

# Requests that are timed at once, for each that is in flight: of the time that they take
# together, starting the first ones and waiting for the last is a small part.
_REQUESTS_A_STREAM: Final = 8


@dataclass(slots=True, kw_only=True)
class EngineSubject:
    """A model in ``engine``, where ``reference`` is the fp32 model, loaded."""

    model: NativeSource
    engine: Engine
    reference: Session
    truth: Session | None = None
    told: tuple[str, ...] = ()
    target: str = ""
    max_steps: int = MAX_STEPS

    @property
    def formats(self) -> tuple[Format, ...]:
        """bf16, and those of whole numbers where plans are made for them."""
        name, states = self.engine.name, self._plain.states
        coded = (f for f in FUSIONS if fuses(name, f) and f in states)
        return (Format.BF16, *coded)

    @property
    def runner(self) -> str:
        """The engine."""
        return self.engine.name

    def check_formats(self, policy: Policy) -> None:
        """Those that the engine computes in and a model can state."""
        check_stated(policy, self.engine, self._plain)

    def speed(self, fmt: Format) -> Speed:
        """By short probes of the engine."""
        return speed_of(self.engine, fmt)

    def first_nan(self, workload: Workload) -> str:
        """By a run that shows all values."""
        prepared = self._plain
        facts = observe(prepared, lambda: islice(workload.calibration(), 1))
        return first_nonfinite(prepared.graph, facts) or ""

    @property
    def _plain(self) -> PreparedModel:
        """The model as it is."""
        return self.model.prepare(Policy(scope=Scope.NONE))

    def examine(
        self, policy: Policy, user_rules: UserRules, workload: Workload, progress: Progress
    ) -> EngineExamined:
        """Facts by calibration, then the rules."""
        prepared = self.model.prepare(policy)
        facts = observe(
            prepared,
            workload.calibration,
            on_step=lambda done, total: progress("calibration", done, total),
        )
        self.told = (*self.told, *uncalibrated(prepared.graph, policy.formats, facts))
        self._compare_quantized(prepared, workload.timing()[0])
        planner = make_planner(
            prepared,
            policy,
            self.engine,
            facts=facts,
            user_rules=tuple(user_rules),
            measured=True,
        )
        with suppress(EngineError):  # the analysis meets it again, and says so
            planner = narrowed(self.model, planner, self.engine, workload.timing()[0])
        return EngineExamined(
            subject=self,
            prepared=prepared,
            facts=facts,
            planner=planner,
            workload=workload,
            progress=progress,
            adjuster=Adjuster(
                model=prepared, facts=facts, planner=planner, batches=workload.calibration
            ),
        )

    def _compare_quantized(self, prepared: PreparedModel, feeds: Feeds) -> None:
        """Tell if the engine computes what another tool quantized not as it is stated."""
        got = self.reference.run(feeds)
        said = computed_otherwise(
            prepared.graph, self.runner, got, lambda: self.model.reference().run(feeds)
        )
        self.told = (*self.told, *filter(None, [said]))

    def hints(self, planner: Planner) -> Sequence[HintedModel]:
        """Under the precision hints of the engine, where it has some."""
        return tuple(hinted_models(self.model, self.engine, planner))

    def as_given(self, planner: Planner) -> OriginalModel | None:
        """The model before it was taken to fp32, if that runs faster."""
        return original_model(self.model, self.engine, planner)

    def session(self, built: Built) -> Session:
        """Loaded in the engine, once."""
        if isinstance(built, HintedModel | OriginalModel):
            return built.loaded
        assert isinstance(built, EngineBuilt)
        if built.loaded is None:
            built.loaded = load_model(self.engine, built.model)
        return built.loaded

    def times(self, built: Mapping[str, Built], workload: Workload, effort: Effort) -> Race:
        """All on the workload's timing feeds."""
        timing = workload.timing()
        calls: dict[str, Callable[[], object]] = {}
        for name, one in built.items():
            try:
                if isinstance(one, EngineBuilt) and one.loaded is None:
                    check_on_integers(self.engine, one.plan, one.applied, timing[0])
                session = self.session(one)
                session.run(timing[0])  # a kernel that is missing may show only as it runs
                calls[name] = partial(run_all, session, timing)
            except EngineError as error:
                self._drop(error)
        return Race.of(partial(run_all, self.reference, timing), calls, effort)

    def _drop(self, error: EngineError) -> None:
        note = f"a plan was dropped: {error.what}"
        self.told = (*dict.fromkeys((*self.told, note)),)

    def check_streams(self) -> None:
        """Raise UsageError if the engine takes one request at a time."""
        if not isinstance(self.engine, StreamingEngine):
            raise no_streams(self.engine.name)

    def streamed(self, built: Mapping[str, Built], workload: Workload, effort: Effort) -> Race:
        """In the engine, with its own number of requests in flight."""
        engine, timing = self.engine, workload.timing()
        assert isinstance(engine, StreamingEngine)
        anchor = engine.load_streams(self.model.loadable)
        share = max(1, math.ceil(_REQUESTS_A_STREAM * anchor.requests / len(timing)))
        load = list(timing) * share
        calls: dict[str, Callable[[], object]] = {}
        for name, one in built.items():
            try:
                if isinstance(one, HintedModel):
                    streams = engine.load_streams(self.model.loadable, one.fmt)
                else:
                    streams = from_memory(one.model, engine.load_streams)
                calls[name] = partial(streams.serve, load)
            except EngineError as error:
                self._drop(error)
        return Race.of(partial(anchor.serve, load), calls, effort, share=share)

    def feeds(self, workload: Workload) -> Sequence[Feeds]:
        """Those that are timed."""
        return workload.timing()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineExamined:
    """A model whose values were observed, and its planner."""

    subject: EngineSubject
    prepared: PreparedModel
    facts: Mapping[int, ValueFacts]
    planner: Planner
    workload: Workload
    progress: Progress
    adjuster: Adjuster

    def adjusted(self, plan: Plan, kinds: Sequence[Adjust]) -> Plan:
        """Adjusted by what runs on the calibration data show.

        As it was where the model that shows it does not run, which is told.
        """
        try:
            return self.adjuster.adjusted(plan, kinds)
        except EngineError as error:
            note = f"operands were not adjusted: {error.what}"
            self.subject.told = (*dict.fromkeys((*self.subject.told, note)),)
            return plan

    def analysis(self) -> Analysis:
        """Times by profiles of the fp32 model and of the lowest plans; errors by probing."""
        subject, planner = self.subject, self.planner
        self.progress("profile", 0, 1)
        feeds, inputs = self.workload.timing()[0], subject.reference.inputs
        more = probed(self.workload.calibration(), inputs, MOST_PROBED_ROWS)
        exact = outputs_on(subject.reference, more)
        profiles = profile_ends(
            subject.model,
            planner,
            subject.engine,
            feeds,
            output_error=lambda session: squared_error(outputs_on(session, more), exact),
        )
        profiles, slow = profiles.without_gainless()
        note = (f"{fmt.label} gains nothing on this workload: left out" for fmt in slow)
        subject.told = (*subject.told, *note)
        cost = measured_cost(planner.graph, profiles, subject.engine, self.facts)
        self.progress("profile", 1, 1)
        units, points = find_units(planner, profiles)
        errors = probe_sensitivity(
            planner,
            self.prepared,
            points,
            feeds=lambda count: probed(more, inputs, probed_rows(count)),
            progress=self.progress,
            totals=profiles.errors,
        )
        return analysis_of(
            self.prepared, planner, units, points, errors, cost, lowest_s=profiles.low_s
        )
