"""What a model's roundings do to the outputs, in sessions of an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from finecast.engines.base import Feeds
from finecast.numbers.formats import Format
from finecast.pipeline import roundings
from finecast.pipeline.roundings import Points, find_units, free, points_of
from finecast.planning.cost import CostModel
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis
from finecast.planning.sensitivity import Probe, Sensitivity
from finecast.planning.switches import Switch
from finecast.planning.units import Units
from finecast.progress import Progress
from finecast.subjects.engine.native import PreparedModel
from finecast.subjects.engine.switched import switched_probe

__all__ = ["Points", "analysis_of", "find_units", "free", "points_of", "probe_sensitivity"]


def probe_sensitivity(
    planner: Planner,
    prepared: PreparedModel,
    points: Points,
    feeds: Callable[[int], Sequence[Feeds]],
    progress: Progress,
    totals: Mapping[Format, float] | None = None,
) -> dict[Format, Sensitivity]:
    """Round each point alone in switched sessions and compare the outputs.

    Args:
        planner: Of the plans.
        prepared: The model.
        points: Where they round.
        feeds: Those on which so many points are probed.
        progress: Told of each run.
        totals: Squared errors of the lowest plans, as the engine runs them.
    """

    def prober(switches: Sequence[Switch]) -> Probe:
        return switched_probe(prepared, switches, feeds(len(switches)))

    return roundings.probe_sensitivity(planner, points, prober, progress, totals)


def analysis_of(
    prepared: PreparedModel,
    planner: Planner,
    units: Units,
    points: Points,
    sensitivity: Mapping[Format, Sensitivity],
    cost: CostModel,
    *,
    lowest_s: float = math.inf,
) -> Analysis:
    """What the choice among plans rests on, the requested types of ports among it."""
    io = prepared.resolve_io(planner.highest().io)
    return roundings.analysis_of(
        planner, units, points, sensitivity, cost, io=io, lowest_s=lowest_s
    )
