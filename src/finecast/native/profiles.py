"""Profiles of the fp32 model and of the lowest plans, and the times of ops by them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from threading import Lock
from typing import Final

import numpy as np

from finecast.engines.base import Capability, Engine, Feeds, KernelTime, Session
from finecast.engines.integers import reads_codes
from finecast.engines.loading import load_all, load_model
from finecast.engines.probe import recall
from finecast.errors import EngineError
from finecast.graph import Graph
from finecast.measure.timing import Demand
from finecast.measure.timing_cache import TimingCache
from finecast.native.source import Source
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.cost import (
    MEASURED_CAST_BANDWIDTH_GB_S,
    MEASURED_CAST_OVERHEAD_S,
    MeasuredCost,
)
from finecast.planning.planner import Planner
from finecast.progress import Progress, silent
from finecast.rules.facts import ValueFacts

# How long each model is profiled: long enough that each kernel often has a core for itself, on
# a busy machine, too.
_PROFILE_S: Final = 1.0
_MOST_REPEATS: Final = 40
_FEWEST_REPEATS: Final = 9
# Models are profiled in turns, as a machine's speed drifts by a fifth.
_TURNS: Final = 3
# Runs from which the kernels of a model are known, where their times may be in the cache.
_FEW_REPEATS: Final = 3
# The cache has to know kernels of this share of a model's time: those that it lacks are
# timed by few runs, and off by a tenth.
_LEAST_KNOWN: Final = 0.9
# The cache is not believed where one model took so many times as long as its times say,
# compared with another one: few runs on a quiet machine are off by a tenth for each.
_MOST_APART: Final = 1.25
# Share of the model's time that a format for constants alone has to gain: less may be noise.
_LEAST_GAIN: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """Kernels of the fp32 model and of the lowest plans, in one engine on the same feeds.

    Attributes:
        high: Those of the fp32 model.
        low: Those of the lowest plan in each format that the engine runs.
        errors: The squared output error of these plans; empty if it was not measured.
    """

    high: Sequence[KernelTime]
    low: Mapping[Format, Sequence[KernelTime]]
    errors: Mapping[Format, float] = field(default_factory=dict[Format, float])

    def without_slow_formats(self) -> tuple[Profiles, tuple[Format, ...]]:
        """The profiles without formats for constants alone that gain nothing, and these.

        Such a format needs no casts, so that the profile of its lowest plan tells all that it
        gains. If all formats gain nothing, all stay.
        """
        least_s = _LEAST_GAIN * _total_s(self.high)
        slow = tuple(
            f for f in self.low if not f.encodes_values and self._gained_s(f) < least_s
        )
        kept = {fmt: kernels for fmt, kernels in self.low.items() if fmt not in slow}
        return (replace(self, low=kept), slow) if kept else (self, ())

    def _gained_s(self, fmt: Format) -> float:
        """Seconds that kernels with constants in ``fmt`` gain; others compute as before."""
        reading = [k for k in self.low[fmt] if reads_codes(k)]
        ops = {op for kernel in reading for op in kernel.ops}
        before = [k for k in self.high if not ops.isdisjoint(k.ops)]
        return _total_s(before) - _total_s(reading)


def _total_s(kernels: Sequence[KernelTime]) -> float:
    return sum(k.time_s for k in kernels)


def profile_ends(
    source: Source,
    planner: Planner,
    engine: Engine,
    feeds: Feeds,
    output_error: Callable[[Session], float] | None = None,
    progress: Progress = silent,
    cache: TimingCache | None = None,
) -> Profiles:
    """Profile the fp32 model and the lowest plan in each format, once each.

    ``output_error`` gives the squared output error of a low session, if it is asked for.
    Kernels whose times are in ``cache`` need no profile.

    Raises:
        EngineError: If the engine runs none of the lowest plans.
    """
    sessions: dict[Format | None, Session] = {}
    formats, building = planner.policy.formats, Lock()

    def load(fmt: Format | None) -> None:
        plan = planner.highest() if fmt is None else planner.lowest(fmt)
        with building:
            model = source.build(plan).model
        session = load_model(engine, model, profiling=True)
        session.run(feeds)
        sessions[fmt] = session

    progress("compile", 0, len(formats) + 1)
    failed, *refused = load_all(engine, load, (None, *formats))
    if failed or all(refused):  # the engine may run some of the formats
        raise failed or next(filter(None, refused))
    low_sessions = {fmt: sessions[fmt] for fmt in formats if fmt in sessions}
    ends = (sessions[None], *low_sessions.values())
    high, *low = profiled_in_turns(ends, feeds, planner.graph, cache, progress)
    progress("sensitivity", 0, 1)
    errors = {f: output_error(s) for f, s in low_sessions.items()} if output_error else {}
    return Profiles(high=high, low=dict(zip(low_sessions, low, strict=True)), errors=errors)


def profiled_in_turns(
    sessions: Sequence[Session],
    feeds: Feeds,
    graph: Graph,
    cache: TimingCache | None = None,
    progress: Progress = silent,
) -> list[Sequence[KernelTime]]:
    """The kernels of each session, with the median times of ``_TURNS`` profiles in turns.

    If ``cache`` has the times of nearly all of them, they are taken from there, and the others
    from a few runs. That is not done where these runs contradict the cache: something that no
    signature has is another one then. Runs on a busy machine contradict nothing.
    """
    before = Demand.now()
    few: list[Sequence[KernelTime]] = []
    for number, session in enumerate(sessions):
        progress("profile", number, (_TURNS + 1) * len(sessions))
        few.append(session.profile(feeds, repeats=1 if cache is None else _FEW_REPEATS))
    cached, apart = ([], 0.0) if cache is None else _cached(few, graph, cache)
    if cached and (apart <= _MOST_APART or Demand.now().since(before).is_busy):
        return cached
    before = Demand.now()
    turns: list[list[Sequence[KernelTime]]] = []
    for turn in range(_TURNS):
        turns.append([])
        for number, (session, kernels) in enumerate(zip(sessions, few, strict=True)):
            done = (turn + 1) * len(sessions) + number
            progress("profile", done, (_TURNS + 1) * len(sessions))
            turns[-1].append(session.profile(feeds, repeats=_repeats(kernels)))
    kernel_times: list[Sequence[KernelTime]] = [
        _typical(of) for of in zip(*turns, strict=True)
    ]
    if cache is not None:
        cache.add(_by_kernel(kernel_times, graph), busy=Demand.now().since(before).is_busy)
    return kernel_times


def _repeats(kernels: Sequence[KernelTime]) -> int:
    """Runs of a turn, for a model with these times of kernels."""
    once_s = _total_s(kernels)
    wanted = _PROFILE_S / once_s if once_s else _MOST_REPEATS
    return -(-min(max(int(wanted), _FEWEST_REPEATS), _MOST_REPEATS) // _TURNS)


def _cached(
    few: Sequence[Sequence[KernelTime]], graph: Graph, cache: TimingCache
) -> tuple[list[Sequence[KernelTime]], float]:
    """The kernels of each session with the times of ``cache``; none if it does not tell them.

    And how many times as long as the cache says one session took in ``few`` runs, compared
    with another one.
    """
    kinds = _Kinds(graph)
    known = cache.times({kinds.key(k) for kernels in few for k in kernels if k.signature})
    kernel_times: list[Sequence[KernelTime]] = []
    ratios: list[float] = []
    for kernels in few:
        old = [k for k in kernels if kinds.key(k) in known]
        old_s = sum(known[kinds.key(k)] for k in old)
        if not old or _total_s(old) < _LEAST_KNOWN * _total_s(kernels):
            return [], 0.0
        ratios.append(_total_s(old) / old_s)
        kernel_times.append(
            [
                replace(k, time_s=known.get(kinds.key(k), k.time_s / ratios[-1]))
                for k in kernels
            ]
        )
    return kernel_times, max(ratios) / min(ratios)


def _by_kernel(profiles: Sequence[Sequence[KernelTime]], graph: Graph) -> dict[str, float]:
    """The median time of each kernel in ``profiles`` that has a signature, by its key."""
    kinds, times = _Kinds(graph), dict[str, list[float]]()
    for kernel in (k for kernels in profiles for k in kernels if k.signature):
        times.setdefault(kinds.key(kernel), []).append(kernel.time_s)
    return {key: median(of) for key, of in times.items()}


class _Kinds:
    """What a kernel's time depends on, by the ops of a graph that run in it."""

    def __init__(self, graph: Graph) -> None:
        self._ops = {
            n.name: f"{n.native} {sorted((k, str(v)) for k, v in n.attributes.items())}"
            for n in graph.nodes
        }

    def key(self, kernel: KernelTime) -> str:
        """Equal for kernels of one signature that run ops of the same kinds and attributes."""
        ops = sorted(self._ops.get(name, "") for name in kernel.ops)
        text = "\n".join((kernel.kind, kernel.format, kernel.signature, *ops))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _typical(turns: Sequence[Sequence[KernelTime]]) -> list[KernelTime]:
    """Each kernel with the median of its times, over the turns whose profile has it."""
    by_kernel: dict[str, list[KernelTime]] = {}
    for kernel in (k for turn in turns for k in turn):
        by_kernel.setdefault(kernel.kernel, []).append(kernel)
    return [replace(of[-1], time_s=median(k.time_s for k in of)) for of in by_kernel.values()]


