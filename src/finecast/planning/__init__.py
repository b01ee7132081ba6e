"""Chooses plans from permissions, costs and errors; derives a plan's casts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finecast.plugin import imported_on_use

if TYPE_CHECKING:
    # Names of this room for others, as plugins: imported on first use.
    from finecast.planning.adjustments import Adjustment as Adjustment
    from finecast.planning.adjustments import AdjustOperand as AdjustOperand
    from finecast.planning.adjustments import edits_by as edits_by
    from finecast.planning.edits import Use as Use
    from finecast.planning.plan import Decision as Decision
    from finecast.planning.planner import Planner as Planner
    from finecast.planning.points import SWITCH as SWITCH
    from finecast.planning.points import moves as moves
    from finecast.planning.problem import Analysis as Analysis
    from finecast.planning.problem import predicted_error as predicted_error
    from finecast.planning.proposing import frontier_of as frontier_of
    from finecast.planning.proposing import lowest as lowest
    from finecast.planning.proposing import predicted_cost as predicted_cost
    from finecast.planning.proposing import proposal as proposal
    from finecast.planning.proposing import propose as propose
    from finecast.planning.proposing import within as within
    from finecast.planning.provenance import Provenance as Provenance
else:
    __getattr__ = imported_on_use(__name__)
