"""How fast the fp32 model runs in each engine that is here, before anything is searched.

An engine whose fp32 model is faster than what the preferred engine reaches without a search,
by its precision hint, is expected to end faster, too: a search in it starts from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from finecast.engines.base import Engine, Feeds, Loadable, Session, feeds_for
from finecast.measure.racing import ANCHOR, Effort, Race
from finecast.measure.timing import pass_over
from finecast.numbers.formats import Format
from finecast.plugin import title_of

# A search is done in another engine than the preferred one from this ratio on: the times of a
# few rounds are known to some percent, and formats gain more in one engine than in another.
CLEAR: Final = 1.1
_LOOK: Final = Effort(min_time_s=0.1, rounds=5, warmup=2, limit=1.0, order=False)
# Threads that share a call cost each kernel some ten microseconds: where a call takes longer
# than this, one thread is not faster than all.
_SHORT_S: Final = 0.01
_ALONE: Final = "one thread"
_HINTED: Final = "hint"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTime:
    """Seconds of a call of the fp32 model in one engine.

    Attributes:
        engine: The engine, as ``NAME:DEVICE``.
        call_s: On all threads.
        one_thread_s: On one thread; None where that was not timed.
        hinted_s: On all threads, by the engine's own hint for bf16; None likewise.
    """

    engine: str
    call_s: float
    one_thread_s: float | None = None
    hinted_s: float | None = None

    @property
    def unsearched_s(self) -> float:
        """The least seconds that the engine reaches without a search."""
        return min(self.call_s, self.hinted_s or math.inf)

    @property
    def gain_of_one_thread(self) -> float:
        """How many times as fast one thread is; 1 where it is not clearly faster."""
        gain = 1.0 if self.one_thread_s is None else self.call_s / self.one_thread_s
        return gain if gain > CLEAR else 1.0

    @property
    def text(self) -> str:
        """``OpenVINO 3.1 ms (2.2 by its bf16 hint, 4.0 on one thread)``."""
        beside = {"by its bf16 hint": self.hinted_s, "on one thread": self.one_thread_s}
        told = [f"{s * 1e3:.3g} {how}" for how, s in beside.items() if s is not None]
        more = f" ({', '.join(told)})" if told else ""
        return f"{title_of(self.engine)} {self.call_s * 1e3:.3g} ms{more}"


def engine_times(
    own: Engine,
    session: Session,
    others: Iterable[Engine],
    model: Loadable,
    calls: Sequence[Feeds],
    *,
    hint: bool,
) -> list[EngineTime]:
    """The fp32 model's times in its ``own`` engine, first, and in ``others`` that run it.

    ``hint`` says whether the search may lower ops as the engine's hint for bf16 does.

    Returns:
        One entry an engine; none where no other engine runs the model.
    """
    engines = {own.spec: own}
    runs = {own.spec: _run(session, calls)}
    for engine in others:
        # Nobody named these: one that fails in any way, as a plugin's may, is left out.
        with suppress(Exception):
            run = _run(engine.load(model), calls)
            run()
            runs[engine.spec] = run
            engines[engine.spec] = engine
    if len(runs) == 1:
        return []
    race = Race.of(runs[own.spec], {n: run for n, run in runs.items() if n != own.spec}, _LOOK)
    times = [EngineTime(engine=own.spec, call_s=race.latency(ANCHOR).median_s)]
    calls_s = {n: race.latency_s(n) for n in engines if n in race.names}
    # One that other processes held up in all rounds has no time.
    times += [EngineTime(engine=n, call_s=s) for n, s in calls_s.items() if math.isfinite(s)]
    # The hint takes another compilation, which is of use only where its gain decides.
    decides = hint and own.lowers_by_hint and faster(times) is not None
    refined: list[EngineTime] = []
    for time in times:
        engine = engines[time.engine]
        refined.append(time)
        with suppress(Exception):
            loads = _further(engine, model, time, hint=decides and engine is own)
            refined[-1] = _refined(time, runs[time.engine], loads, calls)
    return refined


def faster(times: Sequence[EngineTime]) -> EngineTime | None:
    """The engine that is expected to end faster than the first one; None if none is."""
    if not times:
        return None
    own, *others = times
    best = min(others, key=lambda time: time.unsearched_s, default=own)
    return best if best.unsearched_s * CLEAR < own.unsearched_s else None


def _further(
    engine: Engine, model: Loadable, time: EngineTime, *, hint: bool
) -> dict[str, Callable[[], Session]]:
    """How the model is loaded on one thread, where a call is short, and by the hint."""
    loads: dict[str, Callable[[], Session]] = {}
    alone = engine.on_one_thread() if time.call_s < _SHORT_S else None
    if alone is not None:
        loads[_ALONE] = partial(alone.load, model)
    if hint:
        loads[_HINTED] = partial(engine.load_hinted, model, Format.BF16)
    return loads


def _refined(
    time: EngineTime,
    run: Callable[[], object],
    loads: Mapping[str, Callable[[], Session]],
    calls: Sequence[Feeds],
) -> EngineTime:
    """The time with those of the model loaded in other ways, timed beside ``run``."""
    if not loads:
        return time
    race = Race.of(run, {name: _run(load(), calls) for name, load in loads.items()}, _LOOK)
    per_call = {name: time.call_s / race.speed(name).median for name in race.names}
    return replace(time, one_thread_s=per_call.get(_ALONE), hinted_s=per_call.get(_HINTED))


def _run(session: Session, calls: Sequence[Feeds]) -> Callable[[], object]:
    return pass_over(session, [feeds_for(session, feeds) for feeds in calls])
