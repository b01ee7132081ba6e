"""Plans worth trying: the frontier of predicted time and error, and the lowest plans."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.assign import chosen
from finecast.planning.choices import Choice, Proposal, choices
from finecast.planning.cost import CostModel
from finecast.planning.planner import Planner
from finecast.planning.problem import CastTime, Roundings, Times, unit_times
from finecast.planning.units import Units

# Steps of the frontier that become candidates: each costs a conversion and a few timed runs.
MAX_STEPS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """What the choice among plans of one graph rests on.

    Attributes:
        units: What is decided.
        times: Seconds by unit in each format, fp32 first.
        cast_time: Seconds of a value's cast.
        rounded: What rounding to each low format does to the outputs.
        io: Requested formats of inputs and outputs, by value id.
        lowest_s: Predicted seconds of the plan of everything that may be low.
        probes: Runs of the model that the errors took.
    """

    units: Units
    times: Times
    cast_time: CastTime
    rounded: Mapping[Format, Roundings]
    io: Mapping[int, Format] = field(default_factory=dict[int, Format])
    lowest_s: float = math.inf
    probes: int = 0

    @classmethod
    def of(
        cls,
        graph: Graph,
        units: Units,
        cost: CostModel,
        rounded: Mapping[Format, Roundings],
        *,
        io: Mapping[int, Format] | None = None,
        lowest_s: float = math.inf,
        probes: int = 0,
    ) -> Analysis:
        """With times by ``cost``."""
        return cls(
            units=units,
            times={f: unit_times(graph, units, cost, f) for f in (Format.FP32, *rounded)},
            cast_time=cost.cast_time_s,
            rounded=rounded,
            io=io or {},
            lowest_s=lowest_s,
            probes=probes,
        )


def frontier_of(
    planner: Planner, analysis: Analysis, *, most: int | None = None
) -> tuple[Choice, ...]:
    """At most ``most`` choices, from the most accurate to the fastest."""
    return choices(
        planner.graph,
        analysis.units,
        planner.permissions,
        analysis.times,
        analysis.cast_time,
        [*analysis.rounded.values()],
        io=analysis.io,
        most=most,
    )


def proposal(planner: Planner, analysis: Analysis, choice: Choice) -> Proposal:
    """The plan of one choice, with what it is based on."""
    formats = chosen(planner.permissions, analysis.units, choice)
    return choice.proposal(planner.plan(formats, choice.because, _evidence(analysis)))


def propose(
    planner: Planner, analysis: Analysis, *, max_steps: int = MAX_STEPS
) -> list[Proposal]:
    """Plans along the frontier of predicted time and error, fastest last."""
    found = frontier_of(planner, analysis, most=max_steps)
    return [proposal(planner, analysis, choice) for choice in found]


def between(
    planner: Planner, analysis: Analysis, errors: tuple[float, float], *, most: int
) -> list[Proposal]:
    """At most ``most`` plans of the whole frontier whose squared errors lie between two."""
    low, high = errors
    steps = [c for c in frontier_of(planner, analysis) if c.lowers and low < c.error < high]
    places = sorted({round(i) for i in np.linspace(0, len(steps) - 1, min(most, len(steps)))})
    return [proposal(planner, analysis, steps[i]) for i in places]


def lowest(planner: Planner, analysis: Analysis) -> list[Proposal]:
    """The plans of everything that may be low, whatever the models predict.

    Of all formats, by preference, and of each by itself: costs of casts are models.
    """
    found: list[Proposal] = []
    for formats in dict.fromkeys((planner.policy.formats, *((f,) for f in analysis.rounded))):
        plan = planner.lowest(*formats)
        used = set(plan.formats.values())
        error = sum(r.total for fmt, r in analysis.rounded.items() if fmt in used)
        name = "lowest"
        if len(analysis.rounded) > 1:
            name += f" in {', '.join(f.label for f in formats)}"
        found.append(Proposal(name=name, plan=plan, time_s=analysis.lowest_s, error=error))
    return found


def _evidence(analysis: Analysis) -> dict[int, dict[str, float | str]]:
    """What the choice of each op is based on: its unit's times and its weights' errors."""
    units = analysis.units
    measured = {fmt: r for fmt, r in analysis.rounded.items() if r.units.any()}
    found: dict[int, dict[str, float | str]] = {}
    for node, unit in units.of.items():
        of = found[node] = {"ops in one kernel": float(len(units.members[unit]))}
        of |= {f"{fmt.label} us": 1e6 * float(t[unit]) for fmt, t in analysis.times.items()}
        for fmt, roundings in measured.items():
            which = "" if len(analysis.rounded) == 1 else f" in {fmt.label}"
            of[f"error of weights{which}"] = math.sqrt(float(roundings.units[unit]))
    return found
