"""The op table: rows by family of ops."""

from __future__ import annotations

from finecast.ops.table.aggregate import AGGREGATE
from finecast.ops.table.base import OpInfo
from finecast.ops.table.engine import ENGINE
from finecast.ops.table.fixed import FIXED
from finecast.ops.table.gradient import GRADIENT
from finecast.ops.table.movement import MOVEMENT
from finecast.ops.table.pointwise import POINTWISE

OP_TABLE: tuple[OpInfo, ...] = (
    *ENGINE,
    *POINTWISE,
    *AGGREGATE,
    *MOVEMENT,
    *GRADIENT,
    *FIXED,
)

__all__ = ["OP_TABLE"]
