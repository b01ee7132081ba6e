"""An opened model that engines run: each verb's work on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from typing import Any, ClassVar, Final

from finecast.data.feeds import free_dims, synthetic_feeds
from finecast.data.sizes import guessed_dims, input_specs, size_guesses
from finecast.data.sources import CALIBRATION_SAMPLES, FeedMaker, calibration_calls
from finecast.data.workload import CalibrationFunction, Workload
from finecast.devices.emulation import Emulation
from finecast.engines import EMULATOR, first_that_loads, led_by_one_that_loads, name_of
from finecast.engines.base import Engine, Feeds, TensorSpec
from finecast.engines.emulator import EmulatorEngine
from finecast.engines.fallen_apart import FallenApart, broken_by, load_with_kernels
from finecast.engines.loading import from_memory
from finecast.engines.probe import drop_slow_formats, speed_of
from finecast.errors import EngineError, UsageError
from finecast.frontends.collection import paused_collection
from finecast.frontends.prepared import PreparedModel
from finecast.graph import Graph, Value
from finecast.naming import listed
from finecast.native.artefact import Converted, Destination, Verified
from finecast.native.census import Census, risks
from finecast.native.conversion import Converter
from finecast.native.emulated import EmulatedSubject, Program
from finecast.native.engine_subject import EngineSubject
from finecast.native.inner_decisions import MOST_SAMPLES
from finecast.native.integers import not_run, unranged
from finecast.native.model import Judgement, LowModel, OpenedModel, RunOptions
from finecast.native.observing import facts_for_rules, observe
from finecast.native.planning import Judging, make_planner
from finecast.native.returning import BesideLow
from finecast.native.source import (
    AS_IT_IS,
    EngineBuilt,
    FileT,
    NativeSource,
    PreparedT,
    Source,
    VerifyOn,
)
from finecast.native.subject import Built, Subject
from finecast.numbers.formats import Format
from finecast.planning.placing import Placement, place, policy_of
from finecast.planning.plan import Plan
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy

# OpenVINO 2026.4 compiles 200 MB of weights in 0.6 s of a CPU, and 6,000 nodes in 10 s.
_MOST_NODES_COMPILED: Final = 4000
_MOST_BYTES_COMPILED: Final = 1 << 30

_MOST_PORTS: Final = 8
"""Inputs or outputs that ``inspect`` names."""


@dataclass(slots=True, kw_only=True, repr=False)
class EngineModel(NativeSource[FileT, PreparedT]):
    """An opened model of any library, whose own parts are those of ``NativeSource``."""

    converts: ClassVar[type[Converter]] = Converter

    def program(self, emulation: Emulation) -> Program:
        """The model with the device's roundings added."""
        return Program(source=self, emulation=emulation)

    def beside(self, low: OpenedModel, engine: str | None) -> LowModel:
        """Both in one session, if they are of one library."""
        if not isinstance(low, type(self)):
            raise UsageError(
                f"{self.name} is a model of {self.library}, and {low.name} is none",
                where="OTHER",
                fix="give both as models of one library: convert MODEL.onnx -o NAME.xml"
                " --auto-cast none gives an ONNX model as OpenVINO's",
            )
        self.runners(engine)
        return BesideLow(source=self, other=low, engine=engine)

    def subject(self, engine: str | None, device: Emulation | None) -> Subject:
        """The model in the engine given, else in the first that loads it; or on ``device``."""
        truth, notes = self.truth()
        if device is not None:
            if engine is not None:
                raise UsageError(
                    f"--engine {engine} with --target {device.target.name}: a device that is"
                    " not here runs in its emulator",
                    fix="keep one of them",
                )
            emulator = EmulatorEngine(emulation=device)
            return self.emulated(engine=emulator, truth=truth, told=notes)
        if engine is not None and name_of(engine) == EMULATOR:
            raise UsageError(
                "the emulator's time says nothing of the device",
                where="--engine",
                fix="give --target: its times are modelled",
            )
        crashes: list[str] = []
        chosen, session = first_that_loads(
            self.runners(engine),
            self.loadable,
            crashes,
            check=lambda: self.prepare(AS_IT_IS).states,
        )
        told = (*notes, *crashes)
        session = self.knowing_free(session)
        return self.measured(engine=chosen, reference=session, truth=truth, told=told)

    def measured(self, **parts: Any) -> EngineSubject:
        """The model in an engine of this machine, of these parts."""
        return EngineSubject(model=self, **parts)

    def emulated(self, **parts: Any) -> EmulatedSubject:
        """The model on a device, of these parts."""
        return EmulatedSubject(model=self, **parts)

    def convert(self, output: Destination, policy: Policy, options: RunOptions) -> Converted:
        """Converted and verified by the engine given, or by the device's emulator.

        Data beside the calibration data verify what these chose.
        """
        crashes: list[str] = []
        engines = self._verifiers(options, crashes)
        device = options.device or engines[0].emulates
        judging = batches = batches_of(self, options)
        if options.data is not None and options.data.calibrates_apart:
            own = replace(options, data=replace(options.data, calib=None))
            judging = batches_of(self, own)
        done = self.converter(output, engines, judging, options).convert(
            policy,
            target=device,
            data=self.observed(policy, options, batches),
            user_rules=tuple(options.user_rules.items()),
        )
        return replace(done, warnings=(*crashes, *done.warnings))

    def apply(self, output: Destination, plan: Plan, options: RunOptions) -> Converted:
        """Write the model of a plan, verified as a converted one is.

        A plan of another version of the model is placed on this one.
        """
        plan, told = self.placed(plan)
        source = self.source_for(plan)
        assert isinstance(source, EngineModel)
        crashes: list[str] = []
        engines, batches = self._verifiers(options, crashes), batches_of(source, options)
        done = source.converter(output, engines, batches, options).replay(plan)
        return replace(done, warnings=(*told, *crashes, *done.warnings))

    def read_graph(self) -> Graph:
        """The graph of the model as it was read."""
        return self.prepare(AS_IT_IS).graph

    def placement(self, plan: Plan) -> Placement:
        """What becomes of a plan here, on the model taken to fp32 where the plan's was."""
        model = self.to_fp32(plan.from_type) if plan.from_type else self
        assert isinstance(model, EngineModel)
        prepared = model.prepare(policy_of(plan))
        return place(plan, prepared.graph, prepared.minimal_opset)

    def write(
        self, built: Built, output: Destination, subject: Subject, workload: Workload
    ) -> tuple[int, Verified]:
        """Write the tuned model, verified on the timing feeds in the engine of tuning."""
        assert isinstance(built, EngineBuilt)
        feeds = FeedMaker(batches=workload.compared(), slices=workload.slices)
        data = workload.compared if workload.decodes else workload.evaluated
        on = VerifyOn(engines=subject.verifiers, feeds=feeds, data=data)
        return self.store(built, output, on)

    def census(self, options: RunOptions, low: Format) -> Census:
        """Count ops; shapes are those seen on the data, else on one random batch."""
        batches = [{}] if options.data is not None else ()
        asked = FeedMaker(batches=batches, dims=options.dims, batch=options.batch)
        asked.check_dims(self.input_shapes)
        with paused_collection():
            prepared = self.prepare_once(own=options.own)
            return counted(self, prepared, options, batches_of(self, options), low)

    def judge(self, policy: Policy, options: RunOptions) -> Judgement:
        """By the rules, which see the ranges of values if there are data."""
        engine = self._verifiers(options)[0]
        batches = self.observed(policy, options, batches_of(self, options))
        return judged(self, engine, policy, options, batches)

    def observed(
        self, policy: Policy, options: RunOptions, batches: Sequence[Feeds]
    ) -> Sequence[Feeds]:
        """The batches whose ranges guide the rules: by default those of the user."""
        return batches

    def fallen_apart(self, plan: Plan, engine: str | None) -> Sequence[FallenApart]:
        """Kernels of the fp32 model whose ops the plan lowers and then run in several kernels.

        Both models are compiled for that, so that large models are refused.
        """
        built = self.build(plan)
        nodes = len(built.applied.graph.nodes)
        if nodes > _MOST_NODES_COMPILED or self.size_bytes > _MOST_BYTES_COMPILED:
            raise EngineError(
                f"a model of {nodes} nodes and {self.size_bytes / 1e6:.0f} MB would be"
                " compiled twice",
                where=self.name,
                fix="finecast convert compiles it to verify it, and shows it",
            )
        load = partial(load_with_kernels, self.runners(engine)[0])
        _, before = load(self.loadable)
        _, after = from_memory(built.model, load)
        return broken_by(plan, before, after)

    def graph_for(self, plan: Plan) -> Graph:
        """The graph whose nodes ``plan`` names."""
        graph = self.build(plan).applied.graph
        plan.check_complete(graph, where=self.name)
        return graph

    def _verifiers(
        self, options: RunOptions, crashes: list[str] | None = None
    ) -> Sequence[Engine]:
        """The engine given, else the device's emulator, else all that may run the model.

        The first of them tells which kernels exist and what gains: one that loads the model,
        if it has to load anywhere. Engines that the model crashes are added to ``crashes``.
        """
        if options.engine is None and options.device is not None:
            return [EmulatorEngine(emulation=options.device)]
        engines = self.runners(options.engine)
        if not options.verify:
            return engines
        return led_by_one_that_loads(engines, self.loadable, crashes)

    def converter(
        self,
        output: Destination,
        engines: Sequence[Engine],
        batches: Sequence[Feeds],
        options: RunOptions,
    ) -> Converter:
        """The converter to ``output``, which verifies on ``batches`` if there are any."""
        feeds = FeedMaker(
            batches=batches,
            dims=options.dims,
            batch=options.batch,
            examples=self.examples,
            slices=None if options.data is None else options.data.slices,
        )
        feeds.check_dims(self.input_shapes)
        calls = cache(partial(calls_in, self, options, MOST_SAMPLES))
        return self.converts(
            source=self,
            output=output,
            engines=engines,
            feeds=feeds,
            verify=options.verify,
            data=lambda: calls()(),
            progress=options.progress,
        )


