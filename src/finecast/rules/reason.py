"""Why an op has the formats it has: what one rule decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """What one rule said of an op: formats it leaves, and the evidence for that."""

    rule: str
    text: str
    permits: tuple[str, ...] = ()
    evidence: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
