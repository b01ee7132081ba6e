"""Sessions for numbers, and of models that were never written to a place of the user's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from finecast.engines import get_engine
from finecast.engines.base import Engine, Loadable, Session
from finecast.errors import EngineError, naming
from finecast.frontends import onnx as frontend

_OWN: Final = {"openvino": "openvino", "finecast.frontends.tensorflow": "tensorflow"}
"""Engines that compute models of their own library, by where these are defined."""

T = TypeVar("T")


def is_onnx(model: Any) -> bool:
    """Whether a native model is ONNX's, and not of an engine's own library."""
    return type(model).__module__.partition(".")[0] == "onnx_ir"


def exact_session(model: Any, *, optimizing: bool = True) -> Session:
    """A model in memory in what computes in fp32 here for numbers alone, never for time.

    Of a model of an engine's own library that is the engine itself; instrumented models of
    OpenVINO's say all of their roundings by arithmetic in fp32.

    Raises:
        EngineError: If it cannot be run; of one whose ops are not in fp32 says what to do.
    """
    if is_onnx(model):
        try:
            return load_model(exact_engine(optimizing=optimizing), model)
        except EngineError as error:
            given = frontend.types_computed_in(model)
            other = next((name for name, t in frontend.SOURCE_TYPES.items() if t in given), "")
            if not other:
                raise
            first = f"take the model to fp32 first: --from-type {other}"
            raise EngineError(error.what, where=error.where, fix=first) from error
    home = type(model).__module__
    return get_engine(next(e for at, e in _OWN.items() if home.startswith(at))).load(model)


def exact_engine(*, optimizing: bool = True) -> Engine:
    """What computes ONNX models in fp32 here for numbers alone, never for time.

    Optimizing takes it time that grows with the square of the nodes; where most values are
    shown there is nothing to optimize.
    """
    from finecast.engines.onnxruntime import OnnxRuntimeEngine

    return OnnxRuntimeEngine("CPU", spinning=False, optimizing=optimizing, fusing_codes=False)


def load_model(engine: Engine, model: Any, *, profiling: bool = False) -> Session:
    """Load a converted model from memory.

    Raises:
        EngineError: If the engine cannot run the model.
    """
    return from_memory(model, partial(engine.load, profiling=profiling))


def from_memory(model: Any, load: Callable[[Loadable], T]) -> T:
    """What ``load`` makes of a model in memory; an engine takes its own library's as it is.

    An ONNX model goes by its bytes, or by a file where one message cannot hold it: a message
    has no folder beside which external data could lie. The file is gone when this returns:
    engines have read or mapped it by then.

    Raises:
        EngineError: If the engine cannot run the model.
    """
    if not is_onnx(model):
        return load(model)
    if frontend.fits_one_message(model) and not frontend.came_external(model):
        return load(frontend.to_bytes(model))
    with tempfile.TemporaryDirectory(prefix="finecast-") as folder:
        path = Path(folder) / "model.onnx"
        frontend.save(model, path)
        with naming(path, "the model in memory"):
            return load(path)
