"""The smallest set that passes: laws, against all sets."""

from __future__ import annotations

import math
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from finecast.solver.smallest_set import smallest_set

COUNT = 12
SETS = st.lists(
    st.frozensets(st.integers(0, COUNT - 1), min_size=1, max_size=4), min_size=1, max_size=3
)


@given(SETS, st.permutations(range(COUNT)))
def test_the_set_passes_and_each_member_is_needed(
    passing: list[frozenset[int]], order: list[int]
) -> None:
    """A test passes on all that hold one of some sets: it never fails on more."""

    def test(members: frozenset[int]) -> bool:
        return any(members >= one for one in passing)

    found = smallest_set(order, test, most=1000)
    members = frozenset(found.members)
    assert found.is_minimal
    assert test(members)
    for size in range(len(members)):
        assert not any(test(frozenset(some)) for some in combinations(members, size))
    assert list(found.members) == [m for m in order if m in members]


@given(st.integers(1, 2000), st.integers(0, 3))
def test_one_member_among_the_first_four_takes_few_tests(count: int, rank: int) -> None:
    wanted = min(rank, count - 1)
    tested: list[frozenset[int]] = []

    def test(members: frozenset[int]) -> bool:
        tested.append(members)
        return wanted in members

    found = smallest_set(range(count), test, most=1000)
    assert found.members == (wanted,)
    assert len(tested) <= math.log2(count) + 3
    assert len(set(tested)) == len(tested)


@given(SETS, st.integers(1, 6))
def test_when_tests_run_out_the_set_still_passes(
    passing: list[frozenset[int]], most: int
) -> None:
    tested: list[frozenset[int]] = []

    def test(members: frozenset[int]) -> bool:
        tested.append(members)
        return any(members >= one for one in passing)

    found = smallest_set(range(COUNT), test, most=most)
    assert len(tested) <= most
    assert test(frozenset(found.members))
