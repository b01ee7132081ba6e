"""finecast for PyTorch: ``convert``, ``tune``, ``compile`` and ``profile``."""

from __future__ import annotations

import importlib.util

from finecast.errors import EngineError

if importlib.util.find_spec("torch") is None:
    raise EngineError("finecast.torch needs PyTorch", fix="pip install 'finecast[torch]'")

from finecast.torch.convert import convert
from finecast.torch.profiling import Profile, peak_bytes, profile, resident_bytes
from finecast.torch.training import Backend, compile  # noqa: A004 - as torch.compile
from finecast.torch.tuning import TorchOutcome, TuneOptions, tune

__all__ = [
    "Backend",
    "Profile",
    "TorchOutcome",
    "TuneOptions",
    "compile",
    "convert",
    "peak_bytes",
    "profile",
    "resident_bytes",
    "tune",
]
