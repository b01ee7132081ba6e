"""finecast for PyTorch: ``convert``, ``tune``, ``compile`` and ``profile``."""

from __future__ import annotations

import importlib.util

from finecast.errors import EngineError

if importlib.util.find_spec("torch") is None:
    raise EngineError("finecast.torch needs PyTorch", fix="pip install 'finecast[torch]'")

from finecast.torch.convert import convert
from finecast.torch.training import Backend, compile  # noqa: A004 - as torch.compile

__all__ = ["Backend", "compile", "convert"]
