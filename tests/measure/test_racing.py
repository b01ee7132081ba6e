from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finecast.measure.racing import Interval, Race


@dataclass
class Clock:
    """Time that only calls move; stands for the module ``time``."""

    now_s: float = 128.0
    calls: list[str] = field(default_factory=list[str])

    def perf_counter(self) -> float:
        return self.now_s

    def taking(self, name: str, times: Iterator[float]) -> Callable[[], None]:
        def call() -> None:
            self.calls.append(name)
            self.now_s += next(times)

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("finecast.measure.racing.time", made)
    return made


def noisy(mean_s: float, noise: float, seed: int) -> Iterator[float]:
    rng = np.random.default_rng(seed)
    while True:
        yield mean_s * float(np.exp(noise * rng.standard_normal()))


def race(clock: Clock, noise: float, **means: float) -> Race:
    calls = {
        name: clock.taking(name, noisy(mean, noise, seed))
        for seed, (name, mean) in enumerate(means.items())
    }
    return Race(calls=calls, anchor=next(iter(means)))


def test_each_round_runs_all_in_alternating_order(clock: Clock) -> None:
    race(clock, 0.0, a=1.0, b=2.0).run(rounds=3, min_time_s=0, warmup=1)
    assert clock.calls == ["a", "b", "a", "b", "b", "a", "a", "b"]


def test_what_is_settled_takes_no_more_rounds(clock: Clock) -> None:
    found = race(clock, 0.05, fp32=3.0, slow=2.0, one=1.0, same=1.04)
    found.run(rounds=7, min_time_s=0)
    before = clock.calls.count("slow")
    found.settle(most_s=10_000)
    assert clock.calls.count("slow") == before == 7
    assert clock.calls.count("one") == clock.calls.count("same") > 7
    assert found.slowdown("one").median < found.slowdown("same").median


def test_equals_are_not_raced_for_ever(clock: Clock) -> None:
    found = race(clock, 0.05, fp32=3.0, one=1.0, same=1.0)
    found.run(rounds=7, min_time_s=0)
    found.settle(most_s=1e9)
    assert found.unsettled() == set()
    assert found.latency("one").runs < 1000


def test_seconds_bound_it(clock: Clock) -> None:
    found = race(clock, 1.0, fp32=1.0, one=1.0)
    found.run(rounds=5, min_time_s=0)
    start = clock.now_s
    found.settle(most_s=50.0)
    assert found.unsettled()
    assert clock.now_s - start < 50 + 5 * 2 * 60


def test_a_disturbance_of_some_rounds_changes_no_speed(clock: Clock) -> None:
    def disturbed(mean: float) -> Iterator[float]:
        for turn in range(1000):
            yield mean * (10.0 if 10 <= turn < 24 else 1.0)

    calls = {n: clock.taking(n, disturbed(m)) for n, m in {"fp32": 2.0, "low": 1.0}.items()}
    found = Race(calls=calls, anchor="fp32")
    found.run(rounds=25, min_time_s=0)
    assert found.slowdown("low") == Interval(low=0.5, median=0.5, high=0.5)
    assert found.latency("fp32").median_s == 20.0  # more than half of its rounds


def test_a_time_is_stated_beside_the_anchor(clock: Clock) -> None:
    # "low" ran on in slow rounds, as did the anchor: its time is not compared across rounds.
    def slower(mean: float) -> Iterator[float]:
        for turn in range(1000):
            yield mean * (1.0 if turn < 5 else 3.0)

    calls = {
        n: clock.taking(n, slower(m))
        for n, m in {"fp32": 2.0, "low": 1.0, "near": 1.01}.items()
    }
    found = Race(calls=calls, anchor="fp32")
    found.run(rounds=9, min_time_s=0)
    assert found.latency_s("near") / found.latency_s("low") == pytest.approx(1.01)


@settings(max_examples=50, deadline=None)
@given(
    low=st.floats(0.5, 2.0),
    widths=st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)),
    matters=st.floats(1.0, 1.2),
)
def test_settled_is_known_order_or_no_matter(
    low: float, widths: tuple[float, float], matters: float
) -> None:
    one = Interval(low=low, median=low + widths[0], high=low + sum(widths))
    other = Interval(low=1 / one.high, median=1 / one.median, high=1 / one.low)
    surely_apart = one.low > 1 or one.high < 1
    surely_near = max(one.high, other.high) <= matters
    assert one.settles(matters) == (surely_apart or surely_near)


def test_nothing_to_time() -> None:
    Race(calls={}, anchor="").run(rounds=3, min_time_s=0)
