"""A plan by op is looked for only where a rung that fails is faster than all that pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from finecast_neuron.ladder import search_per_op


@pytest.mark.parametrize(
    ("best_s", "fastest_s", "why"),
    [
        (2.0, 2.0, "no plan by op can be faster"),
        (2.0, 1.0, "no plan by op that was tried"),
        (None, 1.0, "no plan by op that was tried"),
    ],
)
def test_where_to_look_beyond_the_ladder(
    best_s: float | None, fastest_s: float, why: str
) -> None:
    best = None if best_s is None else SimpleNamespace(time_s=best_s)
    no_rungs: Any = SimpleNamespace(best=best, fastest_s=fastest_s, rungs=())
    walk: Any = None  # is not asked where there is nothing to start from
    found, told = search_per_op(walk, no_rungs)
    assert found is None
    assert told.startswith(why)
