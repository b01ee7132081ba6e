"""Why finecast's model is not the fastest valid one, by model: found by looking at both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

REASONS: Final[Mapping[str, str]] = {}
