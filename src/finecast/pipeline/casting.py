"""The time of a cast in an engine: a fixed part and a rate, fitted to casts of two sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from finecast.engines.base import Engine, Session
from finecast.errors import EngineError
from finecast.numbers.formats import Format
from finecast.planning.cost import MEASURED_CAST_BANDWIDTH_GB_S, MEASURED_CAST_OVERHEAD_S

# Small enough that the fixed part shows, large enough that the rate does.
_SIZES: Final = (1 << 12, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class CastRate:
    """Seconds of a cast of n bytes: ``overhead_s + n / bandwidth``."""

    overhead_s: float = MEASURED_CAST_OVERHEAD_S
    bandwidth_gb_s: float = MEASURED_CAST_BANDWIDTH_GB_S


# By the engine's name, its device and the low format.
_KNOWN: dict[tuple[str, str, Format], CastRate] = {}


def measure_casts(engine: Engine, low: Format) -> CastRate:
    """The rate on this machine, or the default rate where the engine tells no times of casts.

    Measured once per process, engine, device and format.
    """
    key = engine.name, engine.device, low
    if key not in _KNOWN:
        _KNOWN[key] = _measured(engine, low)
    return _KNOWN[key]


def _measured(engine: Engine, low: Format) -> CastRate:
    bytes_per_element = (Format.FP32.bits + low.bits) / 8
    try:
        times = [_cast_time_s(engine.load_cast_probe(low, size), size) for size in _SIZES]
    except EngineError:
        return CastRate()  # no kernels in this format: nothing will be cast either
    if not all(times) or times[1] <= times[0]:
        return CastRate()
    per_byte = (times[1] - times[0]) / ((_SIZES[1] - _SIZES[0]) * bytes_per_element)
    overhead = max(times[0] - _SIZES[0] * bytes_per_element * per_byte, 0.0)
    return CastRate(overhead_s=overhead, bandwidth_gb_s=1e-9 / per_byte)


def _cast_time_s(session: Session, size: int) -> float:
    """Seconds of the fastest cast that ran; 0 if none did."""
    feeds = {"x": np.linspace(-1, 1, size, dtype=np.float32).reshape(-1, 64)}
    kernels = session.profile(feeds, repeats=9)
    found = [
        k.time_s for k in kernels if "cast" in k.ops or k.kind.startswith(("Convert", "Cast"))
    ]
    return min(found) if found else 0.0
