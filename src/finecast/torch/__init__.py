"""finecast for PyTorch: ``convert``, ``tune``, ``compile``, ``profile``; ``.pt2`` files."""

from __future__ import annotations

import importlib.util

from finecast.errors import EngineError

if importlib.util.find_spec("torch") is None:
    raise EngineError("finecast.torch needs PyTorch", fix="pip install 'finecast[torch]'")

from finecast.native.torch.files import export, load, save
from finecast.native.torch.subject import TuneOptions
from finecast.torch.modules import convert, tune
from finecast.torch.profiling import (
    Profile,
    activation_bytes,
    peak_bytes,
    profile,
    resident_bytes,
    saved_bytes,
)
from finecast.training.backend import Backend, compile  # noqa: A004 - as torch.compile
from finecast.tuning.result import Result

__all__ = [
    "Backend",
    "Profile",
    "Result",
    "TuneOptions",
    "activation_bytes",
    "compile",
    "convert",
    "export",
    "load",
    "peak_bytes",
    "profile",
    "resident_bytes",
    "save",
    "saved_bytes",
    "tune",
]
