"""Writing a converted model: checked, loaded and run before it takes its name.

Law: at the output path there is either nothing new or a model that passes onnx.checker with
full check and that the engine loads; nothing half-written stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from finecast.engines.base import Engine, Session
from finecast.engines.emulator import exact_emulator, exact_session
from finecast.errors import EngineError, ModelError, naming
from finecast.files import check_writable
from finecast.files.staging import staging
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import OnnxFile, Prepared
from finecast.frontends.prepared import AppliedModel
from finecast.graph import Dim, Graph
from finecast.pipeline.artefact import Destination, Verified, compare
from finecast.pipeline.sources import FeedMaker
from finecast.subjects.engine.acceptance import Pair, accept_fp32, nudge
from finecast.subjects.engine.integers import quantized_mismatch
from finecast.subjects.engine.native import EngineBuilt, NativeSource
from finecast.subjects.engine.verifying import (
    Compared,
    publish,
    run_both,
    verified_by_first,
)

if TYPE_CHECKING:
    import onnx_ir as ir

Source: TypeAlias = NativeSource[OnnxFile, Prepared]


def write(
    source: Source,
    built: EngineBuilt,
    output: Destination,
    engines: Sequence[Engine],
    feeds: FeedMaker,
) -> tuple[int, Verified]:
    """Write the model; returns its bytes on disk, and how it was verified.

    With no engines it is only checked.
    """
    file = source.file
    check_output(file, output)
    if output.clean:
        frontend.drop_dead(built.model)
    place = output.path.parent if output.path is not None else None
    with staging(place) as folder:
        staged = folder / (output.path.name if output.path is not None else "model.onnx")
        with naming(staged, f"{file.name}, converted"):
            size, told = _saved(file, built.applied, staged, output)
            # Data before the model that names it.
            parts = sorted(folder.iterdir(), key=lambda p: p.name, reverse=True)
            if place is not None:
                for part in parts:
                    check_writable(place / part.name, force=output.force)
            verified = _verify(source, built, staged, engines, feeds)
            for text in told:
                verified = _with_note(verified, text)
        if place is not None:
            publish(parts, place, str(output.path))
    return size, verified


def _saved(
    file: OnnxFile, applied: AppliedModel, staged: Path, output: Destination
) -> tuple[int, tuple[str, ...]]:
    """Save and check the model; returns its bytes, and what of the given one was corrected.

    Raises:
        ModelError: If the model is not valid.
    """

    def saved() -> int:
        apart = output.external_data
        with naming(staged, str(output.path or staged)):  # of what cannot be written
            size = frontend.save(applied.model, staged, force=True, external_data=apart)
        frontend.check(staged, shapeless=frontend.shapeless_ports(file.model))
        return size

    try:
        return saved(), ()
    except ModelError:
        corrected = frontend.correct_outputs(applied.model)
        if not corrected:
            raise
        return saved(), corrected


def truth_session(file: OnnxFile) -> tuple[Session | None, str]:
    """The fp64 model that ``file`` was converted from, or why that does not run here."""
    if file.truth is None:
        return None, ""
    try:
        return exact_session(file.truth.path), ""
    except EngineError as error:
        note = (
            f"the {file.from_type} model does not run here, so the error is that against it"
            f" taken to fp32: {error.what}"
        )
        return None, note


def input_shapes(file: OnnxFile) -> dict[str, tuple[Dim, ...] | None]:
    """Declared shapes of the inputs that a caller gives."""
    inputs = (v for v in file.model.graph.inputs if not v.is_initializer())
    return {v.name or "": _dims(v) for v in inputs}


def _dims(value: ir.Value) -> tuple[Dim, ...] | None:
    if value.shape is None:
        return None
    return tuple(d if isinstance(d, int) else d.value for d in value.shape.dims)


def check_output(file: OnnxFile, output: Destination) -> None:
    """Raise UsageError unless ``file``, converted, may be written to ``output``."""
    apart = output.external_data
    came = frontend.came_external(file.model)
    output.check(apart=came if apart is None else apart)


def _verify(
    source: Source,
    built: EngineBuilt,
    path: Path,
    engines: Sequence[Engine],
    feeds: FeedMaker,
) -> Verified:
    """Load and run the fp32 model and the one at ``path`` in the first engine that can."""
    if engines:
        feeds.check(source.input_shapes)

    def verify_in(engine: Engine) -> Verified:
        pair = Pair(source=source, built=built, written=path, engine=engine)
        return _verify_in(pair, feeds)

    try:
        return verified_by_first(engines, verify_in)
    except EngineError as failed:
        if why := _hard_to_run(source.file):
            with suppress(EngineError):
                found = verify_in(exact_emulator())
                return _with_note(found, f"{why}: {failed.where}")
        raise


def _hard_to_run(file: OnnxFile) -> str:
    """Why engines may rightly refuse a model, even in fp32; empty if there is no reason.

    Such a model is verified by the exact emulator.
    """
    shapeless = [v.name for v in file.model.graph.inputs if v.shape is None]
    if shapeless:
        return f"input {shapeless[0]!r} has no shape"
    return "inputs and outputs stay fp64" if file.from_type == "fp64" else ""


def _verify_in(pair: Pair, feeds: FeedMaker) -> Verified:
    found, ran = run_both(pair, feeds)
    if ran is None:
        return found
    source, graph = pair.source, pair.built.applied.graph
    if source.file.truth is not None:
        found = _against_fp64(source.file, graph, ran, found)
    if source.explains and pair.engine.emulates is None:
        exactly = partial(pair.exact, ran.feeds)
        mismatch = quantized_mismatch(graph, pair.engine.name, ran.wanted, exactly)
        found = _with_note(found, mismatch)
    return found


def _with_note(found: Verified, text: str) -> Verified:
    return replace(found, note="; ".join(filter(None, (found.note, text))))


def _against_fp64(file: OnnxFile, graph: Graph, ran: Compared, found: Verified) -> Verified:
    """``found`` with errors against the fp64 model, and the share that fp32 alone makes.

    Raises:
        WrongNumbersError: If the fp32 model has no right digit of an output.
    """
    session, note = truth_session(file)
    if session is None:
        return _with_note(found, note)
    exact = session.run(ran.feeds)
    nudged = session.run({name: nudge(array) for name, array in ran.feeds.items()})
    accept_fp32(graph, ran.wanted, exact, nudged)
    beside, taken = (compare("", outputs, exact) for outputs in (ran.got, ran.wanted))
    return replace(
        found,
        max_abs_error=beside.max_abs_error,
        relative_error=beside.relative_error,
        outputs=beside.outputs,
        note=beside.note,
        reference="fp64",
        taken_error=taken.relative_error,
    )
