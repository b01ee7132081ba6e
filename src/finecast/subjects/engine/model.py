"""An opened model that engines run: each verb's work on it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final, Protocol, TypeVar

from finecast.devices.emulation import Emulation
from finecast.engines import EMULATOR, first_that_loads, get_engine, led_by_one_that_loads
from finecast.engines.base import Engine, Feeds, Session
from finecast.engines.emulator import EmulatorEngine
from finecast.engines.fallen_apart import FallenApart, broken_by, load_with_kernels
from finecast.engines.loading import exact_session, from_memory
from finecast.errors import EngineError, UsageError
from finecast.frontends.collection import paused_collection
from finecast.frontends.native_model import NativeModel
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.artefact import Destination, Verified
from finecast.pipeline.census import Census
from finecast.pipeline.conversion import Conversion, earlier_conversion, kept_types
from finecast.pipeline.model import OpenedModel, RunOptions
from finecast.pipeline.outcome import Outcome
from finecast.pipeline.program import Program
from finecast.pipeline.sources import FeedMaker
from finecast.pipeline.subject import StoredModel, Subject
from finecast.pipeline.workload import Workload
from finecast.planning.adjustments import Adjustment
from finecast.planning.plan import Plan
from finecast.rules.policy import Policy, Scope
from finecast.subjects.emulated import EmulatedSubject
from finecast.subjects.engine.conversion import Converter
from finecast.subjects.engine.judging import batches_of, counted, judged
from finecast.subjects.engine.native import EngineBuilt, NativeSource
from finecast.subjects.engine.program import NativeProgram
from finecast.subjects.engine.source import FileSource, PreparedT
from finecast.subjects.engine.subject import EngineSubject

# OpenVINO 2026.4 compiles 200 MB of weights in 0.6 s of a CPU, and 6,000 nodes in 10 s.
_MOST_NODES_COMPILED: Final = 4000
_MOST_BYTES_COMPILED: Final = 1 << 30


class EngineModel(NativeSource, StoredModel, Protocol):
    """An opened model of any library, whose own parts are those of ``NativeSource``."""

    def program(self, emulation: Emulation) -> Program:
        """The model in the form that the device's emulator runs."""
        ...

    def source_for(self, plan: Plan) -> NativeSource:
        """The model that ``plan`` was made for: this one, or this one converted to fp32.

        Raises:
            ModelError: If the plan was made for another model.
        """
        ...

    def to_fp32(self, from_type: str) -> OpenedModel:
        """The model with its ops of a type in fp32.

        Raises:
            UsageError: If no op has that type, or models of this kind are not converted.
        """
        ...

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
            states = self.prepare(Policy(scope=Scope.NONE)).states
            return EmulatedSubject(
                model=self, emulation=device, states=states, truth=truth, told=notes
            )
        if engine is not None and get_engine(engine).name == EMULATOR:
            raise UsageError(
                "the emulator's time says nothing of the device",
                where="--engine",
                fix="give --target: its times are modelled",
            )
        crashes: list[str] = []
        chosen, session = first_that_loads(self.runners(engine), self.loadable, crashes)
        told = (*notes, *crashes)
        return EngineSubject(
            model=self, engine=chosen, reference=session, truth=truth, told=told
        )

    def convert(self, output: Destination, policy: Policy, options: RunOptions) -> Conversion:
        """Converted and verified by the engine given, or by the device's emulator."""
        crashes: list[str] = []
        engines = self._verifiers(options, crashes)
        device, first = options.device, engines[0]
        if device is None and isinstance(first, EmulatorEngine):
            device = first.emulation
        batches = batches_of(self, options)
        done = _converter(self, output, engines, batches, options).convert(
            policy,
            target=device,
            data=batches,
            user_rules=tuple(options.user_rules.items()),
        )
        return replace(done, warnings=(*crashes, *done.warnings))

    def apply(self, output: Destination, plan: Plan, options: RunOptions) -> Conversion:
        """Write the model of a plan, verified as a converted one is."""
        source = self.source_for(plan)
        crashes: list[str] = []
        engines, batches = self._verifiers(options, crashes), batches_of(source, options)
        done = _converter(source, output, engines, batches, options).replay(plan)
        return replace(done, warnings=(*crashes, *done.warnings))

    def write(
        self, outcome: Outcome, output: Destination, subject: Subject, workload: Workload
    ) -> tuple[int, Verified]:
        """Write the tuned model, verified on the timing feeds in the engine of tuning."""
        assert isinstance(outcome.built, EngineBuilt)
        engine: Engine
        if isinstance(subject, EngineSubject):
            engine = subject.engine
        else:
            assert isinstance(subject, EmulatedSubject)
            engine = EmulatorEngine(emulation=subject.emulation)
        feeds = FeedMaker(batches=workload.timing())
        return self.store(outcome.built, output, [engine], feeds)

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
        return judged(self, engine, policy, options, batches_of(self, options))

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


