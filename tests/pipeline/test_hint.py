"""What a user gets without tuning is said to be better where it is."""

from __future__ import annotations

import pytest

from finecast.measure.racing import Interval
from finecast.pipeline.hint import Anchor, better_alone


@pytest.mark.parametrize(
    ("metric", "passed", "high", "told"),
    [
        (0.9, True, 0.97, True),
        (0.8, True, 0.97, True),  # as accurate as the result
        (0.79, True, 0.97, False),
        (0.9, False, 0.97, False),
        (0.9, True, 1.01, False),  # it may be slower
    ],
)
def test_an_anchor_that_is_better_in_both(
    metric: float, passed: bool, high: float, told: bool
) -> None:
    anchor = Anchor(
        name="the hint alone", metric=metric, passed=passed, latency_s=1.0, cost=1.0
    )
    cost = Interval(low=0.93, median=0.95, high=high)
    found = better_alone([anchor], lambda m: m >= 0.8, {"the hint alone": cost}.__getitem__)
    wanted = (
        "the hint alone is 5.3% faster than the result and no less accurate: use it instead"
    )
    assert found == ((wanted,) if told else ())
