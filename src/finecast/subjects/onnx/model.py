"""An ONNX model, opened: each verb's work on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from finecast.devices.emulation import Emulation
from finecast.engines import EMULATOR, candidates, first_that_loads, get_engine
from finecast.engines.base import Engine, Session
from finecast.engines.emulator import EmulatorEngine, exact_session
from finecast.engines.fallen_apart import FallenApart, broken_by, load_telling
from finecast.errors import EngineError, UsageError
from finecast.frontends import onnx as frontend
from finecast.frontends.collection import paused_collection
from finecast.frontends.onnx import OnnxFile, from_model
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.artefact import Destination, Verified
from finecast.pipeline.census import Census
from finecast.pipeline.conversion import Conversion
from finecast.pipeline.model import RunOptions
from finecast.pipeline.outcome import Outcome
from finecast.pipeline.program import Program
from finecast.pipeline.subject import Subject
from finecast.pipeline.workload import Workload
from finecast.planning.plan import Plan
from finecast.rules.policy import Policy, Scope
from finecast.subjects.emulated import EmulatedSubject
from finecast.subjects.engine.judging import batches_of, counted, judged
from finecast.subjects.engine.subject import EngineSubject
from finecast.subjects.engine.verbs import (
    check_no_engine,
    check_sizes,
    converter,
    write_tuned,
)
from finecast.subjects.onnx.artefact import truth_session
from finecast.subjects.onnx.program import OnnxProgram
from finecast.subjects.onnx.source import OnnxSource


def read(path: Path, *, trust: bool = False) -> OnnxModel:
    """The model in a file; nothing in one is ever executed.

    Raises:
        UsageError: If ``trust`` is given: there is nothing to trust.
    """
    if trust:
        raise UsageError("--trust is for .pt2 files", where=str(path), fix="leave it out")
    return OnnxModel(file=frontend.load(path))


def take(model: Any) -> OnnxModel:
    """An onnx.ModelProto or an onnx_ir.Model, or what was read."""
    return OnnxModel(file=model if isinstance(model, OnnxFile) else from_model(model))


@dataclass(slots=True, kw_only=True)
class OnnxModel(OnnxSource):
    """An ONNX model, opened."""

    @property
    def path(self) -> Path:
        """Its file."""
        return self.file.path

    @property
    def external(self) -> Sequence[Path]:
        """Files beside it that hold some of its tensors."""
        return self.file.external

    def taken(self, from_type: str) -> OnnxModel:
        """Its ops of that type in fp32; inputs and outputs keep theirs."""
        return OnnxModel(file=frontend.take_to_fp32(self.file, from_type))

    def reference(self) -> Session:
        """In the engine that computes for numbers alone."""
        return exact_session(self.file.path)

    def program(self, emulation: Emulation) -> Program:
        """The model with its accumulations written out as the device computes them."""
        return OnnxProgram(source=self, emulation=emulation)

    def subject(self, engine: str | None, device: Emulation | None) -> Subject:
        """In the engine asked for, else the first that loads it; or on ``device``."""
        truth, note = truth_session(self.file)
        notes = (*self.file.notes, *filter(None, [note]))
        if device is not None:
            check_no_engine(engine, device)
            return EmulatedSubject(model=self, emulation=device, truth=truth, told=notes)
        if engine is not None and get_engine(engine).name == EMULATOR:
            raise UsageError(
                "the emulator's time says nothing of the device",
                where="--engine",
                fix="give --target: its times are modelled",
            )
        chosen, session = first_that_loads(self.file.path, engine)
        return EngineSubject(
            model=self, engine=chosen, reference=session, truth=truth, told=notes
        )

    def convert(self, output: Destination, policy: Policy, options: RunOptions) -> Conversion:
        """The engine that is asked for, or the device's emulator, judges and verifies."""
        engines = _engines(options)
        device, first = options.device, engines[0]
        if device is None and isinstance(first, EmulatorEngine):
            device = first.emulation
        batches = batches_of(self, options)
        return converter(self, output, engines, batches, options).convert(
            policy,
            target=device,
            data=batches,
            user_rules=tuple(options.user_rules.items()),
        )

    def apply(self, output: Destination, plan: Plan, options: RunOptions) -> Conversion:
        """Verified as a converted model is."""
        taken = OnnxModel(file=frontend.planned(self.file, plan))
        engines, batches = _engines(options), batches_of(taken, options)
        return converter(taken, output, engines, batches, options).replay(plan)

    def write(
        self, outcome: Outcome, output: Destination, subject: Subject, workload: Workload
    ) -> tuple[int, Verified]:
        """Verified on the feeds that were timed, in the engine that it was tuned for."""
        return write_tuned(self, outcome, output, subject, workload)

    def census(self, options: RunOptions, low: Format) -> Census:
        """Shapes are those observed on data, else on one random batch where it runs."""
        check_sizes(self, options)
        with paused_collection():
            policy = Policy(scope=Scope.NONE)
            prepared = frontend.prepare(self.file, policy, own=options.own)
            opset = frontend.opset_of(self.file.model)
            return counted(self, prepared, options, batches_of(self, options), low, opset)

    def judge(self, policy: Policy, options: RunOptions) -> tuple[Graph, Plan]:
        """With data the rules see the ranges that values have, as ``convert`` does."""
        engine = _engines(options)[0]
        return judged(self, engine, policy, options, batches_of(self, options))

    def fallen_apart(self, plan: Plan, engine: str | None) -> Sequence[FallenApart]:
        """Kernels of the fp32 model whose low ops the plan's model runs in several.

        Both models are compiled for that, so it is told of those alone that compile in some
        seconds.
        """
        nodes, size = len(self.file.model.graph), self.size_bytes
        if nodes > _MOST_NODES_COMPILED or size > _MOST_BYTES_COMPILED:
            raise EngineError(
                f"a model of {nodes} nodes and {size / 1e6:.0f} MB would be compiled twice",
                where=self.file.name,
                fix="finecast convert compiles it to verify it, and tells",
            )
        chosen = _engines(RunOptions(engine=engine))[0]
        _, before = load_telling(chosen, self.file.path)
        _, after = load_telling(chosen, frontend.to_bytes(self.build(plan).model))
        return broken_by(plan, before, after)

    def graph_for(self, plan: Plan) -> Graph:
        """That of the model at the plan's opset."""
        graph = frontend.apply(self.file, plan).graph
        plan.check_complete(graph, where=self.file.name)
        return graph


# OpenVINO 2026.4 compiles 200 MB of weights in 0.6 s of a CPU, and 6,000 nodes in 10 s.
_MOST_NODES_COMPILED: Final = 4000
_MOST_BYTES_COMPILED: Final = 1 << 30


def _engines(options: RunOptions) -> list[Engine]:
    """What verifies: the engine that is asked for, else the device's emulator or any here."""
    if options.engine is None and options.device is not None:
        return [EmulatorEngine(emulation=options.device)]
    return candidates(options.engine)
