"""An OpenVINO model, opened: each verb's work on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finecast.devices.emulation import Emulation
from finecast.engines import get_engine
from finecast.engines.base import Engine, Session
from finecast.engines.emulator import EmulatorEngine
from finecast.engines.loading import exact_session
from finecast.errors import UsageError
from finecast.frontends import openvino as frontend
from finecast.frontends.openvino import OvFile
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
from finecast.subjects.openvino.program import OvProgram
from finecast.subjects.openvino.source import OvSource

_ENGINE = "openvino"


def read(path: Path, *, trust: bool = False) -> OvModel:
    """The model in a file or folder that OpenVINO reads.

    Raises:
        UsageError: If ``trust`` is given: there is nothing to trust.
    """
    if trust:
        raise UsageError("--trust is for .pt2 files", where=str(path), fix="leave it out")
    return OvModel(file=frontend.load(path))


def take(model: Any) -> OvModel:
    """An ``ov.Model``, or what was read."""
    return OvModel(file=model if isinstance(model, OvFile) else frontend.from_model(model))


@dataclass(slots=True, kw_only=True)
class OvModel(OvSource):
    """An OpenVINO model, opened."""

    @property
    def path(self) -> Path:
        """Its file or folder."""
        return self.file.path

    @property
    def external(self) -> Sequence[Path]:
        """The file beside it that holds its constants."""
        return self.file.external

    def taken(self, from_type: str) -> OvModel:
        """Refused: models are converted in fp32."""
        raise UsageError(
            f"--from-type {from_type} does not apply to OpenVINO models",
            where=self.name,
            fix="convert the model in fp32",
        )

    def reference(self) -> Session:
        """In OpenVINO, in the types that it states."""
        return exact_session(self.file.model)

    def program(self, emulation: Emulation) -> Program:
        """The model as it is, rounded by arithmetic."""
        return OvProgram(source=self, emulation=emulation)

    def subject(self, engine: str | None, device: Emulation | None) -> Subject:
        """In OpenVINO; or on ``device``."""
        if device is not None:
            check_no_engine(engine, device)
            return EmulatedSubject(model=self, emulation=device)
        chosen = _engine(engine)
        return EngineSubject(model=self, engine=chosen, reference=chosen.load(self.file.model))

    def convert(self, output: Destination, policy: Policy, options: RunOptions) -> Conversion:
        """OpenVINO judges and verifies; times of a device by its roofline."""
        batches = batches_of(self, options)
        return converter(self, output, [_judge(options)], batches, options).convert(
            policy,
            target=options.device,
            data=batches,
            user_rules=tuple(options.user_rules.items()),
        )

    def apply(self, output: Destination, plan: Plan, options: RunOptions) -> Conversion:
        """Verified as a converted model is."""
        batches = batches_of(self, options)
        return converter(self, output, [_judge(options)], batches, options).replay(plan)

    def write(
        self, outcome: Outcome, output: Destination, subject: Subject, workload: Workload
    ) -> tuple[int, Verified]:
        """Verified on the feeds that were timed."""
        return write_tuned(self, outcome, output, subject, workload)

    def census(self, options: RunOptions, low: Format) -> Census:
        """Shapes are those observed on data, else on one random batch where it runs."""
        check_sizes(self, options)
        prepared = self.prepare(Policy(scope=Scope.NONE))
        return counted(self, prepared, options, batches_of(self, options), low)

    def judge(self, policy: Policy, options: RunOptions) -> tuple[Graph, Plan]:
        """With data the rules see the ranges that values have, as ``convert`` does."""
        engine = _judge(options)
        return judged(self, engine, policy, options, batches_of(self, options))

    def graph_for(self, plan: Plan) -> Graph:
        """The model's graph."""
        graph = frontend.apply(self.file, plan).graph
        plan.check_complete(graph, where=self.file.name)
        return graph


def _judge(options: RunOptions) -> Engine:
    """What says which kernels there are, and verifies: OpenVINO, or the device's emulator."""
    if options.device is None:
        return _engine(options.engine)
    if options.engine is not None:
        _engine(options.engine)
    return EmulatorEngine(emulation=options.device)


def _engine(spec: str | None) -> Engine:
    """OpenVINO on the device asked for.

    Raises:
        UsageError: If another engine is asked for.
    """
    engine = get_engine(spec or _ENGINE)
    if engine.name != _ENGINE:
        raise UsageError(
            f"engine {engine.name!r} runs ONNX models, and this is one of OpenVINO",
            where="--engine",
            fix=f"use {_ENGINE} or {_ENGINE}:DEVICE",
        )
    return engine
