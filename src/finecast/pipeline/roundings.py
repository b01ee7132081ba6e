"""Units of ops by kernels, the points at which plans round, and the errors made there."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from finecast.numbers.formats import Format
from finecast.pipeline.profiles import Profiles, kernel_nodes
from finecast.planning.cost import CostModel
from finecast.planning.planner import Planner
from finecast.planning.points import RoundingPoints, rounding_points
from finecast.planning.problem import Analysis, pins, roundings
from finecast.planning.scaled_points import scaled_points
from finecast.planning.sensitivity import Probe, Sensitivity, joined, measure
from finecast.planning.switches import Switch, switches
from finecast.planning.units import Units, make_units
from finecast.progress import Progress

Points = Mapping[Format, RoundingPoints]


def find_units(planner: Planner, profiles: Profiles) -> tuple[Units, Points]:
    """Units by the kernels of all profiles, and the points at which plans round."""
    graph = planner.graph
    low = {fmt: kernel_nodes(graph, kernels) for fmt, kernels in profiles.low.items()}
    kernels = [*kernel_nodes(graph, profiles.high), *(k for of in low.values() for k in of)]
    units = make_units(graph, planner.permissions, planner.policy.formats, kernels)
    return units, points_of(planner, units, low)


def points_of(
    planner: Planner, units: Units, fused: Mapping[Format, Sequence[frozenset[int]]]
) -> Points:
    """The points at which plans round, by format.

    Args:
        planner: Makes the plans.
        units: The units.
        fused: By format the kernels of its lowest plan, as the ids of their nodes.
    """
    graph = planner.graph
    return {
        fmt: scaled_points(graph, units, planner.permissions, fmt)
        if fmt.has_scales
        else rounding_points(graph, units, kernels)
        for fmt, kernels in fused.items()
    }


def probe_sensitivity(
    planner: Planner,
    points: Points,
    prober: Callable[[Sequence[Switch]], Probe],
    progress: Progress,
    totals: Mapping[Format, float] | None = None,
    counted: Collection[int] | None = None,
) -> dict[Format, Sensitivity]:
    """Errors of the outputs with each point rounded alone, by format.

    Values are rounded to the encoding that a plan would give them.

    Args:
        planner: Makes the plans.
        points: Where they round.
        prober: Makes a function that runs the model with some of these switches on.
        progress: Told of each run.
        totals: By format the measured squared error of its lowest plan, which rounds at all
            points.
        counted: Numbers of the outputs that errors are of; None for all.
    """
    known = totals or {}
    found: dict[Format, Sensitivity] = {}
    for fmt, where in points.items():
        rounded = switches(where, planner.permissions, fmt)
        found[fmt] = measure(
            len(where.points),
            prober(rounded),
            weights=len(where.weights),
            total=known.get(fmt, math.nan),
            counted=counted,
            on_probe=lambda done, total: progress("sensitivity", done, total),
        )
    return found


def zero_sensitivities(points: Points) -> dict[Format, Sensitivity]:
    """Sensitivities where none were measured: no rounding makes an error."""
    return {fmt: Sensitivity.zero(where) for fmt, where in points.items()}


def analysis_of(
    planner: Planner,
    units: Units,
    points: Points,
    sensitivity: Mapping[Format, Sensitivity],
    cost: CostModel,
    *,
    io: Mapping[int, Format] | None = None,
    lowest_s: float = math.inf,
) -> Analysis:
    """The costs and errors that plans are chosen by.

    ``io`` are the formats that the user asks for of inputs and outputs, by value id.
    """
    graph, io = planner.graph, io or {}
    saturation, errors = joined(sensitivity)
    pinned = pins(io, (Format.FP32, *points))
    found = Analysis.of(
        graph,
        units,
        cost,
        {
            fmt: roundings(units, where, errors[fmt], fmt, pinned)
            for fmt, where in points.items()
        },
        io=io,
        lowest_s=lowest_s,
        probes=sum(s.probes for s in sensitivity.values()),
    )
    return replace(found, saturation=saturation)
