"""An opened model that engines run: each verb's work on it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from finecast.devices.emulation import Emulation
from finecast.engines import EMULATOR, first_that_loads, get_engine
from finecast.engines.base import Engine, Feeds, Session
from finecast.engines.emulator import EmulatorEngine
from finecast.engines.loading import exact_session
from finecast.errors import UsageError
from finecast.frontends.collection import paused_collection
from finecast.frontends.roundable import Roundable
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


class EngineModel(NativeSource, StoredModel, Protocol):
    """A model of any library, opened: what is its library's own is asked of the source."""

    def program(self, emulation: Emulation) -> Program:
        """The model as a device's emulation takes it."""
        ...

    def planned(self, plan: Plan) -> NativeSource:
        """The model as the one was taken that ``plan`` was made for.

        Raises:
            ModelError: If it was made for another model.
        """
        ...

    def taken(self, from_type: str) -> OpenedModel:
        """The model with its ops of a type in fp32.

        Raises:
            UsageError: If no op has that type, or models of this kind are taken as they are.
        """
        ...

    def subject(self, engine: str | None, device: Emulation | None) -> Subject:
        """In the engine asked for, else the first that loads it; or on ``device``."""
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
        chosen, session = first_that_loads(self.runners(engine), self.loadable)
        return EngineSubject(
            model=self, engine=chosen, reference=session, truth=truth, told=notes
        )

    def convert(self, output: Destination, policy: Policy, options: RunOptions) -> Conversion:
        """The engine that is asked for, or the device's emulator, judges and verifies."""
        engines = self._judges(options)
        device, first = options.device, engines[0]
        if device is None and isinstance(first, EmulatorEngine):
            device = first.emulation
        batches = batches_of(self, options)
        return _converter(self, output, engines, batches, options).convert(
            policy,
            target=device,
            data=batches,
            user_rules=tuple(options.user_rules.items()),
        )

    def apply(self, output: Destination, plan: Plan, options: RunOptions) -> Conversion:
        """Verified as a converted model is."""
        taken = self.planned(plan)
        engines, batches = self._judges(options), batches_of(taken, options)
        return _converter(taken, output, engines, batches, options).replay(plan)

    def write(
        self, outcome: Outcome, output: Destination, subject: Subject, workload: Workload
    ) -> tuple[int, Verified]:
        """Verified on the feeds that were timed, in the engine that it was tuned for."""
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
        """Shapes are those observed on data, else on one random batch where it runs."""
        if options.dims:
            given = [{}] if options.data is not None else ()
            FeedMaker(batches=given, dims=options.dims).check_dims(self.input_shapes)
        with paused_collection():
            prepared = self.prepare_once(own=options.own)
            return counted(self, prepared, options, batches_of(self, options), low)

    def judge(self, policy: Policy, options: RunOptions) -> tuple[Graph, Plan]:
        """With data the rules see the ranges that values have, as ``convert`` does."""
        engine = self._judges(options)[0]
        return judged(self, engine, policy, options, batches_of(self, options))

    def graph_for(self, plan: Plan) -> Graph:
        """The graph whose nodes the plan names."""
        graph = self.build(plan).applied.graph
        plan.check_complete(graph, where=self.name)
        return graph

    def _judges(self, options: RunOptions) -> Sequence[Engine]:
        """What verifies: what is asked for, else the device's emulator or any that is here."""
        if options.engine is None and options.device is not None:
            return [EmulatorEngine(emulation=options.device)]
        return self.runners(options.engine)


def _converter(
    source: NativeSource,
    output: Destination,
    engines: Sequence[Engine],
    batches: Sequence[Feeds],
    options: RunOptions,
) -> Converter:
    """What writes the converted model, and verifies it on ``batches`` if there are any."""
    feeds = FeedMaker(batches=batches, dims=options.dims, batch=options.batch)
    feeds.check_dims(source.input_shapes)
    return Converter(
        source=source, output=output, engines=engines, feeds=feeds, verify=options.verify
    )


class ConvertedModel(StoredModel, Protocol):
    """A model that may be a conversion of finecast's."""

    @property
    def converted(self) -> str:
        """The policy that it was converted by; empty if it was not."""
        ...

    @property
    def told(self) -> Sequence[str]:
        """What is to be told of how it was read."""
        ...


AsIsT = TypeVar("AsIsT", bound=ConvertedModel)


@dataclass(slots=True, kw_only=True)
class ModelAsIs(FileSource[AsIsT, PreparedT], EngineModel):
    """A model that is planned as it is, and that one engine runs: that of its own library."""

    _LIBRARY: ClassVar[str]
    _ENGINE: ClassVar[str]
    _FIX: ClassVar[str]
    """What to do with a model that computes in other types than fp32."""

    @property
    def loadable(self) -> Any:
        """The model: it was read once, from whatever it is stored as."""
        return self.file.model

    @property
    def opset(self) -> int:
        """There are no operation sets that tell what types an op takes."""
        return 0

    @property
    def told(self) -> Sequence[str]:
        """What was chosen of it; beside that, models are taken as they are."""
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
        """In its own engine, in the types that it states."""
        return exact_session(self.file.model)

    def truth(self) -> tuple[None, tuple[str, ...]]:
        """None is more exact."""
        return None, tuple(self.told)

    def taken(self, from_type: str) -> OpenedModel:
        """Refused: models are converted in fp32."""
        raise UsageError(
            f"--from-type {from_type} does not apply to {self._LIBRARY} models",
            where=self.name,
            fix=self._FIX,
        )

    def planned(self, plan: Plan) -> NativeSource:
        """The model: it is planned as it is."""
        del plan
        return self

    def program(self, emulation: Emulation) -> Program:
        """The model as it is, its roundings added."""
        return NativeProgram(source=self, emulation=emulation)

    def prepare_once(self, *, own: bool) -> PreparedT:
        """A graph holds no copy of the model: nothing is used up."""
        del own
        return self.prepare(Policy(scope=Scope.NONE))

    def kept(self, graph: Graph, policy: Policy) -> list[str]:
        """Which ops keep their types, and why."""
        return [f"{text}: {self._FIX}" for text in kept_types(graph, policy).values()]

    def earlier(self, policy: Policy) -> list[str]:
        """What becomes of a conversion that the model came with."""
        return earlier_conversion(self.file.converted, policy)

    def handed(self, built: EngineBuilt) -> Any:
        """The native model."""
        return built.model

    @abstractmethod
    def roundable(self, policy: str, adjustments: Sequence[Adjustment] = ()) -> Roundable:
        """A copy to be rounded, as it is planned by the policy of that label."""
