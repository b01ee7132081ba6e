from __future__ import annotations

from dataclasses import dataclass

import pytest

from finecast.errors import UsageError
from finecast.measure.timing import Latency, latency, ratio


def test_callables_run_in_turns_in_alternating_order() -> None:
    calls: list[str] = []
    found = latency(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        min_time_s=0,
        repeats=3,
        warmup=1,
    )
    assert calls == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert found["a"].runs == found["b"].runs == 3


def test_a_sample_is_the_time_of_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("finecast.measure.timing.time", clock)
    found = latency(
        {"short": lambda: clock.wait(2.0), "long": lambda: clock.wait(3.0)},
        min_time_s=0,
        repeats=2,
    )
    assert {name: times.samples_s for name, times in found.items()} == {
        "short": (2.0, 2.0),
        "long": (3.0, 3.0),
    }


@dataclass
class Clock:
    """Time that only calls move; stands for the module ``time``."""

    now_s: float = 128.0

    def perf_counter(self) -> float:
        return self.now_s

    def wait(self, time_s: float) -> None:
        self.now_s += time_s


def test_quantiles() -> None:
    times = Latency(samples_s=tuple(float(i) for i in range(1, 12)))
    assert (times.median_s, times.p10_s, times.p90_s) == (6, 2, 10)
    assert times.iqr_s == 5
    assert times.spread == pytest.approx(5 / 6)


def test_ratios_are_taken_within_rounds() -> None:
    # a disturbance that hits a whole round leaves its ratio alone
    a = Latency(samples_s=(2.0, 20.0, 2.0))
    b = Latency(samples_s=(1.0, 10.0, 1.0))
    found = ratio(a, b)
    assert (found.median, found.low, found.high, found.spread) == (2, 2, 2, 0)


def test_figures_of_different_rounds_are_not_compared() -> None:
    a = Latency(samples_s=(1.0,))
    with pytest.raises(UsageError, match="cannot compare 1 runs with 2"):
        ratio(a, Latency(samples_s=(1.0, 1.0)))


def test_nothing_to_time() -> None:
    assert latency({}) == {}
