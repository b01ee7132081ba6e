"""The engines that are known; none is imported."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from finecast.naming import spelled
from finecast.plugin import EngineEntry, engines

ENGINES: Final[Mapping[str, EngineEntry]] = MappingProxyType(
    {entry.name: entry for entry in engines()}
)
"""Known engines in order of preference; read-only."""


def name_of(spec: str) -> str:
    """The engine's name in ``NAME`` or ``NAME:DEVICE``, in the spelling of ``ENGINES``."""
    return spelled(spec.partition(":")[0])