def measured_cost(
    graph: Graph,
    profiles: Profiles,
    casts: Callable[[Format], CastRate],
    facts: Mapping[int, ValueFacts],
    widened: frozenset[Format] = frozenset(),
) -> MeasuredCost:
    """Times by node: a kernel's time is shared evenly by the products in it, or all its ops.

    ``casts`` gives the cost of casts to a format in the engine. Formats that are ``widened``
    it turns into fp32 as it loads a model.
    """
    is_product = {n.name: by_name(n.op).matmul_engine for n in graph.nodes}
    times: dict[Format, dict[str, float]] = {}
    for fmt, kernels in ((Format.FP32, profiles.high), *profiles.low.items()):
        shares = times.setdefault(fmt, {})
        for kernel in kernels:
            inside = [name for name in kernel.ops if name in is_product]
            bearing = [name for name in inside if is_product[name]] or inside
            for name in bearing:
                shares[name] = shares.get(name, 0.0) + kernel.time_s / len(bearing)
    # The rate of casts between floats, if there are any; formats for constants need no casts.
    lows = sorted((f for f in profiles.low if f.encodes_values), key=lambda f: f.runs_on_codes)
    rate = casts(lows[0].reads) if lows else CastRate()
    return MeasuredCost(
        times_s=times,
        shapes={i: f.shape for i, f in facts.items()},
        cast_overhead_s=rate.overhead_s,
        cast_bandwidth_gb_s=rate.bandwidth_gb_s,
        widened=widened,
    )


