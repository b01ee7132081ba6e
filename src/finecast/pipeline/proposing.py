"""Plans worth trying: sensitivities, and the frontier of predicted time and error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from finecast.engines.base import Feeds
from finecast.frontends import onnx as frontend
from finecast.measure.observe import switched_probe
from finecast.numbers.formats import Format
from finecast.pipeline.analysis import Planner, Profiles, kernel_nodes
from finecast.planning.assign import chosen
from finecast.planning.choices import Proposal, choices
from finecast.planning.cost import CostModel
from finecast.planning.problem import Times, pins, roundings, unit_times
from finecast.planning.sensitivity import Sensitivity, measure
from finecast.planning.units import RoundingPoints, Units, make_units, rounding_points
from finecast.progress import Progress

# Steps of the frontier that become candidates: each costs a conversion and a few timed runs.
MAX_STEPS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """Where plans round to one format, and what that does to the outputs."""

    points: RoundingPoints
    sensitivity: Sensitivity

    @classmethod
    def free(cls, points: RoundingPoints) -> Rounded:
        """Nothing was measured: rounding costs nothing."""
        return cls(points=points, sensitivity=Sensitivity.zero(points))


def find_units(
    planner: Planner, profiles: Profiles
) -> tuple[Units, dict[Format, RoundingPoints]]:
    """Units by the kernels of all profiles, and the points at which plans round."""
    graph = planner.graph
    low = {fmt: kernel_nodes(graph, kernels) for fmt, kernels in profiles.low.items()}
    kernels = [*kernel_nodes(graph, profiles.high), *(k for of in low.values() for k in of)]
    units = make_units(graph, planner.permissions, planner.policy.formats, kernels)
    return units, {fmt: rounding_points(graph, units, of) for fmt, of in low.items()}


def probe_sensitivity(
    planner: Planner,
    points: Mapping[Format, RoundingPoints],
    feeds: Sequence[Feeds],
    progress: Progress,
) -> dict[Format, Rounded]:
    """Round each point alone in one switched session and compare the outputs."""
    found: dict[Format, Rounded] = {}
    for fmt, where in points.items():
        probe = switched_probe(planner.prepared, where, fmt, feeds)
        sensitivity = measure(
            where, probe, on_probe=lambda done, total: progress("sensitivity", done, total)
        )
        found[fmt] = Rounded(points=where, sensitivity=sensitivity)
    return found


def propose(
    planner: Planner,
    units: Units,
    rounded: Mapping[Format, Rounded],
    cost: CostModel,
    *,
    max_steps: int = MAX_STEPS,
) -> list[Proposal]:
    """Plans along the frontier of predicted time and error, fastest last."""
    graph = planner.graph
    times = {fmt: unit_times(graph, units, cost, fmt) for fmt in (Format.FP32, *rounded)}
    io = frontend.resolve_io(graph, planner.highest().io)
    pinned = pins(io, (*times,))
    found = choices(
        graph,
        units,
        planner.permissions,
        times,
        cost.cast_time_s,
        [
            roundings(graph, units, r.points, r.sensitivity, fmt, pinned)
            for fmt, r in rounded.items()
        ],
        io=io,
        most=max_steps,
    )
    evidence = _evidence(units, rounded, times)
    return [
        choice.proposal(
            planner.plan(chosen(planner.permissions, units, choice), choice.because, evidence)
        )
        for choice in found
    ]


def lowest(
    planner: Planner, rounded: Mapping[Format, Rounded], time_s: float
) -> list[Proposal]:
    """The plans of everything that may be low, whatever the models predict.

    Of all formats, by preference, and of each by itself: costs of casts are models.
    """
    found: list[Proposal] = []
    for formats in dict.fromkeys((planner.policy.formats, *((f,) for f in rounded))):
        plan = planner.lowest(*formats)
        used = set(plan.formats.values())
        error = sum(r.sensitivity.total for fmt, r in rounded.items() if fmt in used)
        name = "lowest"
        if len(rounded) > 1:
            name += f" in {', '.join(f.label for f in formats)}"
        found.append(Proposal(name=name, plan=plan, time_s=time_s, error=error))
    return found


def probes(rounded: Mapping[Format, Rounded]) -> int:
    """Runs of the model that the sensitivities took."""
    return sum(r.sensitivity.probes for r in rounded.values())


def _evidence(
    units: Units,
    rounded: Mapping[Format, Rounded],
    times: Times,
) -> dict[int, dict[str, float | str]]:
    """What the choice of each op is based on: its unit's times and its weights' errors."""
    weights = {
        fmt: dict(zip(r.points.weight_units, r.sensitivity.weights.tolist(), strict=True))
        for fmt, r in rounded.items()
    }
    found: dict[int, dict[str, float | str]] = {}
    for node, unit in units.of.items():
        of = found[node] = {"ops in one kernel": float(len(units.members[unit]))}
        of |= {f"{fmt.label} us": 1e6 * float(t[unit]) for fmt, t in times.items()}
        for fmt, errors in weights.items():
            which = "" if len(weights) == 1 else f" in {fmt.label}"
            of[f"error of weights{which}"] = math.sqrt(errors.get(unit, 0.0))
    return found
