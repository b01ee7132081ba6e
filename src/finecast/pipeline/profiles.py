"""Profiles of a model's two ends, and what they say of kernels and times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from finecast.engines.base import Feeds, KernelTime, Session
from finecast.engines.integers import reads_codes
from finecast.errors import EngineError
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.casting import CastRate
from finecast.planning.cost import MeasuredCost
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.rules.facts import ValueFacts

# Runs of a profile: enough that each kernel often had a core for itself, on busy machines too.
_PROFILE_S: Final = 1.0
_MOST_REPEATS: Final = 40
# Profiles are taken in turns: a machine is a fifth faster at one time than at another.
_TURNS: Final = 3
# Of all time, what a format for constants alone has to gain: less is not told from noise.
_LEAST_GAIN: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """Kernels of the fp32 model and of the lowest plans, by one engine on the same feeds.

    ``low`` has those formats whose lowest plan the engine runs, and ``errors`` what that does
    to the outputs, squared, where it was asked for.
    """

    high: Sequence[KernelTime]
    low: Mapping[Format, Sequence[KernelTime]]
    errors: Mapping[Format, float] = field(default_factory=dict[Format, float])

    @property
    def low_s(self) -> float:
        """Seconds of the fastest of the lowest plans."""
        return min(_total_s(kernels) for kernels in self.low.values())

    def without_gainless(self) -> tuple[Profiles, tuple[Format, ...]]:
        """Without formats for constants alone that gain nothing, and which those are.

        Nothing is cast for such a format: what it gains shows in the time of its lowest plan.
        One format stays.
        """
        least_s = _LEAST_GAIN * _total_s(self.high)
        slow = tuple(f for f in self.low if f.constants_only and self._gained_s(f) < least_s)
        kept = {fmt: kernels for fmt, kernels in self.low.items() if fmt not in slow}
        return (replace(self, low=kept), slow) if kept else (self, ())

    def _gained_s(self, fmt: Format) -> float:
        """Seconds that kernels of constants in ``fmt`` gain: others' times only scatter."""
        reading = [k for k in self.low[fmt] if reads_codes(k)]
        ops = {op for kernel in reading for op in kernel.ops}
        before = [k for k in self.high if not ops.isdisjoint(k.ops)]
        return _total_s(before) - _total_s(reading)


def _total_s(kernels: Sequence[KernelTime]) -> float:
    return sum(k.time_s for k in kernels)


def profile_ends(
    planner: Planner,
    profiled: Callable[[Plan], Session],
    feeds: Feeds,
    output_error: Callable[[Session], float] | None = None,
) -> Profiles:
    """Profile the fp32 model and the lowest plan in each format, once each.

    Args:
        planner: Makes these plans.
        profiled: A session, loaded for profiling, of the model that a plan gives.
        feeds: What all of them are run on.
        output_error: The squared one of a low session.

    Raises:
        EngineError: If the engine runs none of the lowest plans.
    """
    sessions: dict[Format, Session] = {}
    failed: EngineError | None = None
    for fmt in planner.policy.formats:
        try:
            sessions[fmt] = profiled(planner.lowest(fmt))
            sessions[fmt].run(feeds)
        except EngineError as error:  # others of the formats may do
            sessions.pop(fmt, None)
            failed = failed or error
    if failed is not None and not sessions:
        raise failed
    high, *low = profiled_in_turns((profiled(planner.highest()), *sessions.values()), feeds)
    errors = {f: output_error(s) for f, s in sessions.items()} if output_error else {}
    return Profiles(high=high, low=dict(zip(sessions, low, strict=True)), errors=errors)


def profiled_in_turns(sessions: Sequence[Session], feeds: Feeds) -> list[Sequence[KernelTime]]:
    """The kernels of each session, with the medians of the times of some turns."""

    def repeats(session: Session) -> int:
        once_s = sum(k.time_s for k in session.profile(feeds, repeats=1))
        wanted = _PROFILE_S / once_s if once_s else _MOST_REPEATS
        return -(-min(max(int(wanted), 15), _MOST_REPEATS) // _TURNS)

    often = [repeats(session) for session in sessions]
    turns = [
        [s.profile(feeds, repeats=n) for s, n in zip(sessions, often, strict=True)]
        for _ in range(_TURNS)
    ]
    return [_typical(of) for of in zip(*turns, strict=True)]


def _typical(turns: Sequence[Sequence[KernelTime]]) -> list[KernelTime]:
    """Each kernel with the median of its times; one that took no time is not in all turns."""
    found: dict[str, list[KernelTime]] = {}
    for kernel in (k for turn in turns for k in turn):
        found.setdefault(kernel.kernel, []).append(kernel)
    return [replace(of[-1], time_s=median(k.time_s for k in of)) for of in found.values()]


def measured_cost(
    graph: Graph,
    profiles: Profiles,
    casts: Callable[[Format], CastRate],
    facts: Mapping[int, ValueFacts],
) -> MeasuredCost:
    """Times by node: a kernel's time is shared evenly by the ops in it.

    Args:
        graph: The graph.
        profiles: Of the two ends.
        casts: What casts to a format cost in the engine.
        facts: Shapes of values.
    """
    known = {n.name for n in graph.nodes}
    times: dict[Format, dict[str, float]] = {}
    for fmt, kernels in ((Format.FP32, profiles.high), *profiles.low.items()):
        shares = times.setdefault(fmt, {})
        for kernel in kernels:
            inside = [name for name in kernel.ops if name in known]
            for name in inside:
                shares[name] = shares.get(name, 0.0) + kernel.time_s / len(inside)
    # Casts between floats, if any; for constants alone nothing is cast.
    lows = sorted((f for f in profiles.low if not f.constants_only), key=lambda f: f.scaled)
    rate = casts(lows[0]) if lows else CastRate()
    return MeasuredCost(
        times_s=times,
        shapes={i: f.shape for i, f in facts.items()},
        cast_overhead_s=rate.overhead_s,
        cast_bandwidth_gb_s=rate.bandwidth_gb_s,
    )


def kernel_nodes(graph: Graph, kernels: Sequence[KernelTime]) -> list[frozenset[int]]:
    """Node ids of each kernel."""
    ids = {n.name: n.id for n in graph.nodes}
    return [frozenset(ids[name] for name in k.ops if name in ids) for k in kernels]
