"""``spread`` keeps both ends and steps evenly spaced by time and error."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from finecast.solver.frontier import spread

falls = st.lists(st.floats(0.01, 10), min_size=1, max_size=40)


@given(falls, st.integers(2, 12), st.data())
def test_both_ends_are_kept_and_no_more_than_asked_for(
    steps: list[float], count: int, data: st.DataObject
) -> None:
    size = len(steps)
    grows = data.draw(st.lists(st.floats(0.01, 10), min_size=size, max_size=size))
    time_s = 100.0 * size - np.cumsum([0.0, *steps])
    error = np.cumsum([0.0, *grows])
    kept = spread(time_s, error, count)
    assert kept[0] == 0
    assert kept[-1] == size
    assert len(kept) <= count
    assert np.all(np.diff(kept) > 0)


def test_where_time_hardly_differs_the_error_decides() -> None:
    """As in int8, where the fastest plans are equally fast and differ in error."""
    time_s = np.array([100.0, 50, 50 - 1e-6, 50 - 2e-6, 50 - 3e-6])
    error = np.array([0.0, 1, 16, 49, 100])
    assert list(spread(time_s, error, 3)) == [0, 1, 4]
    assert list(spread(time_s, error, 4)) == [0, 1, 2, 4]
    assert len(spread(time_s, error, 5)) >= 4


def test_where_nothing_is_wrong_time_decides() -> None:
    time_s = np.linspace(10.0, 0.0, 11)
    assert list(spread(time_s, np.zeros(11), 3)) == [0, 5, 10]