def kernel_nodes(graph: Graph, kernels: Sequence[KernelTime]) -> list[frozenset[int]]:
    """Ids of the nodes that run in each kernel."""
    ids = {n.name: n.id for n in graph.nodes}
    return [frozenset(ids[name] for name in k.ops if name in ids) for k in kernels]


# Small enough that the fixed part shows, large enough that the rate does.
_SIZES: Final = (1 << 12, 1 << 20)
# Sessions in which a cast is timed. What a small one takes, mostly to wake a thread, was from
# 1.5 us to 13 us in six of them on a busy machine, and plans changed with it.
_CAST_SESSIONS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CastRate:
    """Seconds of a cast of n bytes: ``overhead_s + n / bandwidth``."""

    overhead_s: float = MEASURED_CAST_OVERHEAD_S
    bandwidth_gb_s: float = MEASURED_CAST_BANDWIDTH_GB_S


# By the engine's name, its device and the low format.
_KNOWN: dict[tuple[str, str, Format], CastRate] = {}


def measure_casts(engine: Engine, low: Format, cache: TimingCache | None = None) -> CastRate:
    """The rate on this machine, or the default rate where the engine tells no times of casts.

    Measured once per process, engine, device and format, or taken from ``cache``.
    """
    key = engine.name, engine.device, low
    if key not in _KNOWN:
        _KNOWN[key] = _rate(_cast_times(engine, low, cache), low)
    return _KNOWN[key]


def _cast_times(engine: Engine, low: Format, cache: TimingCache | None) -> list[float]:
    """Seconds of a cast of each of ``_SIZES``; empty if the engine has no such kernel."""
    keys = [f"cast of {size} elements to {low.label}" for size in _SIZES]
    known = {} if cache is None else cache.times(keys)
    if known.keys() == {*keys}:
        return [known[key] for key in keys]
    before = Demand.now()

    def timed(size: int) -> float:
        return median(
            _cast_time_s(engine.load_cast_probe(low, size), size)
            for _ in range(_CAST_SESSIONS)
        )

    try:
        times = [timed(size) for size in _SIZES]
    except EngineError:
        return []  # no kernels in this format: nothing will be cast either
    if cache is not None and all(times):
        busy = Demand.now().since(before).is_busy
        cache.add(dict(zip(keys, times, strict=True)), busy=busy)
    return times


def _rate(times: Sequence[float], low: Format) -> CastRate:
    """The rate of casts by the times of those of each of ``_SIZES``."""
    if not times or not all(times) or times[1] <= times[0]:
        return CastRate()
    bytes_per_element = (Format.FP32.bits + low.bits) / 8
    per_byte = (times[1] - times[0]) / ((_SIZES[1] - _SIZES[0]) * bytes_per_element)
    overhead = max(times[0] - _SIZES[0] * bytes_per_element * per_byte, 0.0)
    return CastRate(overhead_s=overhead, bandwidth_gb_s=1e-9 / per_byte)


def _cast_time_s(session: Session, size: int) -> float:
    """Seconds of the fastest cast that ran; 0 if none did."""
    feeds = {"x": np.linspace(-1, 1, size, dtype=np.float32).reshape(-1, 64)}
    kernels = session.profile(feeds, repeats=9)
    times_s = [
        k.time_s for k in kernels if "cast" in k.ops or k.kind.startswith(("Convert", "Cast"))
    ]
    return min(times_s) if times_s else 0.0


def recalled_speed(engine: Engine, fmt: Format, cache: TimingCache | None) -> Capability:
    """What the engine does in a format, with the speed of earlier runs if ``cache`` has it.

    A format whose probes run, in fp32 or not at all, is probed anew: that takes no time.
    """
    key = f"speed of {fmt.label} in short probes"
    known = {} if cache is None else cache.times([key])
    if known:
        recall(engine, fmt, known[key])
    before = Demand.now()
    capability = engine.capability(fmt)
    if (
        cache is not None
        and not known
        and capability.speed is not None
        and not capability.reason
    ):
        cache.add({key: capability.speed}, busy=Demand.now().since(before).is_busy)
    return capability
