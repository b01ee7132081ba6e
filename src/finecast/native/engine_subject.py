"""A model in an engine of this machine: accuracy and times are measured."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, Self

from finecast.data.workload import MOST_PROBED_ROWS, Workload, probed, probed_rows
from finecast.engines.base import (
    Capability,
    Engine,
    Feeds,
    KernelTime,
    Loadable,
    Session,
    feeds_for,
)
from finecast.engines.exact import Exact, feeds_digest
from finecast.engines.faults import forgotten_transpose
from finecast.engines.integers import tried_unnamed
from finecast.engines.loading import from_memory, load_all, load_model
from finecast.engines.probe import Speed, speed_of
from finecast.errors import EngineError, Unfit, WrongNumbersError
from finecast.frontends.prepared import PreparedModel
from finecast.measure.environment import environment
from finecast.measure.racing import Effort, Race
from finecast.measure.timing import pass_over
from finecast.measure.timing_cache import TimingCache
from finecast.native.acceptance import Case, Pair, accept
from finecast.native.adjusting import Adjuster, Judged, range_scaled, rounded_error
from finecast.native.baseline import SecondOpinion, differing, mismatch_of
from finecast.native.conversion_notes import plan_notes
from finecast.native.engine_times import EngineTime, engine_times
from finecast.native.hint import by_hint, check_marks, hinted_models, original_model
from finecast.native.integers import (
    check_on_integers,
    check_on_one_thread,
    drop_unfit,
    kernels_of,
)
from finecast.native.observing import observe, observe_for_rules
from finecast.native.planning import (
    Judging,
    check_stated,
    make_planner,
)
from finecast.native.profiles import profile_ends, recalled_speed
from finecast.native.roundings import Times, probe_sensitivity, switched_probe
from finecast.native.source import AS_IT_IS, EngineBuilt, Source
from finecast.native.subject import Built, Examined, Hinted, Origin, Subject, UserRules
from finecast.numbers.formats import Format
from finecast.numbers.thresholds import excused
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.points import Switch, switches
from finecast.planning.problem import Analysis
from finecast.planning.sensitivity import Probe, Sensitivity
from finecast.progress import Progress
from finecast.rules.calibration import uncalibrated
from finecast.rules.facts import ValueFacts, first_nonfinite
from finecast.rules.policy import Adjust, Policy

# Requests that are timed together, for each that is in flight: so many that starting the first
# and waiting for the last take a small part of the time.
_REQUESTS_A_STREAM: Final = 8
# Where all ops in a format lose at most this share of what may be lost, their errors are not
# measured one by one; nor where they keep what may be lost, and their squared error is at most
# the second share of another format's. The loss alone does not tell: of few samples a single
# one may be most of what may be lost.
_HARMLESS: Final = 0.25
_MINOR: Final = 0.25
# Probes that find the op of the largest error among some hundreds, and little more.
_FEW_PROBES: Final = 24


@dataclass(slots=True, kw_only=True)
class EngineSubject(Subject):
    """A model in ``engine``; ``reference`` is the fp32 model, loaded there."""

    model: Source  # pyright: ignore[reportIncompatibleVariableOverride]  # never set anew
    engine: Engine
    profiled: Sequence[KernelTime] = field(default=(), init=False)
    """The fp32 model's kernels, by the profiles that plans were chosen by."""
    _probed: dict[Format, Capability] = field(
        default_factory=dict[Format, Capability], init=False, repr=False
    )

    @property
    def timing_cache(self) -> TimingCache | None:
        """The times of kernels that earlier runs kept; None if none are to be used."""
        if not self.uses_timing_cache:
            return None
        return TimingCache.here(self.engine.name, self.engine.device, tell=self._without_cache)

    def _without_cache(self, why: str) -> None:
        """Go on without the timing cache: it is asked and told of no further time."""
        if self.uses_timing_cache:
            self.uses_timing_cache = False
            self.tell(why)

    @property
    def formats(self) -> tuple[Format, ...]:
        """bf16, and codes that models can state and the engine computes with here."""
        name, states = self.engine.name, self._plain.states
        codes = (f for f in tried_unnamed(name) if f in states)
        return (Format.BF16, *(f for f in codes if self._recalled(f).runs))

    @property
    def kv_caches(self) -> tuple[Format, ...]:
        """Those of the fp32 model's session."""
        return self.reference.kv_caches

    @property
    def untried(self) -> str:
        """What the engine says of it."""
        return self.engine.untried

    @property
    def runner(self) -> str:
        """The engine and its device: another one computes and times otherwise."""
        return self.runs_in

    @property
    def runs_in(self) -> str:
        """The engine, as ``get_engine`` knows it."""
        return self.engine.spec

    @property
    def verifiers(self) -> Sequence[Engine]:
        """The engine."""
        return [self.engine]

    def check_formats(self, policy: Policy) -> None:
        """Raise UsageError for a format that the engine lacks or a model cannot state."""
        for fmt in (f for f in policy.formats if f.has_scales):
            self._recalled(fmt)
        check_stated(policy, self.engine, self._plain)

    def speed(self, fmt: Format) -> Speed:
        """Whether a format is faster than fp32, by short probes of the engine."""
        self._recalled(fmt)
        return speed_of(self.engine, fmt)

    def _recalled(self, fmt: Format) -> Capability:
        """What the engine does in a format: probed once, then known by the cache."""
        if fmt not in self._probed:
            self._probed[fmt] = recalled_speed(self.engine, fmt, self.timing_cache)
        return self._probed[fmt]

    def engine_times(self, workload: Workload, *, hint: bool) -> Sequence[EngineTime]:
        """Those of its engine, and of others that run the model."""
        others = (e for e in self.model.runners(None) if e.name != self.engine.name)
        calls = workload.timing()
        return engine_times(
            self.engine, self.reference, others, self.model.loadable, calls, hint=hint
        )

    def first_nan(self, workload: Workload) -> str:
        """The op that first gives NaN or Inf, by a run that outputs all values."""
        prepared = self._plain
        facts = observe(prepared, lambda: islice(workload.calibration(), 1))
        return first_nonfinite(prepared.graph, facts) or ""

    @property
    def _plain(self) -> PreparedModel:
        """The model prepared without a change."""
        return self.prepared(AS_IT_IS)

    def prepared(self, policy: Policy) -> PreparedModel:
        """The model prepared for ``policy``."""
        return self.model.prepare(policy)

    def examine(
        self, policy: Policy, user_rules: UserRules, workload: Workload, progress: Progress
    ) -> EngineExamined:
        """Observe values on calibration data, then let the rules judge."""
        prepared = self.prepared(policy)
        facts = self.observed(prepared, workload, progress)
        self.tell(*uncalibrated(prepared.graph, policy.formats, facts))
        self._compare_engines(prepared, workload.timing()[0])

        def judge(model: PreparedModel, facts: Mapping[int, ValueFacts]) -> Planner:
            how = Judging(facts=facts, user_rules=user_rules, measured=True)
            return self.fitted(make_planner(model, policy, self.engine, how), workload)

        own = Judged(prepared=prepared, facts=facts, planner=judge(prepared, facts))
        judgement = range_scaled(own, judge)
        return self.judged(
            prepared=judgement.prepared,
            facts=judgement.facts,
            planner=judgement.planner,
            workload=workload,
            progress=progress,
        )

    def fitted(self, planner: Planner, workload: Workload) -> Planner:
        """``planner`` without ops that the engine does not run as planned, which are noted."""
        with suppress(EngineError):  # the analysis runs the same plan and reports it
            planner = drop_unfit(self.model, planner, self.engine, workload.timing()[0])
        self.tell(*plan_notes(planner.lowest()))
        return planner

    def judged(self, **parts: Any) -> EngineExamined:
        """The model as the rules judged it, of these parts."""
        return EngineExamined(subject=self, **parts)

    def observed(
        self, prepared: PreparedModel, workload: Workload, progress: Progress
    ) -> Mapping[int, ValueFacts]:
        """Facts of the model's values on calibration data."""
        return observe_for_rules(
            prepared,
            workload.calibration,
            on_step=lambda done, total: progress("calibration", done, total),
        )

    def _compare_engines(self, prepared: PreparedModel, feeds: Feeds) -> None:
        """Note it if the engine computes the model wrongly as it came: the baseline."""
        got = self.reference.run(feeds)
        note = mismatch_of(self.model, self.engine, prepared.graph, feeds, got)
        second = SecondOpinion.on(self.model, self.engine)
        differs = differing(second, prepared.graph, feeds, got)
        self.tell(*filter(None, (note, differs, forgotten_transpose(prepared.graph))))

    def told_on(self, workload: Workload) -> Sequence[Feeds]:
        """Calibration data, of as many samples as are probed at most."""
        return probed(workload.calibration(), self.reference, MOST_PROBED_ROWS)

    def made_from(self, origin: Origin) -> Built:
        """The model of a plan; the original, or that of a hint, loaded."""
        plan, original = origin.plan, self.model.original
        if origin.is_original and original is not None:
            loaded = self.engine.load(original)
            return Built(model=original, plan=plan, size_bytes=0, loaded=loaded)
        if origin.hint is None:
            return self.model.build(plan)
        return Hinted(
            model=self.model.model,
            plan=plan,
            size_bytes=0,
            loaded=self.engine.load_hinted(self.model.loadable, origin.hint),
            format=origin.hint,
            exact=plan,
        )

    def hints(self, planner: Planner) -> Sequence[Hinted]:
        """The fp32 model under each precision hint of the engine, if it has any."""
        return tuple(hinted_models(self.model, self.engine, planner))

    def original(self, planner: Planner) -> Built | None:
        """The quantized model that the fp32 one was made from, if there is one and it runs."""
        return original_model(self.model, self.engine, planner)

    def session(self, built: Built) -> Session:
        """The session of a plan's model, loaded once."""
        if built.loaded is None:
            built.loaded = load_model(self.engine, built.model)
        return built.loaded

    def tried(self, built: Built) -> Session:
        """A session in the process of dry runs, if it can be."""
        return from_memory(built.model, self.engine.load_tried)

    def times(self, built: Mapping[str, Built], workload: Workload, effort: Effort) -> Race:
        """Time all models on the workload's timing feeds."""
        timing = workload.timing()
        calls: dict[str, Callable[[], object]] = {}

        def load(one: Built) -> None:
            if isinstance(one, EngineBuilt) and one.loaded is None:
                self._check_kernels(one, timing[0])
            self.session(one).run(timing[0])  # a missing kernel may show only in a run

        errors = load_all(self.engine, load, built.values())
        for (name, one), error in zip(built.items(), errors, strict=True):
            if error is None:
                session = self.session(one)
                fed = [feeds_for(session, feeds) for feeds in timing]
                calls[name] = pass_over(session, fed)
        race = Race.of(pass_over(self.reference, timing), calls, effort)
        failed = dict(zip(built, errors, strict=True)) | race.failed
        for name, error in failed.items():
            one = built[name]
            one.unfit = error.unfit if error else {}
            # The same plan by casts, if it races, stands for it.
            if error and replace(one.plan, by_hint=False).digest not in built.keys() - {name}:
                self.tell(one.dropped(error))
        return race

    def check(self, built: Built, exact: Exact) -> None:
        """Raise EngineError for a model on codes that is far less exact on one thread."""
        if built.plan.encodings:
            check_on_one_thread(self.engine, built.model, self.session(built), exact)

    def _check_kernels(self, built: EngineBuilt, feeds: Feeds) -> None:
        """Raise EngineError if the engine runs ops of a plan in other formats than planned.

        These are codes, and fp32 under a hint. Where the engine tells its kernels, the session
        that tells them is the one that is timed.
        """
        plan, applied, loaded = built.plan, built.applied, None
        if self.engine.lowers_by_hint and (plan.by_hint or plan.encodings):
            load = partial(self.engine.load_hinted, fmt=Format.FP32)
            loaded = from_memory(built.model, load)
            check_marks(plan, applied.graph, loaded)
        if plan.kv_cache is not Format.FP32:
            loaded = loaded or load_model(self.engine, built.model)
            if not loaded.kv_caches:
                raise EngineError(
                    "the engine keeps no KV cache beside attention in these formats"
                )
        check_on_integers(self.engine, plan, applied, feeds, loaded)
        built.loaded = loaded  # a model that fails a check is not left to race unchecked

    def by_hint(self, plan: Plan) -> Plan | None:
        """The same formats by the engine's own hint and marks on fp32 ops, if possible."""
        return by_hint(self.engine, self._plain, plan)

    def kernels(self, built: Built | None, workload: Workload) -> Sequence[KernelTime]:
        """The kernels of a model by one profile; none if the engine has no profile."""
        if not self.engine.tells_kernels:
            return ()
        if built is None and self.profiled:
            return self.profiled
        try:
            model = self.model.loadable if built is None else built.model
            return kernels_of(self.engine, model, workload.timing()[0])
        except EngineError as error:
            self.tell(f"the kernels of the result are not known: {error.what}")
            return ()

    def check_streams(self) -> None:
        """Raise UsageError if the engine takes one request at a time."""
        if not self.engine.serves_streams:
            Subject.check_streams(self)

    def streamed(self, built: Mapping[str, Built], workload: Workload, effort: Effort) -> Race:
        """Time all models with as many requests in flight as the engine serves best."""
        engine, timing = self.engine, workload.timing()
        anchor = engine.load_streams(self.model.loadable)
        share = max(1, math.ceil(_REQUESTS_A_STREAM * anchor.requests / len(timing)))
        load = list(timing) * share
        calls: dict[str, Callable[[], object]] = {}
        for name, build in built.items():
            try:
                if isinstance(build, Hinted):
                    streams = engine.load_streams(self.model.loadable, build.format)
                else:
                    streams = from_memory(build.model, engine.load_streams)
                calls[name] = partial(streams.serve, load)
            except EngineError as error:
                self.tell(build.dropped(error))
        race = Race.of(partial(anchor.serve, load), calls, effort, share=share)
        self.tell(*(built[name].dropped(error) for name, error in race.failed.items()))
        return race

    def stream_session(self, built: Built) -> Session:
        """A session in the configuration that ``streamed`` times; not kept."""
        engine = self.engine.as_one_stream()
        if isinstance(built, Hinted):
            return engine.load_hinted(self.model.loadable, built.format)
        return load_model(engine, built.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineExamined(Examined):
    """A model whose values were observed, with its planner."""

    subject: EngineSubject
    prepared: PreparedModel
    facts: Mapping[int, ValueFacts]
    planner: Planner
    workload: Workload
    progress: Progress
    _adjuster: Adjuster = field(init=False, repr=False)
    _timed: dict[bool, Times] = field(
        init=False, repr=False, default_factory=dict[bool, Times]
    )
    _exacts: list[Exact] = field(init=False, repr=False, default_factory=list[Exact])

    def __post_init__(self) -> None:
        """Make one adjuster for all plans: it keeps the adjusted ones."""
        adjuster = Adjuster(model=self.prepared, batches=self.workload.calibration)
        object.__setattr__(self, "_adjuster", adjuster)

    @property
    def observed(self) -> Mapping[int, ValueFacts]:
        """The facts."""
        return self.facts

    def without(self, unfit: Unfit) -> Self:
        """This without these formats, and without ops that do not run so then."""
        planner = self.subject.fitted(self.planner.without(unfit), self.workload)
        return replace(self, planner=planner)

    @property
    def adjusts(self) -> Collection[Adjust]:
        """The kinds of adjustments that operands of such models can have."""
        return self.prepared.adjusts

    def rounded_error(self, plan: Plan) -> float:
        """The relative output error of a plan with scaled values, by arithmetic in fp32."""
        subject = self.subject
        return rounded_error(subject.model, subject.feeds(self.workload), plan)

    def corrected(self, plan: Plan) -> Plan:
        """``plan`` with biases corrected by runs on the calibration data.

        If such a run fails, that is noted, and the plan stays as it is.
        """
        try:
            return self._adjuster.corrected(plan)
        except EngineError as error:
            self.subject.tell(f"biases were not corrected: {error.what}")
            return plan

    def analysis(
        self, *, of_time: bool = True, lost: Mapping[Format, float] = MappingProxyType({})
    ) -> Analysis:
        """Times as ``times`` tells them, errors as ``errors`` does."""
        exact = self._exact
        times = self._times(exact, of_time=of_time)
        single = {
            fmt: at
            for fmt, at in times.points.items()
            if not self._is_minor(fmt, lost, times.errors)
        }
        sensitivities = self._known_errors(replace(times, points=single), exact)
        for fmt, sensitivity in sensitivities.items():
            error = math.sqrt(times.errors.get(fmt, 0.0))
            # Which numbers overflow depends on the samples: Inf tells nothing.
            if sensitivity.known and excused(math.sqrt(sensitivity.total)) < error < math.inf:
                self._check_computed(fmt)
        return self._analysis(times, sensitivities)

    def prior(self, *, of_time: bool = True) -> Analysis | None:
        """Times as ``times`` tells them, the errors of the lowest plans that it measures."""
        exact = self._exact
        times = self._times(exact, of_time=of_time)
        errors, study = times.errors, self.subject.study
        if not all(math.isfinite(errors.get(fmt, math.inf)) for fmt in times.points):
            return None
        keys = (self._key(fmt, times, exact) for fmt in times.points)
        if study is not None and all(study.sensitivity(key) is not None for key in keys):
            return None
        return self._analysis(times, {})

    def _analysis(self, times: Times, errors: Mapping[Format, Sensitivity]) -> Analysis:
        """By known errors of single ops, and even ones of the other formats."""
        even = {
            fmt: Sensitivity.even(at, times.errors[fmt])
            for fmt, at in times.points.items()
            if fmt not in errors
        }
        return times.analysis(self.prepared, self.planner, {**even, **errors})

    def outline(self, formats: Collection[Format], *, of_time: bool = True) -> Analysis:
        """Times as ``times`` tells them, the largest errors of single ops."""
        exact = self._exact
        times = self._times(exact, of_time=of_time)
        asked = {fmt: at for fmt, at in times.points.items() if fmt in formats}
        errors = self._errors(replace(times, points=asked), exact, most=_FEW_PROBES)
        return self._analysis(times, errors)

    @property
    def _exact(self) -> Exact:
        """The fp32 model's outputs where errors are predicted; it runs there once."""
        if not self._exacts:
            calls = self.subject.told_on(self.workload)
            self._exacts.append(self.subject.exact(self.workload, calls))
        return self._exacts[0]

    def _times(self, exact: Exact, *, of_time: bool) -> Times:
        """``times``, measured once."""
        if of_time not in self._timed:
            self._timed[of_time] = self.times(exact, of_time=of_time)
        return self._timed[of_time]

    def _check_computed(self, fmt: Format) -> None:
        """Raise WrongNumbersError, which names the op, if the engine computes one wrongly.

        The errors of all ops would be scaled up to explain that of this one. If no op is
        found, that is all that is known of them: whether a plan keeps the criterion is
        measured.
        """
        subject, feeds = self.subject, self.workload.timing()[0]
        built = subject.model.build(self.planner.lowest(fmt))

        def check(written: Loadable) -> None:
            session = subject.tried(built)
            got = session.run(feeds_for(session, feeds))
            wanted = subject.reference.run(feeds)
            pair = Pair(
                source=subject.model, built=built, written=written, engine=subject.engine
            )
            accept(Case(pair=pair, feeds=feeds, random=False, followed={}), got, wanted)

        try:
            from_memory(built.model, check)
        except WrongNumbersError as error:
            if error.unfit:
                raise
        except EngineError:
            pass

    def _is_minor(
        self, fmt: Format, lost: Mapping[Format, float], errors: Mapping[Format, float]
    ) -> bool:
        """Whether it decides nothing which of the ops in a format lose most; if so, a note.

        All together lose little of what may be lost; or they keep it, and their squared error
        is small beside that of another format.
        """
        share, error = lost.get(fmt, math.inf), errors.get(fmt, math.inf)
        most = max(filter(math.isfinite, errors.values()), default=0.0)
        beside = error / most if most else math.inf
        if not math.isfinite(error) or share > (_HARMLESS if beside > _MINOR else 1.0):
            return False
        much = f"{share:.0%} of what may be lost" if share >= 0.005 else "nothing"
        why = f"together lose {much} on the data given"
        if share > _HARMLESS:
            why += f", with {beside:.0%} of the squared error of another format"
        self.subject.tell(
            f"all ops in {fmt.label} {why}: their errors are not measured one by one"
        )
        return True

    def _known_errors(self, times: Times, exact: Exact) -> Mapping[Format, Sensitivity]:
        """The errors, of the study where it has them; what is measured is kept there."""
        study = self.subject.study
        if study is None:
            return self.errors(times, exact)
        keys = {fmt: self._key(fmt, times, exact) for fmt in times.points}
        known = {fmt: study.sensitivity(key) for fmt, key in keys.items()}
        sensitivities = {
            fmt: sensitivity
            for fmt, sensitivity in known.items()
            if sensitivity is not None and sensitivity.fits(times.points[fmt])
        }
        missing = {fmt: at for fmt, at in times.points.items() if fmt not in sensitivities}
        measured = self.errors(replace(times, points=missing), exact) if missing else {}
        for fmt, sensitivity in measured.items():
            study.keep_sensitivity(keys[fmt], sensitivity)
        self.subject.reused = tuple(fmt.label for fmt in sensitivities)
        return {fmt: (sensitivities | dict(measured))[fmt] for fmt in times.points}

    def _key(self, fmt: Format, times: Times, exact: Exact) -> str:
        """A digest of all that the errors of a format depend on."""
        rounded = switches(times.points[fmt], self.planner.permissions, fmt)
        calls = self.probed(exact.calls, len(rounded))
        data = *map(feeds_digest, calls), sorted(exact.counted), exact.axis
        model = self.planner.graph.digest, self.planner.from_type
        parts = model, data, fmt.label, rounded, times.points[fmt].shared, environment()
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def errors(self, times: Times, exact: Exact) -> Mapping[Format, Sensitivity]:
        """Errors by probing each rounding alone."""
        return self._errors(times, exact)

    def _errors(
        self, times: Times, exact: Exact, most: int | None = None
    ) -> Mapping[Format, Sensitivity]:
        def prober(switches: Sequence[Switch]) -> Probe:
            if most is None:
                feeds = self.probed(exact.calls, len(switches))
            else:  # the largest errors stand out on few samples
                feeds = probed(exact.calls, self.subject.reference)
            return switched_probe(self.prepared, switches, feeds)

        return probe_sensitivity(
            self.planner, times.points, prober, self.progress, exact, most=most
        )

    def probed(self, calls: Sequence[Feeds], count: int) -> Sequence[Feeds]:
        """Those calls, or as much of them as is enough for ``count`` roundings."""
        return probed(calls, self.subject.reference, probed_rows(count))

    def times(self, exact: Exact, *, of_time: bool) -> Times:
        """Times by profiles of the fp32 model and of the lowest plans."""
        subject = self.subject
        self.progress("profile", 0, 1)
        profiles = profile_ends(
            subject.model,
            self.planner,
            subject.engine,
            self.workload.timing()[0],
            output_error=lambda session: exact.error(session) ** 2,
            progress=self.progress,
            cache=subject.timing_cache,
        )
        subject.profiled = sorted(profiles.high, key=lambda kernel: -kernel.time_s)
        if of_time:
            profiles, slow = profiles.without_slow_formats()
            for fmt in slow:
                subject.tell(f"{fmt.label} gains nothing on this model and data: skipped")
        return Times.measured(
            self.planner, profiles, subject.engine, self.facts, subject.timing_cache
        )
