"""The rows of the op table, by what the ops do."""

from __future__ import annotations

from finecast.ops.table.aggregate import AGGREGATE
from finecast.ops.table.base import OpInfo, with_tensorflow
from finecast.ops.table.engine import ENGINE
from finecast.ops.table.fixed import FIXED
from finecast.ops.table.gradient import GRADIENT
from finecast.ops.table.movement import MOVEMENT
from finecast.ops.table.pointwise import POINTWISE
from finecast.ops.table.tensorflow import TENSORFLOW

OP_TABLE: tuple[OpInfo, ...] = with_tensorflow(
    (*ENGINE, *POINTWISE, *AGGREGATE, *MOVEMENT, *GRADIENT, *FIXED), TENSORFLOW
)

__all__ = ["OP_TABLE"]
