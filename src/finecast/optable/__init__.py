"""The rows of the op table, by what the ops do."""

from __future__ import annotations

from finecast.optable.aggregate import AGGREGATE
from finecast.optable.base import OpInfo
from finecast.optable.engine import ENGINE
from finecast.optable.fixed import FIXED
from finecast.optable.gradient import GRADIENT
from finecast.optable.movement import MOVEMENT
from finecast.optable.pointwise import POINTWISE

OP_TABLE: tuple[OpInfo, ...] = (
    *ENGINE,
    *POINTWISE,
    *AGGREGATE,
    *MOVEMENT,
    *GRADIENT,
    *FIXED,
)

__all__ = ["OP_TABLE"]