# What ``inspect`` and ``explain`` tell.


def batches_of(source: Source, options: RunOptions) -> list[Feeds]:
    """The first feeds of the user's data; empty if none were given."""
    calls = calls_in(source, options, CALIBRATION_SAMPLES)
    return [*islice(calls(), CALIBRATION_SAMPLES)]


def calls_in(source: Source, options: RunOptions, most: int) -> CalibrationFunction:
    """Yields the feeds of the first ``most`` samples of the user's data, if some were given.

    The model's inputs are told by the engine asked for, or by another one where it does not
    load the model: some models are loaded only when their shapes are known.
    """
    if options.data is None:
        return tuple
    asked = source.runners(options.engine)
    names = {one.name for one in asked}
    others = [one for one in source.runners(None) if one.name not in names]
    _, session = first_that_loads([*asked, *others], source.loadable)
    data = replace(options.data, rows=source.rows_read)
    return calibration_calls(session, data, most)


def judged(
    source: Source,
    engine: Engine,
    policy: Policy,
    options: RunOptions,
    batches: Sequence[Feeds],
) -> Judgement:
    """What the rules say of each op by the ranges on ``batches``."""
    rules, device = tuple(options.user_rules.items()), options.device
    runner = engine if device is None else EmulatorEngine(emulation=device)
    policy, notes = drop_slow_formats(policy, partial(speed_of, runner), rules)
    prepared = source.prepare(policy)
    facts = facts_for_rules(prepared, batches, source.examples)
    planner = make_planner(prepared, policy, engine, Judging(facts=facts, user_rules=rules))
    plan = planner.lowest()
    slow = (speed_of(runner, fmt) for fmt in policy.formats if fmt in plan.low_formats)
    notes += tuple(speed.note for speed in slow if not speed.gains)
    notes += tuple(f"{what}: no op has it here" for what in unranged(policy, batches))
    notes += not_run(engine, plan)
    return prepared.graph, plan, tuple(dict.fromkeys(notes))


