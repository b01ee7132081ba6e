"""The search evaluates few plans and returns the fastest that passes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.planning.plan import Plan
from finecast.planning.problem import Proposal
from finecast.tuning.search import (
    Candidate,
    chain,
    none_passes,
    rivals,
    worth_timing,
)

PLAN = Plan(model="m", policy="auto:bf16", opset=22, decisions=())
RECORDED = Path(__file__).parent.parent / "samples" / "tunings"
SAME = 1.03  # plans within this ratio are as fast as one another
GAIN = 1.02  # by which a plan has to be faster than fp32


def candidate(name: str, latency_s: float, error: float) -> Candidate:
    return Candidate(
        name=name, plan=PLAN, error=error, cost=latency_s, latency_s=latency_s, casts=0
    )


@st.composite
def many(draw: st.DrawFn, *, least: int = 0) -> list[Candidate]:
    pairs = st.tuples(st.integers(50, 150), st.integers(0, 20))
    drawn = draw(st.lists(pairs, min_size=least, max_size=12))
    return [candidate(str(i), t / 100, e / 10) for i, (t, e) in enumerate(drawn)]


@given(many())
def test_a_chain_trades_time_for_accuracy(candidates: list[Candidate]) -> None:
    kept = chain(candidates, 1.0)
    assert all(a.latency_s < b.latency_s and a.error > b.error for a, b in pairwise(kept))
    assert all(c.latency_s * GAIN < 1.0 for c in kept)


@given(many())
def test_nothing_dropped_was_worth_a_trial(candidates: list[Candidate]) -> None:
    kept = chain(candidates, 1.0)
    for one in candidates:
        slow = one.latency_s * GAIN >= 1.0
        assert slow or any(
            k.error <= one.error and k.latency_s <= one.latency_s * SAME for k in kept
        )


@given(st.lists(st.floats(0.0, 0.045), min_size=1, max_size=12))
def test_a_dropped_candidate_is_within_three_percent_of_a_kept_one(steps: list[float]) -> None:
    """In a chain of close ones, too: each is as fast as the next, the ends are not."""
    latency_s, candidates = 0.5, list[Candidate]()
    for number, step in enumerate(steps):
        latency_s *= 1 + step
        candidates.append(candidate(str(number), latency_s, float(len(steps) - number)))
    kept = chain(candidates, 10.0)
    for one in candidates:
        assert any(k.error <= one.error and k.latency_s <= one.latency_s * SAME for k in kept)


@given(many(), st.randoms(use_true_random=False))
def test_the_order_of_candidates_does_not_matter(
    candidates: list[Candidate], random: Any
) -> None:
    shuffled = random.sample(candidates, len(candidates))
    assert [(c.latency_s, c.error) for c in chain(shuffled, 1.0)] == [
        (c.latency_s, c.error) for c in chain(candidates, 1.0)
    ]


def test_of_two_as_fast_the_more_accurate_is_kept() -> None:
    found = chain([candidate("a", 0.500, 2.0), candidate("b", 0.505, 1.0)], 1.0)
    assert [c.name for c in found] == ["b"]


def test_what_beats_nothing_is_dropped() -> None:
    worse = candidate("worse", 0.6, 3.0)
    found = chain([candidate("a", 0.5, 2.0), worse, candidate("b", 0.8, 1.0)], 1.0)
    assert [c.name for c in found] == ["a", "b"]


def test_of_costs_that_are_known_there_is_no_rival() -> None:
    fastest = candidate("fastest", 1.0, 5.0)
    others = [candidate(str(t), t / 100, e) for t in range(90, 120) for e in (1.0, 9.0)]
    slower = [c for c in others if c.cost >= 1.0 / SAME or c.error < 5.0]
    assert rivals(slower, fastest) == []


@pytest.mark.parametrize(
    ("cost", "error", "may_be_better"),
    [
        (1.06, 1.0, True),  # may be as fast, and is more accurate
        (1.01, 1.0, True),
        (1.15, 1.0, False),  # surely slower
        (1.02, 7.0, True),  # may be faster by more than matters
        (1.09, 7.0, False),
    ],
)
def test_what_may_be_better_is_a_rival(
    cost: float, error: float, *, may_be_better: bool
) -> None:
    """All costs are known to 3%."""
    fastest, other = (
        replace(candidate(name, c, e), spread=0.03)
        for name, c, e in (("fastest", 1.0, 5.0), ("other", cost, error))
    )
    assert rivals([other], fastest) == ([other] if may_be_better else [])


def test_what_is_predicted_to_gain_too_little_is_not_timed() -> None:
    """Less than half of what is asked for; predictions are not that far off."""
    steps = [
        Proposal(name=str(t), plan=PLAN, time_s=t, error=0.0) for t in (1.0, 0.995, 0.985, 0.6)
    ]
    assert [p.time_s for p in worth_timing(steps)] == [0.985, 0.6]
    assert [p.time_s for p in worth_timing(steps, 2.0)] == [0.6]
    assert worth_timing([]) == []


@pytest.mark.parametrize(
    ("spent", "resumable", "says"),
    [
        ("", True, "10 more were not tried: by time and predicted error they promised less"),
        ("the limit of 3 s is reached", False, "not tried: the limit of 3 s is reached"),
        ("the limit of 3 s is reached", True, "is reached; --resume goes on from here"),
    ],
)
def test_why_plans_were_not_tried(spent: str, resumable: bool, says: str) -> None:
    why = none_passes(1, 11, 0.9, spent=spent, resumable=resumable)
    assert says in why
    assert ("promised" in why) is (not spent)
