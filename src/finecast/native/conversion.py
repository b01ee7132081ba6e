"""From a model and a policy to a converted model, without tuning."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from finecast.data.sizes import input_specs
from finecast.data.sources import FeedMaker
from finecast.devices.emulation import Emulation
from finecast.devices.targets import load_target
from finecast.engines.base import Engine, Feeds
from finecast.engines.emulator import EmulatorEngine
from finecast.engines.faults import faults, forgotten_transpose
from finecast.engines.integers import fuses
from finecast.engines.probe import drop_slow_formats, speed_of
from finecast.engines.usage import in_memory_notes
from finecast.errors import EngineError, FinecastError, Unfit, UsageError, WrongNumbersError
from finecast.frontends.collection import paused_collection
from finecast.frontends.prepared import AppliedModel, PreparedModel
from finecast.graph import Graph
from finecast.measure.environment import local_target
from finecast.naming import listed
from finecast.native.adjusting import (
    Adjuster,
    Judged,
    corrected_if_it_gains,
    range_scaled,
    rounded_error,
)
from finecast.native.artefact import Converted, Destination
from finecast.native.conversion_notes import (
    NOTHING_GAINS,
    nothing_converted,
    plan_notes,
)
from finecast.native.device import plan_time_s
from finecast.native.gains import Gain, range_gain
from finecast.native.integers import check_calibrated, drop_unfit
from finecast.native.observing import facts_for_rules
from finecast.native.planning import (
    Judging,
    check_stated,
    make_planner,
)
from finecast.native.profiles import profile_ends
from finecast.native.roundings import Times
from finecast.native.source import EngineBuilt, Source, VerifyOn
from finecast.numbers.formats import Format
from finecast.planning.cost import RooflineCost
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis
from finecast.planning.proposing import lowest, propose
from finecast.planning.units import pattern_kernels
from finecast.progress import Progress, silent
from finecast.rules import UserRule
from finecast.rules.calibration import uncalibrated
from finecast.rules.draws import constant_notes, random_notes
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Adjust, Policy, Scope
from finecast.rules.quantized import quantized_notes

# Each turn takes ops out of a format: more turns have not been needed.
_MOST_TURNS: Final = 4
_OTHER_READER: Final = "onnxruntime"
"""The engine that users of an ONNX file may run it in, whichever one it was made for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a conversion is asked for.

    ``unfit`` has what earlier turns showed: ops that the engine does not run as planned.
    """

    policy: Policy
    target: Emulation | None
    data: Sequence[Feeds]
    user_rules: tuple[tuple[str, UserRule], ...]
    unfit: tuple[Unfit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Converter:
    """Converts a model by a policy or a plan, and writes the result.

    Attributes:
        output: Where the converted model goes.
        engines: In order of preference; the first also tells which kernels exist.
        feeds: Makes feeds to verify the model with.
        verify: Whether the model must load and run in one of the engines.
        data: The data on which the decisions inside the models are compared.
        progress: Told of each step that takes long.
        told: Notes for the user, added on the way.
        start: When the work began.
    """

    source: Source
    output: Destination
    engines: Sequence[Engine]
    feeds: FeedMaker
    verify: bool = True
    data: Callable[[], Iterable[Feeds]] = tuple
    progress: Progress = silent
    told: list[str] = field(default_factory=list[str])
    start: float = field(default_factory=time.perf_counter)

    def convert(
        self,
        policy: Policy,
        *,
        target: Emulation | None = None,
        data: Sequence[Feeds] = (),
        user_rules: tuple[tuple[str, UserRule], ...] = (),
    ) -> Converted:
        """Convert by ``policy`` and write.

        Args:
            policy: What to lower.
            target: A device that is not here; scope ``auto`` then decides by its roofline.
            data: Batches whose observed ranges the rules may use.
            user_rules: The user's rule functions.

        Raises:
            UsageError: If the policy does not fit, or the output cannot be written.
            ModelError: If the model is not valid.
            WrongNumbersError: If its formats do not explain its outputs.
            EngineError: If no engine can load it.
        """
        self.source.check(self.output)
        runner = self.engines[0] if target is None else EmulatorEngine(emulation=target)
        policy, left_out = drop_slow_formats(policy, partial(speed_of, runner), user_rules)
        request = Request(policy=policy, target=target, data=data, user_rules=user_rules)
        done = self._fitted(request)
        notes = dict.fromkeys((*done.warnings, *left_out, *self.told))
        return replace(done, warnings=tuple(notes))

    def _fitted(self, request: Request) -> Converted:
        """The conversion without ops that the engine does not run as planned.

        Raises:
            FinecastError: That of the first conversion, if no op is known to be at fault, or
                one has no other format, or the later conversions fail, too.
        """
        first: FinecastError | None = None
        for _ in range(_MOST_TURNS):
            try:
                return self._converted(request)
            except (EngineError, WrongNumbersError) as error:
                first = first or error
                if not error.unfit:
                    break
                request = replace(request, unfit=(*request.unfit, error.unfit))
        assert first is not None
        raise first

    def _converted(self, request: Request) -> Converted:
        """Convert and write, without what ``request.unfit`` has."""
        source, engine = self.source, self.engines[0]
        policy, target, data = request.policy, request.target, request.data
        with paused_collection():  # graph and plan stay alive: nothing to collect
            prepared = source.prepare(policy)
            check_stated(policy, engine, prepared)
            check_calibrated(policy, data)
            lowers = policy.scope is not Scope.NONE or policy.op_formats
            facts = facts_for_rules(prepared, data, source.examples) if lowers else {}
            judged, plan, gain = self._ranged(prepared, request, facts)
            planner = judged.planner
            adjuster = Adjuster(model=judged.prepared, batches=lambda: data)
            asked, corrected = policy.adjust or (), None
            if Adjust.BIAS in asked:
                plan, corrected = corrected_if_it_gains(plan, adjuster, source, engine, data)
            gained = tuple(filter(None, [gain, corrected]))
            graph = prepared.graph
            built = source.consume(prepared, plan)
        done = replace(self._write(built), gains=gained)
        applied = built.applied
        used = set(plan.formats.values())
        grown = _grown(done, used)
        warnings = (
            *done.warnings,
            *grown,
            *uncalibrated(graph, policy.formats, facts),
            *_warnings(source, planner, applied, used),
            *_one_engine_alone(engine, graph, plan),
            *filter(None, [forgotten_transpose(graph) if plan.opset else ""]),
            *_gainless(asked, gained),
            *plan_notes(built.plan),
        )
        runner = next((e for e in self.engines if e.name == done.verified.engine), None)
        if target is not None:
            runner = EmulatorEngine(emulation=target)
        if applied.edits and runner is not None:
            speeds = (speed_of(runner, fmt) for fmt in policy.formats if fmt in used)
            warnings += tuple(speed.note for speed in speeds if not speed.gains)
        return replace(done, warnings=warnings)

    def _planner(
        self, prepared: PreparedModel, request: Request, facts: Mapping[int, ValueFacts]
    ) -> Planner:
        """The planner, once the rules have judged every op."""
        how = Judging(facts=facts, user_rules=request.user_rules)
        return make_planner(prepared, request.policy, self.engines[0], how)

    def _ranged(
        self, prepared: PreparedModel, request: Request, facts: Mapping[int, ValueFacts]
    ) -> tuple[Judged, Plan, Gain | None]:
        """The plan, in a model whose values are scaled if that gains on the request's data.

        Beside it stands what the scaling does.
        """

        def judge(model: PreparedModel, facts: Mapping[int, ValueFacts]) -> Planner:
            planner = self._planner(model, request, facts)
            for unfit in request.unfit:
                planner = planner.without(unfit)
            return self._without_unfit(planner)

        def chosen(one: Judged) -> Plan:
            return self._choose(one.prepared, one.planner, one.facts, request.target)

        own = Judged(prepared=prepared, facts=facts, planner=judge(prepared, facts))
        scaled, gain = range_scaled(own, judge), None
        if scaled is not own:
            plan = chosen(scaled)
            gain = range_gain(plan, partial(rounded_error, self.source, request.data))
            if gain is None or gain.gains:
                return scaled, plan, gain
        return own, chosen(own), gain

    def _choose(
        self,
        prepared: PreparedModel,
        planner: Planner,
        facts: Mapping[int, ValueFacts],
        target: Emulation | None,
    ) -> Plan:
        """The lowest plan that the rules permit; with scope ``auto`` the fastest one."""
        if planner.policy.scope is not Scope.AUTO:
            return planner.lowest()
        if target is None:
            return _auto_plan(self.source, prepared, planner, self.engines[0], self.feeds)
        shapes = {i: f.shape for i, f in facts.items()}
        cost = RooflineCost(target=target.target, shapes=shapes)
        return _modelled_plan(prepared, planner, cost, target)

    def _without_unfit(self, planner: Planner) -> Planner:
        """``planner`` without ops on codes that the engine would not run so.

        If no feeds can be made to run the model, it is unchanged.
        """
        engine = self.engines[0]
        if not any(fuses(engine.name, f) for f in planner.policy.formats):
            return planner
        self.feeds.check(self.source.input_shapes)
        feeds = self.feeds.make(input_specs(planner.graph))
        return planner if feeds is None else drop_unfit(self.source, planner, engine, feeds)

    def replay(self, plan: Plan) -> Converted:
        """Write the model that ``plan``, which decides every op, gives."""
        built = self.source.build(plan)
        plan.check_complete(built.applied.graph, where=self.source.name)
        return self._write(built)

    def _write(self, built: EngineBuilt) -> Converted:
        """Write the model of a plan, and report on it."""
        engines = self.engines if self.verify else ()
        on = VerifyOn(engines=engines, feeds=self.feeds, data=self.data)
        size, verified = self.source.store(built, self.output, on)
        applied = built.applied
        if verified.reference == Format.FP32.label:
            # A model that was given low or quantized is not fp32.
            verified = replace(verified, reference=self.source.reference_name(applied.graph))
        in_memory = self.output.path is None
        return Converted(
            plan=built.plan,
            counts=built.plan.counts_in(applied.graph),
            nodes=len(applied.graph.nodes),
            casts=built.casts,
            size_bytes=(self.source.size_bytes, size),
            output=self.output.path,
            seconds=time.perf_counter() - self.start,
            verified=verified,
            warnings=(*verified.warnings, *(in_memory_notes(built.plan) if in_memory else ())),
            model=self.source.given_back(built) if in_memory else None,
            restated=tuple(
                f"{listed(one.nodes, 1)}: {one.reason}" for one in applied.restated
            ),
        )


def _auto_plan(
    source: Source,
    prepared: PreparedModel,
    planner: Planner,
    engine: Engine,
    feeds: FeedMaker,
) -> Plan:
    """The fastest plan that the rules allow: by profiles, else by this machine's roofline."""
    try:
        feeds.check(source.input_shapes)
        made = feeds.make(input_specs(prepared.graph))
        profiles = profile_ends(source, planner, engine, made) if made is not None else None
    except (EngineError, UsageError):
        profiles = None  # the model, or every lowest plan, cannot be run here
    if profiles is None or not (profiles.high and any(profiles.low.values())):
        return _modelled_plan(
            prepared, planner, RooflineCost(target=load_target(local_target()))
        )
    times = Times.measured(planner, profiles, engine, {})
    return fastest_plan(planner, times.analysis(prepared, planner))