def _converter(
    source: NativeSource,
    output: Destination,
    engines: Sequence[Engine],
    batches: Sequence[Feeds],
    options: RunOptions,
) -> Converter:
    """The converter to ``output``, which verifies on ``batches`` if there are any."""
    feeds = FeedMaker(batches=batches, dims=options.dims, batch=options.batch)
    feeds.check_dims(source.input_shapes)
    return Converter(
        source=source, output=output, engines=engines, feeds=feeds, verify=options.verify
    )


class ConvertedModel(StoredModel, Protocol):
    """A model that finecast may have converted before."""

    @property
    def converted(self) -> str:
        """The label of the policy that it was converted by; empty if it was not."""
        ...

    @property
    def told(self) -> Sequence[str]:
        """Notes for the user on how it was read."""
        ...


AsIsT = TypeVar("AsIsT", bound=ConvertedModel)


@dataclass(slots=True, kw_only=True)
class ModelAsIs(FileSource[AsIsT, PreparedT], EngineModel):
    """A model of a library with one engine, which is never converted to fp32 beforehand."""

    _LIBRARY: ClassVar[str]
    _ENGINE: ClassVar[str]
    _FIX: ClassVar[str]
    """What the user can do about ops that are not in fp32."""

    @property
    def loadable(self) -> Any:
        """The native model."""
        return self.file.model

    @property
    def opset(self) -> int:
        """0: no operation set decides which types an op takes."""
        return 0

    @property
    def told(self) -> Sequence[str]:
        """Notes on how the file was read."""
        return self.file.told

    def runners(self, spec: str | None) -> Sequence[Engine]:
        """The library's own engine, on the device asked for.

        Raises:
            UsageError: If another engine is asked for.
        """
        engine = get_engine(spec or self._ENGINE)
        if engine.name != self._ENGINE:
            raise UsageError(
                f"engine {engine.name!r} does not run models of {self._LIBRARY}",
                where="--engine",
                fix=f"use {self._ENGINE} or {self._ENGINE}:DEVICE, or leave it out",
            )
        return [engine]

    def reference(self) -> Session:
        """The model in its own engine, in the types that it states."""
        return exact_session(self.file.model)

    def truth(self) -> tuple[None, tuple[str, ...]]:
        """No more exact model; only the notes on how the file was read."""
        return None, tuple(self.told)

    def to_fp32(self, from_type: str) -> OpenedModel:
        """Refuse: the model has to be exported in fp32."""
        raise UsageError(
            f"--from-type {from_type} does not apply to {self._LIBRARY} models",
            where=self.name,
            fix=self._FIX,
        )

    def source_for(self, plan: Plan) -> NativeSource:
        """This model: there is no other form of it."""
        del plan
        return self

    def program(self, emulation: Emulation) -> Program:
        """The model with the device's roundings added."""
        return NativeProgram(source=self, emulation=emulation)

    def prepare_once(self, *, own: bool) -> PreparedT:
        """The model prepared without a change; ``own`` saves nothing, as no copy is made."""
        del own
        return self.prepare(Policy(scope=Scope.NONE))

    def kept_notes(self, graph: Graph, policy: Policy) -> list[str]:
        """Notes on ops that keep a type other than fp32, and what to do about it."""
        return [f"{text}: {self._FIX}" for text in kept_types(graph, policy).values()]

    def earlier_notes(self, policy: Policy) -> list[str]:
        """Notes on what becomes of an earlier conversion of the model."""
        return earlier_conversion(self.file.converted, policy)

    def returned(self, built: EngineBuilt) -> Any:
        """The native model of a plan."""
        return built.model

    @abstractmethod
    def roundable(self, policy: str, adjustments: Sequence[Adjustment] = ()) -> NativeModel:
        """A new copy, prepared for the policy of that label, to which roundings are added."""
