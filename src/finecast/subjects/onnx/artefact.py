"""Writing a converted model: checked, loaded and run before it takes its name.

Law: at the output path there is either nothing new or a model that passes onnx.checker with
full check and that the engine loads; nothing half-written stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from finecast.engines import EMULATOR
from finecast.engines.base import Array, Engine, Feeds, Loadable, Session
from finecast.engines.emulator import exact_emulator, exact_session
from finecast.engines.fallen_apart import try_with_kernels
from finecast.engines.loading import from_memory
from finecast.errors import EngineError, ModelError, naming
from finecast.files import check_writable
from finecast.files.staging import staging
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import Applied, OnnxFile
from finecast.graph import Dim, Graph
from finecast.pipeline.artefact import Destination, Verified, compare
from finecast.pipeline.sources import FeedMaker
from finecast.planning.plan import Plan
from finecast.subjects.engine.acceptance import accept_fp32, feeds_for, nudge
from finecast.subjects.engine.integers import quantized_mismatch
from finecast.subjects.engine.publishing import publish, verified_by_first
from finecast.subjects.engine.verifying import Compared, Pair, run_both

if TYPE_CHECKING:
    import onnx_ir as ir

# Larger models are not run by the definitions of their ops, which takes several times their
# size in memory.
_EMULATED_BYTES: Final = 1 << 30


def write(
    file: OnnxFile,
    plan: Plan,
    applied: Applied,
    output: Destination,
    engines: Sequence[Engine],
    feeds: FeedMaker,
) -> tuple[int, Verified]:
    """Write the model; returns its bytes on disk, and how it was verified.

    The first of ``engines`` that runs this model and the fp32 one verifies it; with no engines
    it is only checked.

    Raises:
        UsageError: If the output cannot be written.
        ModelError: If the model is not valid.
        WrongNumbersError: If its formats do not explain its outputs.
        EngineError: If no engine can load it.
    """
    check_output(file, output)
    place = output.path.parent if output.path is not None else None
    with staging(place) as folder:
        staged = folder / (output.path.name if output.path is not None else "model.onnx")
        with naming(staged, f"{file.name}, converted"):
            size, told = _saved(file, applied, staged, output)
            # Data before the model that names it.
            parts = sorted(folder.iterdir(), key=lambda p: p.name, reverse=True)
            if place is not None:
                for part in parts:
                    check_writable(place / part.name, force=output.force)
            verified = verify(file, plan, applied, staged, engines, feeds)
            for text in told:
                verified = _with_note(verified, text)
        if place is not None:
            publish(parts, place, str(output.path))
    return size, verified


def _saved(
    file: OnnxFile, applied: Applied, staged: Path, output: Destination
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


def verify(
    file: OnnxFile,
    plan: Plan,
    applied: Applied,
    path: Path,
    engines: Sequence[Engine],
    feeds: FeedMaker,
) -> Verified:
    """Load and run the fp32 model and the one at ``path`` in the first engine that can."""
    if engines:
        feeds.check(input_shapes(file))

    def verify_in(engine: Engine) -> Verified:
        return _verify_in(file, plan, applied, path, engine, feeds)

    try:
        return verified_by_first(engines, verify_in)
    except EngineError as failed:
        if why := _hard_to_run(file):
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


def _verify_in(
    file: OnnxFile,
    plan: Plan,
    applied: Applied,
    path: Path,
    engine: Engine,
    feeds: FeedMaker,
) -> Verified:
    # A device may have no fp32 products of its own: its emulator is compared with exact fp32.
    on_device = engine.name == EMULATOR
    small = file.size_bytes <= _EMULATED_BYTES

    def emulated(of: Plan, given: Feeds) -> Mapping[str, Array]:
        if of == plan:
            return _run_exactly(path, given)
        model = frontend.apply(file, of).model
        return from_memory(model, partial(_run_exactly, feeds=given))

    pair = Pair(
        engine=engine,
        plan=plan,
        applied=applied,
        reference=lambda engine: (
            (exact_session(file.path), ())
            if on_device
            else try_with_kernels(engine, file.path)
        ),
        converted=lambda engine: try_with_kernels(engine, path),
        original=lambda: frontend.apply(file, replace(plan, decisions=(), io={})),
        exact=partial(_run_exactly, file.path),
        fp32=file.path,
        emulated=emulated if small else None,
        careful=None if on_device else partial(_careful_session, file, applied.graph),
    )
    found, ran = run_both(pair, feeds)
    if ran is None:
        return found
    if file.truth is not None:
        found = _against_fp64(file, applied, ran, found)
    if small and not on_device:
        exactly = partial(_run_exactly, file.path, ran.feeds)
        mismatch = quantized_mismatch(applied.graph, engine.name, ran.wanted, exactly)
        found = _with_note(found, mismatch)
    return found


def _careful_session(file: OnnxFile, graph: Graph) -> Session | None:
    """ONNX Runtime's session of a model with bodies, in which OpenVINO checks no sizes.

    None if there are no bodies, or if it is too much to load the model twice.
    """
    if file.size_bytes > _EMULATED_BYTES or not any(node.region for node in graph.nodes):
        return None
    try:
        return exact_session(file.path)
    except EngineError:
        return None


def _run_exactly(model: Loadable, feeds: Feeds) -> Mapping[str, Array]:
    """Outputs of a model by the definitions of its ops."""
    session = exact_session(model)
    return session.run(feeds_for(session, feeds))


def _with_note(found: Verified, text: str) -> Verified:
    return replace(found, note="; ".join(filter(None, (found.note, text))))


def _against_fp64(
    file: OnnxFile, applied: Applied, ran: Compared, found: Verified
) -> Verified:
    """``found`` with errors against the fp64 model, and the share that fp32 alone makes.

    Raises:
        WrongNumbersError: If the fp32 model has no right digit of an output.
    """
    session, note = truth_session(file)
    if session is None:
        return _with_note(found, note)
    exact = session.run(ran.feeds)
    nudged = session.run({name: nudge(array) for name, array in ran.feeds.items()})
    accept_fp32(applied.graph, ran.wanted, exact, nudged)
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