def _modelled_plan(
    prepared: PreparedModel,
    planner: Planner,
    cost: RooflineCost,
    device: Emulation | None = None,
) -> Plan:
    """The fastest plan by a roofline.

    Among several formats on a device, plans are compared by the modelled time of the whole.
    """
    graph, formats = planner.graph, planner.policy.formats
    times = Times.modelled(planner, cost, pattern_kernels(graph))
    analysis = times.analysis(prepared, planner)
    if device is None or len(formats) == 1:
        return fastest_plan(planner, analysis)
    ids = {n.name: n.id for n in graph.nodes}

    def time_s(plan: Plan) -> float:
        return plan_time_s(graph, cost, device, {ids[n]: f for n, f in plan.formats.items()})

    return fastest_plan(planner, analysis, time_s)


def fastest_plan(
    planner: Planner, analysis: Analysis, time_s: Callable[[Plan], float] | None = None
) -> Plan:
    """The fastest plan that the rules allow, by modelled times.

    ``time_s`` gives the time of a whole plan, by which the steps of the frontier and the plans
    of everything in one format are compared. Without it the result is the last step of the
    frontier, which by the analysis is the fastest plan of a single format.
    """
    proposed = propose(planner, analysis)
    if time_s is None:
        return proposed[-1].plan
    candidates = (*reversed(proposed), *lowest(planner, analysis))
    return min((p.plan for p in candidates), key=time_s)