def counted(
    source: Source,
    prepared: PreparedModel,
    options: RunOptions,
    batches: Sequence[Feeds],
    low: Format,
) -> Census:
    """Count ops by class; shapes are those observed on data, else on one random batch."""
    graph, facts, told = prepared.graph, dict[int, ValueFacts](), ""
    if options.data is not None:
        facts = observe(prepared, lambda: batches)
        shapes = {i: f.shape for i, f in facts.items()}
        seen = {v.name: shapes[v.id] for v in graph.inputs if v.id in shapes}
        told = "; ".join(f"{name} {list(shape)}" for name, shape in seen.items())
    else:
        shapes, told = _drawn_shapes(prepared, options)
    census = Census.of(
        graph,
        shapes,
        facts,
        name=source.name,
        size_bytes=source.size_bytes,
        opset=source.opset,
    )
    ports = {"inputs": graph.inputs, "outputs": graph.outputs}
    notes = {
        key: _ports(sorted(values, key=partial(_place, order)))
        for (key, values), order in zip(ports.items(), graph.ports, strict=True)
    }
    notes |= census.notes
    if source.told:
        notes["as it was read"] = "; ".join(source.told)
    if free := free_dims({spec.name: spec.shape for spec in input_specs(graph)}):
        named = [f"{n} ({', '.join(a)})" if {*a} - {n} else n for n, a in free.items()]
        notes["dynamic dimensions"] = ", ".join(named)
    if told:
        notes["figures are for"] = told
    if options.data is None:
        return replace(census, notes=notes)
    return replace(census, notes=notes, warnings=risks(graph, facts, low), low=low)


