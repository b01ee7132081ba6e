"""Sessions for numbers, and of models that were never written to a place of the user's."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from finecast.engines.base import Engine, Session
from finecast.errors import naming
from finecast.frontends import onnx as frontend

if TYPE_CHECKING:
    import onnx_ir as ir


def exact_engine(*, optimizing: bool = True) -> Engine:
    """What computes in fp32 here for numbers alone, never for time.

    Optimizing takes it time that grows with the square of the nodes; where most values are
    shown there is nothing to optimize.
    """
    from finecast.engines.onnxruntime import OnnxRuntimeEngine

    return OnnxRuntimeEngine("CPU", spinning=False, optimizing=optimizing, fusing_codes=False)


def load_model(engine: Engine, model: ir.Model, *, profiling: bool = False) -> Session:
    """Load a converted model from memory, or from a file where one message cannot hold it.

    A message has no folder beside which external data could lie. The file is gone when this
    returns: engines have read or mapped it by then.

    Raises:
        EngineError: If the engine cannot run the model.
    """
    if frontend.fits_one_message(model) and not frontend.came_external(model):
        return engine.load(frontend.to_bytes(model), profiling=profiling)
    with tempfile.TemporaryDirectory(prefix="finecast-") as folder:
        path = Path(folder) / "model.onnx"
        frontend.save(model, path)
        with naming(path, "the model in memory"):
            return engine.load(path, profiling=profiling)