def _gainless(asked: Sequence[Adjust], found: Sequence[Gain]) -> Iterator[str]:
    """Notes on adjustments that were asked for and not made, with the reason."""
    tried = {g.kind: g for g in found}
    for kind in asked:
        gain = tried.get(kind)
        if kind is Adjust.RANGE and gain is None:
            yield f"adjust {kind.value}: no value is kept from a format by its range alone"
        elif gain is None:
            yield f"adjust {kind.value}: no product in int8 has an operand for it"
        elif not gain.gains:
            yield f"adjust {kind.value}: left, for it gains no more than noise: {gain.change}"


def _grown(done: Converted, used: Collection[Format]) -> tuple[str, ...]:
    """A warning if a format of constants alone leaves a file no smaller."""
    before, after = done.size_bytes
    named = [fmt.label for fmt in used if fmt.has_scales and not fmt.runs_on_codes]
    if not named or after < before:
        return ()
    sizes = f"{before} bytes before, {after} after"
    why = "quantized weights come with scales and ops, and those here are few or small"
    return (f"{named[0]} makes the model no smaller ({sizes}): {why}",)


def _one_engine_alone(engine: Engine, graph: Graph, plan: Plan) -> tuple[str, ...]:
    """A warning if the ONNX model of ``plan`` runs in ``engine``, and not in ONNX Runtime.

    That engine runs fp16 as fp32 between casts, of all ops but a few.
    """
    if engine.name == _OTHER_READER or not plan.opset:
        return ()
    found = faults(_OTHER_READER, "CPU", graph, [Format.FP16])[Format.FP16]
    formats = plan.formats
    low = [n for n in graph.nodes if n.id in found and formats.get(n.name) is Format.FP16]
    if not low:
        return ()
    names = ", ".join(sorted({n.native.rpartition("::")[2] for n in low}))
    text = (
        f"ONNX Runtime does not run the result on a CPU: it has no fp16 kernel for {names}, as"
        f" at {low[0].name!r}. Keep it in fp32 by --op {names.partition(',')[0]}=fp32"
    )
    return (text,)


def _warnings(
    source: Source, planner: Planner, applied: AppliedModel, used: Collection[Format]
) -> list[str]:
    """Notes on ops that keep their types, and on formats that no op got."""
    policy, nodes = planner.policy, applied.graph.nodes
    found: list[str] = []
    unknown = sorted({n.native for n in nodes if n.op == "unknown" and n.format is not None})
    if unknown:
        found.append(f"ops that are not known here keep their type: {', '.join(unknown)}")
    if policy.scope is not Scope.NONE:
        found += source.kept_notes(applied.graph, policy)
    found += quantized_notes(applied.graph)
    found += random_notes(applied.graph, fixed=source.fixes_draws)
    found += constant_notes(applied.graph)
    found += source.told
    if not applied.edits and policy.scope is not Scope.NONE:
        lowest = planner.lowest()
        permitted = set(lowest.formats.values())
        found.append(nothing_converted(lowest) if used == permitted else NOTHING_GAINS)
    else:
        unused = [f.label for f in policy.formats if f not in used]
        if unused and len(policy.formats) > 1:
            found.append(f"no op is in {' or '.join(unused)}, which was asked for, too")
    return found
