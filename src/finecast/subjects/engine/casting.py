"""The time of a cast in an engine, measured on a probe model that the engine loads."""

from __future__ import annotations

from finecast.engines.base import Engine, Session
from finecast.engines.probe import ProbingEngine
from finecast.frontends.onnx.statements import cast_model
from finecast.numbers.formats import Format
from finecast.pipeline import casting
from finecast.pipeline.casting import CastRate


def measure_casts(engine: Engine, low: Format) -> CastRate:
    """The rate on this machine; measured once per process, engine, device and format."""

    def session(fmt: Format, size: int) -> Session:
        if isinstance(engine, ProbingEngine):
            return engine.load_cast_probe(fmt, size)
        return engine.load(cast_model(fmt, size), profiling=True)

    return casting.measure_casts(engine, low, session)
