"""Loading models that are in memory, and sessions for exact numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from finecast.engines import get_engine, other_engines
from finecast.engines.base import Engine, Loadable, Session
from finecast.errors import EngineError, FinecastError, naming
from finecast.files.staging import Stage, staging
from finecast.frontends import onnx as frontend
from finecast.frontends.dry_run import MOST_BYTES
from finecast.plugin import plugins

EXACT: Final = "onnxruntime"
"""The engine that computes ONNX models exactly in fp32."""
AS_IR: Final = "name the output NAME.xml: OpenVINO runs the model, and computes its values"
"""Advice on an ONNX model that OpenVINO alone runs."""
_AT_ONCE: Final = 2
"""Models that are loaded at a time: one here, and one in the process of dry runs."""

T = TypeVar("T")


def is_onnx(model: Any) -> bool:
    """Whether a model is ONNX's, and not of an engine's own library."""
    return type(model).__module__.partition(".")[0] == "onnx_ir"


def exact_session(model: Any, *, optimizing: bool = True, apart: bool = False) -> Session:
    """A session of a model in memory that computes exactly in fp32; not for timing.

    ONNX models run in ``exact_engine``, models of an engine's own library in that engine:
    instrumented OpenVINO models round by arithmetic in fp32. A session ``apart`` stays in the
    process of dry runs, if it can: this process does not compile the model a second time. Each
    run sends inputs and outputs between the two, which is slow where outputs are large.

    Raises:
        EngineError: If it cannot be run. If its ops are not in fp32, says what to do.
    """
    if is_onnx(model):
        try:
            return load_model(exact_engine(optimizing=optimizing), model)
        except EngineError as error:
            fix = error.fix
            if taken := _taken_from(model):
                fix = f"take the model to fp32 first: --from-type {taken}"
            elif fix == other_engines(EXACT) and _loads_as_ir(model):
                fix = AS_IR
            elif fix == other_engines(EXACT):
                # No choice of the user's leads to another engine here.
                fix = (
                    "values are computed in ONNX Runtime whatever engine runs the model:"
                    " run onnx.checker.check_model(path, full_check=True), and export it again"
                )
            raise EngineError(error.what, where=error.where, fix=fix) from error
    home, entries = type(model).__module__, (e for p in plugins() for e in p.frontends)
    engine = get_engine(next(entry.runners[0] for entry in entries if entry.opens(home)))
    return engine.load_tried(model) if apart else engine.load(model)


def _taken_from(model: Any) -> str:
    """The type from which ``model`` can be taken to fp32, if it can be loaded then; else "".

    An engine may refuse an op for another reason than its type: a weight of 3 bits, say.
    """
    types = frontend.types_computed_in(model)
    label = next((name for name, t in frontend.SOURCE_TYPES.items() if t in types), "")
    if not label:
        return ""
    try:
        taken = frontend.take_to_fp32(frontend.from_model(model), label)
        load_model(exact_engine(), taken.model)
    except FinecastError:
        return ""
    return label


def _loads_as_ir(model: Any) -> bool:
    """Whether OpenVINO loads an ONNX model whose ops ONNX Runtime has no kernels for."""
    try:
        load_model(get_engine("openvino"), model)
    except FinecastError:
        return False
    return True


def exact_engine(*, optimizing: bool = True) -> Engine:
    """An engine that computes ONNX models exactly in fp32; not for timing.

    The time of its graph optimization grows with the square of the number of nodes. It gains
    nothing where most values are model outputs.
    """
    from finecast.engines.onnxruntime import OnnxRuntimeEngine

    return OnnxRuntimeEngine("CPU", spinning=False, optimizing=optimizing, fusing_codes=False)


def load_model(engine: Engine, model: Any, *, profiling: bool = False) -> Session:
    """Load a model that is in memory.

    Raises:
        EngineError: If the engine cannot run the model.
    """
    if not profiling:
        return from_memory(model, engine.load)
    stage = Stage()
    session = from_memory(model, partial(engine.load, profiling=True), stage.folder)
    # ONNX Runtime opens the file again for each profile.
    weakref.finalize(session, _drop, stage)
    return session


def load_all(
    engine: Engine, load: Callable[[T], object], things: Iterable[T]
) -> list[EngineError | None]:
    """Call ``load`` with each of ``things``, and give its error where it raises one.

    The dry run of one model goes on beside the loading of another one, where the engine allows
    that: to compile takes one core, and most of the time before models are raced.
    """

    def error_of(one: T) -> EngineError | None:
        try:
            load(one)
        except EngineError as error:
            return error
        return None

    if not engine.loads_together:
        return [*map(error_of, things)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [*pool.map(error_of, things)]


def _drop(stage: Stage) -> None:
    """Hold ``stage`` until this is called."""
    del stage


def from_memory(model: Any, load: Callable[[Loadable], T], place: Path | None = None) -> T:
    """Call ``load`` with a model in memory, in a form that engines load.

    An ONNX model is passed as bytes; as a temporary file if it is too large to be sent to the
    process of dry runs, or has external data, which bytes cannot refer to. The file stays in
    ``place``; without one it is deleted on return: engines have read or mapped it by then.
    Other models are passed as they are.

    Raises:
        EngineError: If the engine cannot run the model.
    """
    if not is_onnx(model):
        return load(model)
    if frontend.fits_one_message(model, MOST_BYTES) and not frontend.came_external(model):
        return load(frontend.to_bytes(model))
    with staging() if place is None else nullcontext(place) as folder:
        path = folder / "model.onnx"
        frontend.save(model, path, linking=True)
        with naming(path, "the model in memory"):
            return load(path)
