"""What the verbs on an opened model have in common, whatever library it is of."""

from __future__ import annotations

from collections.abc import Sequence

from finecast.devices.emulation import Emulation
from finecast.engines.base import Engine, Feeds
from finecast.engines.emulator import EmulatorEngine
from finecast.errors import UsageError
from finecast.pipeline.artefact import Destination, Verified
from finecast.pipeline.model import RunOptions
from finecast.pipeline.outcome import Outcome
from finecast.pipeline.sources import FeedMaker
from finecast.pipeline.subject import Subject
from finecast.pipeline.workload import Workload
from finecast.subjects.emulated import EmulatedSubject
from finecast.subjects.engine.conversion import Converter
from finecast.subjects.engine.native import EngineBuilt, NativeSource
from finecast.subjects.engine.subject import EngineSubject


def check_no_engine(engine: str | None, device: Emulation) -> None:
    """Raise UsageError for an engine beside a device that is not here."""
    if engine is not None:
        raise UsageError(
            f"--engine {engine} with --target {device.target.name}: a device that is"
            " not here runs in its emulator",
            fix="keep one of them",
        )


def check_sizes(source: NativeSource, options: RunOptions) -> None:
    """Raise UsageError for sizes of dimensions that are not there, or beside data."""
    if options.dims:
        given = [{}] if options.data is not None else ()
        FeedMaker(batches=given, dims=options.dims).check_dims(source.input_shapes)


def converter(
    source: NativeSource,
    output: Destination,
    engines: Sequence[Engine],
    batches: Sequence[Feeds],
    options: RunOptions,
) -> Converter:
    """What writes the converted model, and verifies it on ``batches`` if there are any."""
    feeds = FeedMaker(batches=batches, dims=options.dims)
    feeds.check_dims(source.input_shapes)
    return Converter(
        source=source, output=output, engines=engines, feeds=feeds, verify=options.verify
    )


def write_tuned(
    source: NativeSource,
    outcome: Outcome,
    output: Destination,
    subject: Subject,
    workload: Workload,
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
    return source.store(outcome.built, output, [engine], feeds)
