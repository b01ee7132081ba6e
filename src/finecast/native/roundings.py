"""Units of ops by kernels, the points at which plans round, and the errors made there.

Errors are measured in sessions whose roundings are switched on one by one. A session with all
switches computes every rounding in each run, and holds weights as values: its runs take
several times as long as the model's. If many long runs are to come, the switches are therefore
split into parts, and each part has a session without the other roundings.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.devices.targets import load_target
from finecast.engines.base import (
    Array,
    Engine,
    Feeds,
    Session,
    each_call,
    feeds_for,
    outputs_on,
)
from finecast.engines.exact import Exact
from finecast.engines.loading import exact_session
from finecast.errors import EngineError
from finecast.frontends.native_model import with_switches
from finecast.frontends.prepared import PreparedModel
from finecast.measure.environment import local_target
from finecast.measure.timing_cache import TimingCache
from finecast.native.profiles import (
    Profiles,
    kernel_nodes,
    measure_casts,
    measured_cost,
)
from finecast.numbers.formats import Format
from finecast.numbers.rounding import widened
from finecast.planning.cost import CostModel
from finecast.planning.planner import Planner
from finecast.planning.points import (
    SWITCH,
    RoundingPoints,
    Switch,
    rounding_points,
    scaled_points,
    switches,
)
from finecast.planning.problem import Analysis, pins, roundings
from finecast.planning.sensitivity import MOST_PROBES, Probe, Sensitivity, measure
from finecast.planning.units import Units, make_units
from finecast.progress import Progress
from finecast.rules.facts import ValueFacts

Points = Mapping[Format, RoundingPoints]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The times that plans are chosen by, measured in an engine or modelled for a device.

    Attributes:
        units: Ops that run in one kernel, and so are one decision.
        cost: Seconds of ops and casts.
        errors: Measured squared errors of the lowest plans, by format.
    """

    units: Units
    points: Points
    cost: CostModel
    errors: Mapping[Format, float] = field(default_factory=dict[Format, float])

    @classmethod
    def measured(
        cls,
        planner: Planner,
        profiles: Profiles,
        engine: Engine,
        facts: Mapping[int, ValueFacts],
        cache: TimingCache | None = None,
    ) -> Times:
        """By profiles in an engine, whose kernels make the units; casts by ``cache``, too."""
        graph = planner.graph
        low = {fmt: kernel_nodes(graph, kernels) for fmt, kernels in profiles.low.items()}
        kernels = [
            planner.carried.nodes,
            *kernel_nodes(graph, profiles.high),
            *(k for of in low.values() for k in of),
        ]
        units = make_units(graph, planner.permissions, planner.policy.formats, kernels)
        widened = load_target(local_target()).widened if engine.widens else frozenset()
        return cls(
            units=units,
            points=points_of(planner, units, low),
            cost=measured_cost(
                graph, profiles, partial(measure_casts, engine, cache=cache), facts, widened
            ),
            errors=profiles.errors,
        )

    @classmethod
    def modelled(
        cls,
        planner: Planner,
        cost: CostModel,
        kernels: Sequence[frozenset[int]],
        fused: Sequence[frozenset[int]] = (),
    ) -> Times:
        """By a cost model.

        Ops in one of ``kernels`` are one unit; in one of ``fused`` they do not round.
        """
        low = planner.policy.formats
        together = [planner.carried.nodes, *kernels]
        units = make_units(planner.graph, planner.permissions, low, together)
        points = points_of(planner, units, dict.fromkeys(low, fused))
        return cls(units=units, points=points, cost=cost)

    def analysis(
        self,
        prepared: PreparedModel,
        planner: Planner,
        sensitivity: Mapping[Format, Sensitivity] | None = None,
    ) -> Analysis:
        """The costs and errors that plans are chosen by, with the requested types of ports.

        Sensitivities are scaled to measured errors. Without any no rounding makes an error.
        """
        sensitivities = {f: Sensitivity.zero(at) for f, at in self.points.items()}
        given = sensitivity or {}
        sensitivities |= {f: one.toward(self.errors.get(f)) for f, one in given.items()}
        carried = planner.carried.unit(self.units)
        io = prepared.resolve_io(planner.highest().io)
        pinned = pins(io, (Format.FP32, *self.points))
        analysis = Analysis.of(
            planner.graph,
            self.units,
            self.cost,
            {
                fmt: roundings(self.units, where, sensitivities[fmt], pinned)
                for fmt, where in self.points.items()
            },
            io=io,
            probes=sum(s.probes for s in sensitivities.values()),
        )
        return replace(analysis, carried=carried)


def points_of(
    planner: Planner, units: Units, fused: Mapping[Format, Sequence[frozenset[int]]]
) -> Points:
    """The points at which plans round, by format.

    ``fused`` has by format the kernels of its lowest plan, as the ids of their nodes.
    """
    graph = planner.graph
    return {
        fmt: scaled_points(graph, units, planner.permissions, fmt)
        if fmt.has_scales and not fmt.encodes_results
        else rounding_points(graph, units, kernels, results=fmt.encodes_results)
        for fmt, kernels in fused.items()
    }


