"""Which of several callables is faster, settled in as few rounds as possible.

Everything runs in rounds, as ``measure.timing`` says. A speed is the typical ratio to the
anchor, a callable that is in every round: the mean of the middle half of the rounds' ratios.
It is as deaf to a few disturbed rounds as their median, and needs 20 to 30%
fewer rounds for the same precision.

After the first round callables leave that took several times as long as what is too slow;
after the first rounds, those that were far too slow in each of them, or clearly slower in
each than another one of no more error. When the others have run all their rounds, only those
go on whose order is not settled: neighbours by speed that may be in either order and may
differ by more than matters, unless both are too slow. Whatever turns out slower than another
one of no more error leaves then, too: nobody chooses it, so that its speed need not be known
better.

The interval of a speed is 2.7 standard errors to each side (of a trimmed geometric mean, by
the winsorised deviation: Tukey and McLaughlin, 1963). That is more than the 2 that are usual,
because it is evaluated repeatedly, and a narrower one would sooner or later settle an order
by chance.

Where other processes keep this one waiting for the processors, the time from the start to the
end of a call tells of them: of one plan of MiniLM beside three busy processes it gave speedups
from 1.5 to 1.8, on an idle machine 1.9. There the time that the processors computed is
compared (1.89 to 1.96).

Rounds of several processes may be joined. Memory lies elsewhere in each, by which the same two
models have other times: what is reported is then the middle of the processes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise, permutations
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finecast.errors import EngineError
from finecast.measure.timing import Demand, Latency, Took, Turns, now_s

ANCHOR = "fp32"
"""The name of the callable that is in every round."""
WAITING_COUNTS = "milliseconds include the waiting"
"""What is said where calls waited for other processes."""
INTERVAL = 2.7
"""Half the interval of a speed, in standard errors."""
# Share of the ratios that are left out at either end: the middle half stays.
_TRIMMED = 0.25
# Rounds between two checks of which orders are settled.
_STEP = 5
# After the first rounds a callable leaves if in each of them it was slower than the limit, or
# than another one, by these factors: a disturbance would have to hit it alone every time.
_FIRST = 3
_FAR = 1.1
# After one round it leaves if it took so many times the limit, by the clock and in processor
# time: a disturbance takes no time of this process. bf16 on a CPU without it takes 10 times.
_HOPELESS = 3.0
# Less processor time of the anchor tells nothing: another device computes, or a call is short.
_LEAST_USED_S = 0.01
_CLEAR = 1.05
# Only calls whose threads computed, or wanted to, nearly all the time are known by the
# processor time that they used: those that wait for another device are not.
_COMPUTING = 0.9
# The ratio of two that may be equally fast is needed to this precision at most. One that is
# less known may be smaller, but the median of two that are equally fast is not above
# ``_TIE_MEDIAN``: of two 1.5% apart it was up to 1.055 beside four other processes.
_TIE_KNOWN_TO = 0.008
_TIE_MEDIAN = 1.06


# In place of a stated cost of nothing, so that ratios are numbers.
LEAST_COST = 1e-30


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A ratio, and the interval that it lies in."""

    low: float
    median: float
    high: float

    @property
    def spread(self) -> float:
        """Half the width of the interval, as a share of the median."""
        return (self.high - self.low) / 2 / self.median

    def settles(self, matters: float) -> bool:
        """Whether a ratio is above 1, below 1, or too near to 1 to matter."""
        apart = self.low > 1 or self.high < 1
        return apart or (self.low * matters >= 1 and self.high <= matters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to time.

    Attributes:
        min_time_s: Least time for the rounds that all run, in which at least ``rounds`` run.
        settle_s: Most time after that, for callables whose order or speed is not settled.
        known_to: Relative precision to which each speed beside the anchor is needed.
        rounds: Least number of rounds that all run.
        warmup: Most calls of each before the first round.
        limit: Ratio to the anchor's time from which on a callable is too slow.
        order: Whether the order of callables is needed, or only which are below ``limit``.
        errors: Errors by name. A callable named here leaves if another one that is named, of
            no more error, is clearly faster; callables that are not named never leave so.
            Where errors are given, speeds are needed to ``known_to`` of these callables alone.
        tie: If given, it is needed of each two of ``errors`` whether the one of less error
            takes at most this many times as long as the other.
        sure: One of ``errors`` that may be chosen whatever else turns out. One that is known
            to take more than ``tie`` times as long leaves: it cannot be chosen.
    """

    min_time_s: float
    settle_s: float = 0.0
    known_to: float = math.inf
    rounds: int = 7
    warmup: int = 3
    limit: float = math.inf
    order: bool = True
    errors: Mapping[str, float] = field(default_factory=dict[str, float])
    tie: float | None = None
    sure: str = ""


@dataclass(slots=True, kw_only=True)
class Race:
    """Callables timed in the same rounds, one of which is the ``ANCHOR``.

    A callable that raises EngineError leaves the race: it is in ``failed``, not in ``names``,
    and to ask for its times raises that error. An error of the anchor ends the race.

    Attributes:
        matters: Two whose times have a lower ratio than this count as equally fast.
        share: How many times each callable runs its model; times are per run of the model.
    """

    calls: Mapping[str, Callable[[], object]]
    matters: float = 1.02
    share: int = 1
    _turns: Turns = field(init=False)
    _samples: dict[str, dict[int, Took]] = field(init=False)
    _rounds: int = field(init=False, default=0)
    # The rounds with which those of each process begin.
    _begins: list[int] = field(init=False, default_factory=lambda: [0])
    _wanted: Demand = field(init=False, default_factory=Demand)
    _lasted_s: float = field(init=False, default=0.0)
    _lost: set[str] = field(init=False, default_factory=set[str])

    def __post_init__(self) -> None:
        """Start without times."""
        self._turns = Turns(self.calls)
        self._samples = {name: {} for name in self.calls}

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """The times, which travel to another process; what was called does not."""
        state = {one.name: getattr(self, one.name) for one in fields(self)}
        calls = dict.fromkeys(self.calls, _never_called)
        return None, {**state, "calls": calls, "_turns": Turns(calls, self.failed)}

    @classmethod
    def of(
        cls,
        anchor: Callable[[], object],
        calls: Mapping[str, Callable[[], object]],
        effort: Effort,
        *,
        share: int = 1,
    ) -> Race:
        """Time ``calls`` beside ``anchor``; each runs its model ``share`` times."""
        race = cls(calls={ANCHOR: anchor, **calls}, share=share)
        race.run(effort)
        return race

    @classmethod
    def stated(cls, anchor_s: float, seconds: Mapping[str, float]) -> Race:
        """A race whose times are given: each order is settled, and nothing will be called.

        The times may stand for any other cost of the models, such as their bytes. Two that
        cost nothing, as a model of the device may say of ops that only rename, cost the same.
        """
        known = {n: s or LEAST_COST for n, s in {ANCHOR: anchor_s, **seconds}.items()}
        race = cls(calls=dict.fromkeys(known, _never_called))
        race._samples = {n: {0: Took(wall_s=s, used_s=s)} for n, s in known.items()}
        return race

    def run(self, effort: Effort) -> None:
        """Time all, then those whose order or speed is not settled."""
        self._turns.warm_up(effort.warmup)
        self._check_anchor()
        end = now_s() + effort.min_time_s
        self._go_on(self.calls, 1, 0.0)
        names = {n for n in self.names if not self._is_hopeless(n, effort.limit)}
        self._go_on({*names, ANCHOR}, min(_FIRST, effort.rounds) - 1, 0.0)
        names = {n for n in self.names if min(self._ratios(n)) <= effort.limit * _FAR}
        # Another one of no more error was clearly faster in each round of both.
        self._lost |= {
            name
            for name in names
            for n in self._no_less_exact(name, effort.errors)
            if min(self._ratios(name, n)) > _CLEAR
        }
        names -= self._lost
        if names or not self.names:
            left_s = end - now_s()
            self._go_on({*names, ANCHOR}, effort.rounds - _FIRST, left_s)
        end = now_s() + effort.settle_s
        while now_s() < end and (names := self._open(effort)):
            self._go_on({*names, ANCHOR}, _STEP, 0.0)

    def join(self, other: Race) -> None:
        """Add the rounds of the same models in another process."""
        self._begins.append(self._rounds)
        for name, took in self._samples.items():
            rounds = other._samples.get(name, {})
            took |= {self._rounds + number: one for number, one in rounds.items()}
        self._rounds += other._rounds
        self._wanted += other._wanted
        self._lasted_s += other._lasted_s

    def _is_hopeless(self, name: str, limit: float) -> bool:
        """Whether a call of the first round took several times as long as what is too slow."""
        own, anchor = self._samples[name][0], self._samples[ANCHOR][0]
        if anchor.used_s < _LEAST_USED_S:
            return False
        least = min(own.wall_s / anchor.wall_s, own.used_s / anchor.used_s)
        return least > _HOPELESS * limit

    def _is_beaten(self, name: str, effort: Effort) -> bool:
        """Whether another one, which is chosen rather than this one, is known to be faster."""
        tie, sure = effort.tie, effort.sure
        rival = tie and name in effort.errors and sure in self.names - {name}
        if tie and rival and self.between(name, sure).low > tie:
            return True
        errors = effort.errors
        return any(self.between(name, n).low > 1 for n in self._no_less_exact(name, errors))

    def _no_less_exact(self, name: str, errors: Mapping[str, float]) -> list[str]:
        """Callables of no more error than ``name``; none if it has no error."""
        if name not in errors:
            return []
        return [n for n in errors if n in self.names and errors[n] <= errors[name]]

    def _open(self, effort: Effort) -> set[str]:
        """Names of callables that need more rounds."""
        self._lost |= {n for n in self.names if self._is_beaten(n, effort)}
        slowdowns = {name: self.slowdown(name) for name in self.names - self._lost}
        unknown = {
            n
            for n, s in slowdowns.items()
            if s.spread > effort.known_to
            and s.low <= effort.limit
            and (n in effort.errors or not effort.errors)
        }
        unknown |= self._ties(effort)
        if not effort.order:
            return unknown | {n for n, s in slowdowns.items() if s.low < effort.limit < s.high}
        return self.unsettled(effort.limit) | unknown

    def _ties(self, effort: Effort) -> set[str]:
        """Names of pairs of which it is open whether the more accurate one is as fast."""
        if effort.tie is None:
            return set()
        left = [
            n
            for n in effort.errors
            if n in self.names - self._lost and self.slowdown(n).low <= effort.limit
        ]
        tied_names = set[str]()
        for fine, coarse in permutations(left, 2):
            if effort.errors[fine] < effort.errors[coarse]:
                ratio = self.between(fine, coarse)
                if ratio.low <= effort.tie < ratio.high and ratio.spread > _TIE_KNOWN_TO:
                    tied_names |= {fine, coarse}
        return tied_names

    def unsettled(self, limit: float = math.inf) -> set[str]:
        """Names whose order with a neighbour is open, unless both are beyond ``limit``."""
        left = {*self.names, ANCHOR} - self._lost
        order = sorted(left, key=lambda name: self.slowdown(name).median)
        return {
            name
            for pair in pairwise(order)
            if not self.between(*pair).settles(self.matters)
            and any(self.slowdown(one).low <= limit for one in pair)
            for name in pair
        }

    @property
    def names(self) -> frozenset[str]:
        """Names of all callables but the anchor, and those that failed."""
        return frozenset(self.calls) - {ANCHOR, *self.failed}

    @property
    def failed(self) -> dict[str, EngineError]:
        """Why callables left the race, by name."""
        return self._turns.failed

    def slowdown(self, name: str) -> Interval:
        """The time of ``name`` over the anchor's."""
        return self.between(name, ANCHOR)

    def speed(self, name: str) -> Interval:
        """How many times as fast as the anchor ``name`` is."""
        return self.between(ANCHOR, name)

    def latency(self, name: str) -> Latency:
        """All times of ``name``, in the order of the rounds."""
        return Latency(samples_s=tuple(took.wall_s for took in self._samples[name].values()))

    def latency_s(self, name: str) -> float:
        """Time of a call: the anchor's median time multiplied by the slowdown of ``name``."""
        return self.latency(ANCHOR).median_s * self.slowdown(name).median

    def between(self, one: str, other: str) -> Interval:
        """The time of ``one`` over that of ``other``, in the rounds that both ran in."""
        return _middle([_typical(np.sort(r)) for r in self._by_process(one, other)])

    def speeds(self, name: str) -> tuple[float, ...]:
        """How many times as fast as the anchor ``name`` was in each process, in order."""
        return tuple(_typical(np.sort(r)).median for r in self._by_process(ANCHOR, name))

    def is_as_fast(self, one: str, other: str, tie: float) -> bool:
        """Whether ``one`` counts as taking at most ``tie`` times as long as ``other``.

        Where noise leaves their ratio open, it counts as long as the ratio may be so small.
        """
        ratio = self.between(one, other)
        return ratio.low <= tie and ratio.median <= _TIE_MEDIAN

    @property
    def denied(self) -> float:
        """The share of the processor time wanted that went to other processes, if it matters.

        0 if other processes took little, or if calls are not known by the processor time that
        they used. Where it is more, ratios are those of the processor times.
        """
        computing = self._wanted.total_s >= _COMPUTING * self._lasted_s
        return self._wanted.denied if computing and self._wanted.is_busy else 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """What there is to say of the times."""
        note = (
            f"calls waited {self.denied:.0%} of their time for other processes: speeds compare"
            f" the processor time of calls, and {WAITING_COUNTS}"
        )
        return (note,) if self.denied else ()

    def _check_anchor(self) -> None:
        if ANCHOR in self.failed:
            raise self.failed[ANCHOR]

    def _ratios(self, one: str, other: str = ANCHOR) -> list[float]:
        return [ratio for ratios in self._by_process(one, other) for ratio in ratios]

    def _by_process(self, one: str, other: str) -> list[list[float]]:
        """The ratios of the rounds that both ran in, by the processes that have such."""
        for name in (one, other):
            if name in self.failed:
                raise self.failed[name]
        first, second, by_used = self._samples[one], self._samples[other], self.denied > 0
        by_process = [list[float]() for _ in self._begins]
        for number in first.keys() & second.keys():
            a, b = first[number], second[number]
            process = bisect_right(self._begins, number) - 1
            ratio = a.used_s / b.used_s if by_used else a.wall_s / b.wall_s
            by_process[process].append(ratio)
        return [ratios for ratios in by_process if ratios]

    def _go_on(self, names: Collection[str], rounds: int, min_time_s: float) -> None:
        before, start = Demand.now(), now_s()
        done = 0
        while done < rounds or now_s() < start + min_time_s:
            for name, took in self._turns.round(names).items():
                self._samples[name][self._rounds] = took / self.share
            self._check_anchor()
            self._rounds += 1
            done += 1
        self._wanted += Demand.now().since(before)
        self._lasted_s += now_s() - start


def _typical(ratios: NDArray[np.float64]) -> Interval:
    """The trimmed geometric mean of sorted ``ratios``, and its interval.

    Of the inverse ratios it is the inverse: a speed is the quotient of the two times told.
    """
    count = len(ratios)
    cut, about = int(_TRIMMED * count), float(ratios[count // 2])
    logs = np.log(ratios / about)
    middle, reach = float(logs[cut : count - cut].mean()), 0.0
    if count > 1:
        winsorised = logs.clip(logs[cut], logs[count - 1 - cut])
        reach = INTERVAL * float(winsorised.std(ddof=1)) * count**0.5 / (count - 2 * cut)
    low, median, high = (about * np.exp([middle - reach, middle, middle + reach])).tolist()
    return Interval(low=low, median=median, high=high)


def _middle(processes: Sequence[Interval]) -> Interval:
    """The middle of what processes measured, and an interval that has them all.

    It is no narrower than that of the process nearest to the middle.
    """
    if len(processes) == 1:
        return processes[0]
    medians = [one.median for one in processes]
    middle = math.exp(median(map(math.log, medians)))
    nearest = min(processes, key=lambda one: abs(math.log(one.median / middle)))
    return Interval(
        low=min(nearest.low, *medians), median=middle, high=max(nearest.high, *medians)
    )


def _never_called() -> None:
    raise AssertionError("given times call nothing")
