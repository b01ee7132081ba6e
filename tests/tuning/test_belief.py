"""What is believed of plans, by what was predicted of them and measured of others."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.numbers.formats import Format
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, Proposal
from finecast.planning.proposing import stated
from finecast.tuning.belief import Belief, Estimate, Process
from finecast.tuning.decision_chances import DecisionChances
from tests.tuning.test_probing import OPS, chain

numbers = st.floats(-3, 3)
features = st.lists(st.floats(0, 1), min_size=4, max_size=4).map(np.array)


@given(seen=st.lists(features, max_size=5), asked=features)
def test_what_is_as_expected_makes_nothing_less_certain(
    seen: list[np.ndarray], asked: np.ndarray
) -> None:
    process = Process()
    mean, off = process.at(asked[None])
    assert mean[0] == 0
    assert off[0] == pytest.approx(np.linalg.norm(asked))
    for known in seen:
        process.observe(known, float(process.at(known[None])[0][0]), 0.1)
        before = off
        _, off = process.at(asked[None])
        assert off[0] <= before[0] + 1e-6


def test_a_surprise_makes_other_plans_less_certain() -> None:
    """Also of those that have nothing in common with what was measured."""
    process, other = Process(), np.array([[0.0, 0.1]])
    process.observe(np.array([0.1, 0.0]), 0.5, 0.01)
    mean, off = process.at(other)
    assert mean[0] == 0
    assert off[0] > 0.3


@given(known=features.filter(lambda f: np.linalg.norm(f) > 0.1), value=numbers)
def test_what_was_measured_of_a_plan_is_believed_of_it(
    known: np.ndarray, value: float
) -> None:
    process = Process()
    process.observe(known, value, 1e-4)
    mean, off = process.at(known[None])
    assert mean[0] == pytest.approx(value, abs=1e-3)
    assert off[0] < 1e-2


@given(cost=numbers, limit=numbers, passes=st.floats(0, 1))
def test_the_expected_gain_of_what_is_known_is_what_it_saves(
    cost: float, limit: float, passes: float
) -> None:
    def believed(off: float) -> Estimate:
        return Estimate(
            cost=np.array([cost]), cost_off=np.array([off]), passes=np.array([passes])
        )

    known = believed(0.0).gain(limit)[0]
    assert known == pytest.approx(passes * max(limit - cost, 0.0), abs=1e-6)
    assert believed(0.3).gain(limit)[0] >= known - 1e-6  # it may turn out to be faster
    assert believed(0.0).gain(limit, 1.0)[0] == pytest.approx(max(limit - cost, 0.0), abs=1e-6)


def lowered(planner: Planner, analysis: Analysis, *ops: int) -> Proposal:
    ids = {node.name: node.id for node in planner.graph.nodes}
    formats = {ids[f"n{op}"]: Format.BF16 for op in ops}
    return stated(planner, analysis, formats, f"{ops}")


@pytest.fixture
def believed() -> Belief:
    planner, analysis = chain([0.5] * OPS, [1.0] * OPS)
    return Belief(planner=planner, analysis=analysis, reference=float(OPS))


def test_a_measured_cost_tells_most_of_plans_with_the_same_parts(believed: Belief) -> None:
    tried = lowered(believed.planner, believed.analysis, 0, 1)
    alike = lowered(believed.planner, believed.analysis, 0, 1, 2)
    other = lowered(believed.planner, believed.analysis, 2, 3)
    before = believed.of([tried, alike, other])
    rising = float(before.cost_off[0])
    slower = math.exp(float(before.cost[0]) + rising)
    believed.measured(tried, slower, 0.001)
    after = believed.of([tried, alike, other])
    rise = after.cost - before.cost
    assert rise[0] == pytest.approx(rising)
    assert rise[0] > rise[1] > rise[2] >= -1e-9
    assert (after.cost_off <= before.cost_off + 1e-9).all()


def test_after_a_miss_less_error_is_allowed_and_neighbours_pass_less(believed: Belief) -> None:
    tried = lowered(believed.planner, believed.analysis, 0, 1)
    alike = lowered(believed.planner, believed.analysis, 0, 1, 2)
    before, allowed = believed.of([tried, alike]), believed.allowed((0.9, 0.5, 0.1))
    assert allowed == sorted(allowed)
    believed.tried(tried, math.log(4.0), 0.1)  # it lost four times what may be lost
    after = believed.of([tried, alike])
    assert (after.passes < before.passes).all()
    assert after.passes[0] < 0.05
    assert all(a < b for a, b in zip(believed.allowed((0.9, 0.5, 0.1)), allowed, strict=True))


def decisions(moves: list[float]) -> DecisionChances:
    """Two samples near the border and two far from it; a plan of error 1 made these moves."""
    exact = np.array([0.1, 0.2, 5.0, -5.0])
    known = DecisionChances(exact=exact, may_lose=0.5, unexplained=0.05)
    known.tried(np.array([1.0, 0.0]), 1.0, exact + np.array(moves))
    return known


def test_a_plan_of_the_same_parts_changes_the_same_decisions() -> None:
    known = decisions([-0.3, 0.1, 0.0, 0.0])
    same, other = known.passes(np.array([[1.0, 0.0], [0.0, 1.0]]), np.ones(2))
    assert same < 0.2 < other


def test_a_plan_of_less_error_keeps_more_decisions() -> None:
    known = decisions([-0.3, 0.1, 0.0, 0.0])
    parts = np.tile([0.0, 1.0], (4, 1))
    chances = known.passes(parts, np.array([1.0, 0.3, 0.1, 0.01]))
    assert [*chances] == sorted(chances)
    assert chances[-1] > 0.95


def test_samples_without_a_finite_margin_decide_nothing() -> None:
    exact = np.array([0.1, -np.inf, np.inf])
    known = DecisionChances(exact=exact, may_lose=0.0, unexplained=0.05)
    known.tried(np.array([1.0]), 1.0, np.array([0.05, -np.inf, np.inf]))
    assert known.passes(np.array([[1.0]]), np.array([1.0]))[0] > 0.9


def test_a_model_whose_kernels_have_no_time_has_believed_costs() -> None:
    planner, analysis = chain([0.5] * OPS, [1.0] * OPS)
    untimed = replace(
        analysis,
        times={fmt: np.zeros(OPS) for fmt in analysis.times},
    )
    belief = Belief(planner=planner, analysis=untimed, reference=float(OPS))
    estimate = belief.of([lowered(planner, untimed, 0, 1)])
    assert np.isfinite(estimate.cost).all()
