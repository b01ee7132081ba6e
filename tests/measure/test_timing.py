from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest

from finecast.measure.timing import Latency, Turns


def test_each_follows_each_other_about_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran before is felt: by a fixed order one model was 10% slower than itself."""
    clock = Clock()
    monkeypatch.setattr("finecast.measure.timing.time", clock)
    made: list[str] = []

    def call(name: str) -> Callable[[], None]:
        def run() -> None:
            made.append(name)
            clock.wait(1.0)

        return run

    turns = Turns({name: call(name) for name in "abcd"})
    for _ in range(1000):
        turns.round("abcd")
    assert all(sorted(made[i : i + 4]) == [*"abcd"] for i in range(0, len(made), 4))
    follows = Counter(pairwise(made))
    for name in "abcd":
        others = [n for (_, later), n in follows.items() if later == name]
        assert len(others) == 4
        # Itself, at the turn of two rounds, one time in four times four.
        assert all(200 < follows[other, name] < 400 for other in "abcd" if other != name)
        assert 30 < follows[name, name] < 100


def test_of_a_short_call_the_second_in_turn_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first finds the caches as another model left them."""
    clock = Clock()
    monkeypatch.setattr("finecast.measure.timing.time", clock)
    last: list[str] = []

    def call(name: str, warm_s: float) -> Callable[[], None]:
        def run() -> None:
            clock.wait(warm_s if last == [name] else 2 * warm_s)
            last[:] = [name]

        return run

    def measured(longer_s: float) -> set[float]:
        turns = Turns({"one": call("one", 2**-9), "longer": call("longer", longer_s)})
        turns.warm_up(3)
        return {turns.round(turns.calls)["one"].wall_s for _ in range(9)}

    assert measured(longer_s=2**-8) == {2**-9}
    assert 2**-8 in measured(longer_s=2**-4)


def test_a_sample_is_the_time_of_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("finecast.measure.timing.time", clock)
    turns = Turns({"short": lambda: clock.wait(2.0), "long": lambda: clock.wait(3.0)})
    for _ in range(2):
        found = turns.round(turns.calls)
        assert {name: took.wall_s for name, took in found.items()} == {
            "short": 2.0,
            "long": 3.0,
        }


@dataclass
class Clock:
    """Time that only calls move; stands for the module ``time``."""

    now_s: float = 128.0

    def perf_counter(self) -> float:
        return self.now_s

    process_time = staticmethod(time.process_time)

    def wait(self, time_s: float) -> None:
        self.now_s += time_s


def test_quantiles() -> None:
    times = Latency(samples_s=tuple(float(i) for i in range(1, 12)))
    assert (times.median_s, times.p10_s, times.p90_s) == (6, 2, 10)
    assert times.iqr_s == 5