def probe_sensitivity(
    planner: Planner,
    points: Points,
    prober: Callable[[Sequence[Switch]], Probe],
    progress: Progress,
    exact: Exact,
    most: int | None = None,
) -> dict[Format, Sensitivity]:
    """Errors of the outputs with each point rounded alone, by format.

    Values are rounded to the encoding that a plan would give them.

    ``prober`` makes a function that runs the model with some of these switches on. With
    ``most`` runs for a format its largest errors alone are found.
    """
    sensitivities: dict[Format, Sensitivity] = {}
    for fmt, where in points.items():
        rounded = switches(where, planner.permissions, fmt)
        if not rounded:  # all values are out of the format's range, say
            sensitivities[fmt] = Sensitivity.zero(where)
            continue
        sensitivities[fmt] = measure(
            len(where.points),
            prober(rounded),
            weights=len(where.weights),
            shared=[at for _, at in where.shared],
            most=most,
            probing=exact.probing(partial(progress, "sensitivity")),
        )
    return sensitivities


# Fewer parts than this are not worth the time to load their sessions.
_FEWEST_PARTS: Final = 3

Load = Callable[[Sequence[Switch]], Session]


def switched_probe(
    prepared: PreparedModel, switches: Sequence[Switch], feeds: Sequence[Feeds]
) -> Probe:
    """A function from the state of all switches to the outputs on ``feeds``."""
    return SwitchedProbe(
        lambda some: exact_session(with_switches(prepared.roundable(), some), apart=True),
        switches,
        feeds,
    )


def part_size(count: int, load_s: float, run_s: float) -> int:
    """How many of ``count`` switches a session should have.

    They take as many runs as there are switches, and at most ``MOST_PROBES``. A part costs
    load_s and one more run, and each run of one of n parts about run_s / n. Over all parts
    the sum is least at n = sqrt(runs * run_s / (load_s + run_s)).
    """
    runs = min(count, MOST_PROBES)
    parts = math.sqrt(runs * run_s / (load_s + run_s)) if run_s > 0 else 1.0
    size = max(1, math.ceil(count / parts))
    return size if count >= _FEWEST_PARTS * size else count


class SwitchedProbe:
    """Outputs with some roundings on, in sessions of as few switches as is fast.

    Law: the difference from the outputs with nothing on is that of one session with every
    switch. One session is held at a time; switches of different parts that are on together
    take the session of all. So does a part that the engine refuses: engines fuse other ops
    where other roundings are left out, and may fail at what they make of it.
    """

    def __init__(self, load: Load, switches: Sequence[Switch], feeds: Sequence[Feeds]) -> None:
        self.load = load
        self.switches = switches
        self.feeds = feeds
        self.size = len(switches)
        self.span: range | None = None  # of the switches that the session has
        self.refused: set[range] = set()  # parts that the engine does not load or run
        self.session: Session | None = None
        self.exact: list[Array] = []  # of the session with nothing on
        self.reference: list[Array] = []  # of the session of all switches with nothing on

    def __call__(self, switch: NDArray[np.bool_]) -> list[Array]:
        """Outputs on all feeds with these switches on."""
        if self.span is None:
            self._begin()
        on = np.flatnonzero(switch)
        if not len(on):
            return self.reference
        span = self._span(on)
        if span != self.span:
            try:
                self._open(span)
            except EngineError:
                if len(span) == len(self.switches):
                    raise
                self.refused.add(span)
                self._open(range(len(self.switches)))
        outputs = self._run(switch)
        if self.exact is self.reference:
            return outputs
        return [
            _moved(a, b, c)
            for a, b, c in zip(self.reference, outputs, self.exact, strict=True)
        ]

    def _begin(self) -> None:
        """Load the session of all switches; its times of loading and running set the size."""
        start = time.perf_counter()
        self._open(range(len(self.switches)))
        self.reference = self.exact
        loaded = time.perf_counter()
        # Once more: engines make kernels in the first run, which took 60 times as long here.
        self._run(np.zeros(len(self.switches), dtype=bool))
        run_s = time.perf_counter() - loaded
        self.size = part_size(len(self.switches), loaded - start, run_s)

    def _span(self, on: NDArray[np.int64]) -> range:
        """The switches of the smallest session that has all that are on.

        For several switches the session of all is not left, as it would be loaded again.
        """
        everything = range(len(self.switches))
        if len(on) > 1 and self.span == everything:
            return everything
        start = int(on[0]) // self.size * self.size
        part = range(start, min(start + self.size, len(self.switches)))
        alone = int(on[-1]) < part.stop and part not in self.refused
        return part if alone else everything

    def _open(self, span: range) -> None:
        """Load the session of these switches and run it with none on."""
        self.session = None  # free the other session first
        self.session = self.load(self.switches[span.start : span.stop])
        self.span = span
        self.exact = self._run(np.zeros(len(self.switches), dtype=bool))

    def _run(self, switch: NDArray[np.bool_]) -> list[Array]:
        assert self.session is not None
        assert self.span is not None
        mine = switch[self.span.start : self.span.stop]
        session = self.session

        def switched(call: Feeds) -> Feeds:
            # A model taken to fp32 keeps the types of its inputs, but not where switches are.
            return feeds_for(session, {**call, SWITCH: mine})

        return outputs_on(self.session, (each_call(f, switched) for f in self.feeds))


def _moved(reference: Array, output: Array, exact: Array) -> Array:
    """``reference`` plus the difference of ``output`` from ``exact``, of another session.

    Two sessions may add up in different orders, so that their outputs are not compared.
    """
    if reference.dtype.kind != "f" or not reference.shape == output.shape == exact.shape:
        return output
    with np.errstate(invalid="ignore"):  # Inf - Inf
        moved = widened(output) - widened(exact)
        return widened(reference) + moved
