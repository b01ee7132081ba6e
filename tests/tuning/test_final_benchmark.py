"""The last race decides between plans that nearly tie; it leans to the more accurate one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from finecast.engines.probe import Speed
from finecast.measure.racing import ANCHOR, Effort, Race
from finecast.tuning.conclusion import beside_no_gain, final_benchmark
from finecast.tuning.measuring import Measurements
from finecast.tuning.search import Candidate
from tests.tuning.test_trials import candidate

FAST, FINE = candidate("fast", 0.5, 4.0, 0.1), candidate("fine", 0.53, 1.0, 0.1)
CALM, BUSY = (0.0,) * 9, (-0.08, -0.06, -0.04, -0.02, 0.0, 0.02, 0.04, 0.06, 0.08)


class Clock:
    """Calls take what is stated; time passes for nothing else."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    process_time = perf_counter


def raced(
    monkeypatch: pytest.MonkeyPatch, slower: float, noise: Sequence[float]
) -> Measurements:
    """``fine`` takes ``slower`` times what ``fast`` takes, in each round with other noise."""
    clock = Clock()
    monkeypatch.setattr("finecast.measure.timing.time", clock)
    calls = Counter[str]()

    def call(name: str, took_s: float, share: Sequence[float]) -> None:
        clock.now_s += took_s * (1 + share[calls[name] % len(share)])
        calls[name] += 1

    race = Race.of(
        lambda: call(ANCHOR, 1.0, CALM),
        {
            FAST.plan.digest: lambda: call("fast", 0.5, CALM),
            FINE.plan.digest: lambda: call("fine", 0.5 * slower, noise),
        },
        Effort(min_time_s=0.0, rounds=len(noise), warmup=0),
    )
    return Measurements(costs=race, times=race)


@pytest.mark.parametrize(
    ("slower", "noise", "taken"),
    [
        (1.0, CALM, "fine"),
        (1.01, CALM, "fast"),
        (1.02, BUSY, "fine"),  # it may be as fast
        (1.05, BUSY, "fine"),
        (1.12, BUSY, "fast"),
    ],
)
def test_a_more_accurate_plan_is_taken_until_it_is_known_to_be_slower(
    monkeypatch: pytest.MonkeyPatch, slower: float, noise: Sequence[float], taken: str
) -> None:
    candidates = [FAST, FINE]
    measured = raced(monkeypatch, slower, noise)

    def race(racing: Sequence[Candidate]) -> Measurements:
        assert {c.name for c in racing} == {"fast", "fine"}
        return measured

    best, told = final_benchmark(
        FAST,
        candidates,
        fp32=1.0,
        min_speedup=1.02,
        race=race,
        error=lambda c: c.error,
    )
    assert best.name == taken
    assert told is measured


@pytest.mark.parametrize(("fine", "taken"), [(1.1, FAST), (0.85, FAST), (0.75, FINE)])
def test_errors_are_measured_of_plans_that_nearly_tie(
    monkeypatch: pytest.MonkeyPatch, fine: float, taken: Candidate
) -> None:
    """``fine`` was predicted to be more accurate, and may not be: 5% are no difference."""
    candidates = [FAST, FINE]
    measured = raced(monkeypatch, 1.005, BUSY)
    best, _ = final_benchmark(
        FAST,
        candidates,
        fp32=1.0,
        min_speedup=1.02,
        race=lambda _: measured,
        error=lambda c: {"fast": 0.9, "fine": fine}[c.name],
    )
    assert (best.name, best.error) == (taken.name, taken.error), "as predicted"


def test_formats_that_gain_by_themselves_are_told_in_one_sentence() -> None:
    speeds = [Speed(gains=text != "tf32", text=text) for text in ("bf16", "tf32", "int8")]
    why, other = beside_no_gain(speeds)
    assert why.endswith(
        "calls of more kernels cost; large products alone would gain (bf16, int8)"
    )
    assert other == "tf32"
    assert beside_no_gain(speeds[1:2]) == ["tf32"]