def _place(order: Sequence[str], value: Value) -> int:
    """The place of an input or output among the model's; the last where it is not known."""
    return order.index(value.name) if value.name in order else len(order)


def _ports(values: Sequence[Value]) -> str:
    """Inputs or outputs with types and shapes; ``?`` stands for a size without a name."""
    told = [
        f"{v.name} {v.dtype}"
        + ("" if v.shape is None else f" [{', '.join(str(d or '?') for d in v.shape)}]")
        for v in values
    ]
    return listed(told, _MOST_PORTS, "; ")


def _drawn_shapes(
    prepared: PreparedModel, options: RunOptions
) -> tuple[dict[int, tuple[int, ...]], str]:
    """Shapes of float values on one random batch, and what was taken for open sizes.

    No shapes if there can be no such batch.

    Raises:
        EngineError: If the model does not take the sizes that the user gave.
        UsageError: If nothing can be drawn of those sizes.
    """
    inputs = input_specs(prepared.graph)
    failed: EngineError | UsageError | None = None
    fallback: tuple[dict[int, tuple[int, ...]], str] | None = None
    firsts = {s.name: s.shape[:1] for s in inputs if s.shape}
    batches = [f"{name}={options.batch}" for name in free_dims(firsts)]
    for dims in size_guesses(prepared.graph, options.dims):  # and until no value is empty
        others = [f"{d}={n}" for d, n in dims.items() if d not in options.dims]
        drawn = {"--batch": batches, "--dim": others}
        told = "; ".join(f"{', '.join(v)}, which {k} changes" for k, v in drawn.items() if v)
        try:
            feeds = synthetic_feeds(inputs, batch=options.batch, dims=dims)
            here = shapes_for(prepared, inputs, feeds), told
            fallback = fallback or here
            if all(all(sizes) for sizes in here[0].values()):
                return here
        except (EngineError, UsageError) as error:
            failed = failed or error
    if fallback is not None:  # some values are empty whatever the sizes
        return fallback
    if options.dims and failed is not None:
        raise failed
    # The table then has what can be counted without shapes.
    return {}, " ".join(f"give --dim {d}=SIZE" for d in guessed_dims(inputs))


def shapes_for(
    prepared: PreparedModel, inputs: Sequence[TensorSpec], feeds: Feeds
) -> dict[int, tuple[int, ...]]:
    """Shapes of float values by id: those declared, else inferred, else those of a run.

    Raises:
        EngineError: If only a run can tell, and the model does not run.
    """
    floats = [v for v in prepared.graph.values if v.format and v.constant is None]
    shapes = _declared(prepared.graph, _symbols(inputs, feeds))
    if len(shapes) < len(floats):
        given = {name: array.shape for name, array in feeds.items()}
        ids = {v.name: v.id for v in prepared.graph.inputs} | dict(prepared.observable())
        known = given | prepared.static_shapes(given)
        shapes |= {ids[name]: sizes for name, sizes in known.items() if name in ids}
    if len(shapes) < len(floats):
        shapes |= {i: f.shape for i, f in observe(prepared, lambda: [feeds]).items()}
    return shapes


def _symbols(inputs: Sequence[TensorSpec], feeds: Feeds) -> dict[str, int]:
    """Sizes of the inputs' free dimensions by name."""
    pairs = (
        (name, size)
        for spec in inputs
        for name, size in zip(spec.shape or (), feeds[spec.name].shape, strict=False)
    )
    return {name: size for name, size in pairs if isinstance(name, str)}


def _declared(graph: Graph, symbols: dict[str, int]) -> dict[int, tuple[int, ...]]:
    floats = (v for v in graph.values if v.format and v.constant is None)
    shapes = {v.id: _sizes(v, symbols) for v in floats}
    return {i: sizes for i, sizes in shapes.items() if sizes is not None}


def _sizes(value: Value, symbols: dict[str, int]) -> tuple[int, ...] | None:
    if value.shape is None:
        return None
    dims = [symbols.get(d) if isinstance(d, str) else d for d in value.shape]
    sizes = tuple(d for d in dims if d is not None)
    return sizes if len(sizes) == len(dims) else None
