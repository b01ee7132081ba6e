"""What a user gets without tuning is said to be better where it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from finecast.measure.racing import Interval
from finecast.numbers.formats import Format
from finecast.planning.proposing import propose
from finecast.tuning.findings import foretold
from finecast.tuning.hint import Baseline, better_alone
from tests.reports import made

CLEAR = Interval(low=0.93, median=0.95, high=0.97)
LEANING = Interval(low=0.93, median=0.95, high=1.01)
NARROW = Interval(low=0.985, median=0.99, high=0.995)
BEHIND = Interval(low=0.96, median=1.01, high=1.05)
SLOWER = Interval(low=1.01, median=1.03, high=1.05)


@pytest.mark.parametrize(
    ("metric", "passed", "first", "second", "told"),
    [
        (0.9, True, CLEAR, CLEAR, True),
        (0.8, True, CLEAR, CLEAR, True),  # as accurate as the result
        (0.79, True, CLEAR, CLEAR, False),
        (0.9, False, CLEAR, CLEAR, False),
        (0.9, True, LEANING, CLEAR, True),  # within noise at first
        (0.9, True, CLEAR, LEANING, False),  # the first race was noise
        (0.9, True, CLEAR, SLOWER, False),
        (0.9, True, BEHIND, CLEAR, False),  # the two races contradict each other
        (0.9, True, SLOWER, CLEAR, False),
        (0.9, True, NARROW, NARROW, False),  # 1%: a plan that gains so little is none
    ],
)
def test_an_anchor_is_named_if_two_races_show_it_better(
    metric: float, passed: bool, first: Interval, second: Interval, told: bool
) -> None:
    name = "the engine's bf16 hint"
    baseline = Baseline(
        name=name, metric=metric, passed=passed, latency_s=1.0, cost=first.median
    )
    raced: list[list[str]] = []

    def again(names: Sequence[str]) -> Callable[[str], Interval]:
        raced.append([*names])
        return {name: second}.__getitem__

    found = better_alone(
        [baseline],
        lambda m: m >= 0.8,
        {name: first}.__getitem__,
        again,
        result="fp32",
        cost=1.0,
    )
    wanted = f"{name} is 5.3% faster than fp32 and no less accurate: use it instead"
    assert found == ((wanted,) if told else ())
    maybe = passed and metric >= 0.8 and first.low < 1
    assert raced == ([[name]] if maybe else [])


def test_what_was_predicted_of_a_plan_by_the_hint_is_no_measurement_of_it() -> None:
    """The search ranks it by an error that is corrected once it ran."""
    planner, analysis, plan = made.planned(5)
    own = next(p for p in propose(planner, analysis) if p.plan.digest == plan.digest)
    hinted, corrected = replace(plan, by_hint=True), 9 * own.error
    assert foretold(planner, analysis, plan, own.error) == pytest.approx(own.error**0.5)
    assert foretold(planner, analysis, hinted, corrected) == pytest.approx(own.error**0.5)
    cached = replace(hinted, kv_cache=Format.BF16)  # its error is not that of ops alone
    assert foretold(planner, analysis, cached, corrected) == pytest.approx(3 * own.error**0.5)
