"""The errors that roundings make in the outputs, measured in sessions of an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from finecast.engines.base import Feeds
from finecast.frontends.prepared import PreparedModel
from finecast.numbers.formats import Format
from finecast.pipeline import roundings
from finecast.pipeline.roundings import Points
from finecast.planning.cost import CostModel
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis
from finecast.planning.sensitivity import Probe, Sensitivity
from finecast.planning.switches import Switch
from finecast.planning.units import Units
from finecast.progress import Progress
from finecast.subjects.engine.switched import switched_probe


def probe_sensitivity(
    planner: Planner,
    prepared: PreparedModel,
    points: Points,
    feeds: Callable[[int], Sequence[Feeds]],
    counted: Collection[int] | None,
    progress: Progress,
    totals: Mapping[Format, float] | None = None,
) -> dict[Format, Sensitivity]:
    """Errors of the outputs with each point rounded alone, in switched sessions.

    Args:
        planner: Makes the plans.
        prepared: The model.
        points: Where plans round.
        feeds: Gives the feeds on which that number of points is probed.
        counted: Numbers of the outputs that errors are of; None for all.
        progress: Told of each run.
        totals: By format the squared error of its lowest plan, as the engine runs it.
    """

    def prober(switches: Sequence[Switch]) -> Probe:
        return switched_probe(prepared, switches, feeds(len(switches)))

    return roundings.probe_sensitivity(planner, points, prober, progress, totals, counted)


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
    """The costs and errors that plans are chosen by, with the requested types of ports."""
    io = prepared.resolve_io(planner.highest().io)
    return roundings.analysis_of(
        planner, units, points, sensitivity, cost, io=io, lowest_s=lowest_s
    )
