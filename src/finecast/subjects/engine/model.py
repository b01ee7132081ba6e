"""An opened model that engines run: each verb's work on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final

from finecast.devices.emulation import Emulation
from finecast.engines import first_that_loads, get_engine, led_by_one_that_loads
from finecast.engines.base import Engine, Feeds
from finecast.engines.emulator import EmulatorEngine
from finecast.engines.fallen_apart import FallenApart, broken_by, load_with_kernels
from finecast.engines.loading import from_memory
from finecast.errors import EngineError, UsageError
from finecast.frontends.collection import paused_collection
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.artefact import Destination, Verified
from finecast.pipeline.census import Census
from finecast.pipeline.device import Program
from finecast.pipeline.model import RunOptions
from finecast.pipeline.result import Result
from finecast.pipeline.sources import FeedMaker
from finecast.pipeline.subject import Subject
from finecast.pipeline.workload import Workload
from finecast.planning.plan import Plan
from finecast.rules.policy import Policy
from finecast.subjects.engine.conversion import Converter
from finecast.subjects.engine.emulated import EmulatedSubject, NativeProgram
from finecast.subjects.engine.judging import batches_of, counted, judged
from finecast.subjects.engine.native import (
    AS_IT_IS,
    EngineBuilt,
    FileT,
    NativeSource,
    PreparedT,
)
from finecast.subjects.engine.subject import EngineSubject

# OpenVINO 2026.4 compiles 200 MB of weights in 0.6 s of a CPU, and 6,000 nodes in 10 s.
_MOST_NODES_COMPILED: Final = 4000
_MOST_BYTES_COMPILED: Final = 1 << 30


@dataclass(slots=True, kw_only=True)
class EngineModel(NativeSource[FileT, PreparedT]):
    """An opened model of any library, whose own parts are those of ``NativeSource``.

    Attributes:
        converts: What converts such models.
    """

    converts: ClassVar[type[Converter]] = Converter

    def program(self, emulation: Emulation) -> Program:
        """The model with the device's roundings added."""
        return NativeProgram(source=self, emulation=emulation)

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
        if engine is not None and get_engine(engine).emulates:
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
        return EngineSubject(
            model=self, engine=chosen, reference=session, truth=truth, told=told
        )

    def emulated(self, **parts: Any) -> EmulatedSubject:
        """The model on a device, of these parts."""
        return EmulatedSubject(model=self, **parts)

    def convert(self, output: Destination, policy: Policy, options: RunOptions) -> Result:
        """Converted and verified by the engine given, or by the device's emulator."""
        crashes: list[str] = []
        engines = self._verifiers(options, crashes)
        device = options.device or engines[0].emulates
        batches = batches_of(self, options)
        done = self.converter(output, engines, batches, options).convert(
            policy,
            target=device,
            data=self.observed(policy, options, batches),
            user_rules=tuple(options.user_rules.items()),
        )
        return replace(done, warnings=(*crashes, *done.warnings))

    def apply(self, output: Destination, plan: Plan, options: RunOptions) -> Result:
        """Write the model of a plan, verified as a converted one is."""
        source = self.source_for(plan)
        assert isinstance(source, EngineModel)
        crashes: list[str] = []
        engines, batches = self._verifiers(options, crashes), batches_of(source, options)
        done = source.converter(output, engines, batches, options).replay(plan)
        return replace(done, warnings=(*crashes, *done.warnings))

    def write(
        self, outcome: Result, output: Destination, subject: Subject, workload: Workload
    ) -> tuple[int, Verified]:
        """Write the tuned model, verified on the timing feeds in the engine of tuning."""
        assert isinstance(outcome.built, EngineBuilt)
        feeds = FeedMaker(batches=workload.timing())
        return self.store(outcome.built, output, subject.verifiers, feeds)

    def census(self, options: RunOptions, low: Format) -> Census:
        """Count ops; shapes are those seen on the data, else on one random batch."""
        if options.dims:
            batches = [{}] if options.data is not None else ()
            FeedMaker(batches=batches, dims=options.dims).check_dims(self.input_shapes)
        with paused_collection():
            prepared = self.prepare_once(own=options.own)
            return counted(self, prepared, options, batches_of(self, options), low)

    def judge(self, policy: Policy, options: RunOptions) -> tuple[Graph, Plan]:
        """By the rules, which see the ranges of values if there are data."""
        engine = self._verifiers(options)[0]
        batches = self.observed(policy, options, batches_of(self, options))
        return judged(self, engine, policy, options, batches)

    def observed(
        self, policy: Policy, options: RunOptions, batches: Sequence[Feeds]
    ) -> Sequence[Feeds]:
        """The batches whose ranges guide the rules: by default those of the user."""
        del policy, options
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
                fix="finecast convert compiles it to verify it, and tells",
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
            batches=batches, dims=options.dims, batch=options.batch, examples=self.examples
        )
        feeds.check_dims(self.input_shapes)
        return self.converts(
            source=self,
            output=output,
            engines=engines,
            feeds=feeds,
            verify=options.verify,
            progress=options.progress,
        )
