"""The fastest option of a chain that passes, found by bisection."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from finecast import Plan
from finecast.tuning import Candidate
from finecast_neuron.ladder import fastest_passing


def candidate(name: str, cost: float, error: float) -> Candidate:
    plan = Plan(model=name, policy="auto:bf16", opset=22, decisions=())
    return Candidate(name=name, plan=plan, error=error, cost=cost, latency_s=cost, casts=0)


@given(st.integers(0, 40), st.integers(0, 41))
def test_finds_the_fastest_that_passes(count: int, first: int) -> None:
    chained = [candidate(str(i), 1.04**i, float(count - i)) for i in range(count)]
    tried: list[int] = []

    def passes(one: Candidate) -> bool:
        tried.append(int(one.name))
        return int(one.name) >= first

    found = fastest_passing(chained, passes)
    assert (found is None) == (first >= count)
    assert found is None or found is chained[first]
    assert len(tried) == len(set(tried))
    assert len(tried) <= (1 + math.ceil(math.log2(count)) if count else 0)


@given(st.integers(1, 30), st.integers(0, 30))
def test_of_those_as_fast_as_the_fastest_the_most_accurate_that_passes(
    count: int, first: int
) -> None:
    """In steps of 1% two more are within 3%."""
    chained = [candidate(str(i), 1.01**i, float(count - i)) for i in range(count)]
    found = fastest_passing(chained, lambda one: int(one.name) >= first)
    assert found is (None if first >= count else chained[min(first + 2, count - 1)])


def test_one_as_fast_that_misses_is_not_taken() -> None:
    chained = [candidate(str(i), 1.01**i, float(3 - i)) for i in range(3)]
    found = fastest_passing(chained, lambda one: one.name == "0")
    assert found is chained[0]


@given(st.lists(st.booleans(), max_size=20))
def test_what_is_returned_was_evaluated_and_passed(answers: list[bool]) -> None:
    chained = [
        candidate(str(i), 1.0 + i, float(len(answers) - i)) for i in range(len(answers))
    ]
    passed: list[str] = []

    def passes(one: Candidate) -> bool:
        if answers[int(one.name)]:
            passed.append(one.name)
        return answers[int(one.name)]

    found = fastest_passing(chained, passes)
    assert found is None or found.name in passed
