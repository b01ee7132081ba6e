"""The solver equals brute force; the frontier is nested, convex and optimal at every step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finecast.errors import RuleConflictError
from finecast.solver.assignment import PINNED_HIGH, PINNED_LOW, Problem
from finecast.solver.frontier import frontier
from finecast.solver.mincut import minimal_cut, solve
from tests.solver.costs import Solution, evaluate

INF = float("inf")


def solved(problem: Problem, lam: float) -> Solution:
    return evaluate(problem, solve(problem, lam))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The cost of one assignment by brute force."""

    low: tuple[bool, ...]
    time_s: float
    error: float
    casts: int

    def cost(self, lam: float) -> tuple[float, float]:
        """Comparable: at lam = inf the error first, then the time."""
        return (self.error, self.time_s) if lam == INF else (self.time_s + lam * self.error, 0)


def reference(problem: Problem, low: tuple[bool, ...]) -> Answer:
    """The cost by the definition, a loop for each sum; exact for the numbers used here."""
    side = dict(enumerate(low)) | {PINNED_HIGH: False, PINNED_LOW: True}
    time, error, casts = 0.0, 0.0, 0
    for i, x in enumerate(low):
        time += float(problem.time_low[i] if x else problem.time_high[i])
        error += float(problem.error[i]) if x else 0.0
    for v, made in enumerate(problem.producer):
        begin, end = problem.consumer_ptr[v : v + 2]
        users = [side[int(u)] for u in problem.consumer_unit[begin:end]]
        down = not side[int(made)] and any(users)
        up = side[int(made)] and not all(users)
        for needed, cost in ((down, problem.down_cost[v]), (up, problem.up_cost[v])):
            time += float(cost) if needed else 0.0
            casts += bool(needed and cost > 0)
        error += float(problem.value_error[v]) if side[int(made)] or any(users) else 0.0
    return Answer(low=low, time_s=time, error=error, casts=casts)


def every_answer(problem: Problem) -> list[Answer]:
    return [
        answer
        for low in product((False, True), repeat=len(problem.time_high))
        if (answer := reference(problem, low)).time_s < INF
    ]


def sets(answers: Iterable[Answer]) -> list[set[int]]:
    return [{i for i, x in enumerate(a.low) if x} for a in answers]


def make_problem(
    *,
    high: list[float],
    low: list[float],
    error: list[float],
    values: list[tuple[int, list[int], float, float, float]],
) -> Problem:
    """``values``: producer, consumers, down cost, up cost, error."""
    users = [v[1] for v in values]
    return Problem(
        time_high=np.array(high, dtype=np.float64),
        time_low=np.array(low, dtype=np.float64),
        error=np.array(error, dtype=np.float64),
        producer=np.array([v[0] for v in values], dtype=np.int64),
        consumer_ptr=np.cumsum([0] + [len(u) for u in users], dtype=np.int64),
        consumer_unit=np.array([u for us in users for u in us], dtype=np.int64),
        down_cost=np.array([v[2] for v in values], dtype=np.float64),
        up_cost=np.array([v[3] for v in values], dtype=np.float64),
        value_error=np.array([v[4] for v in values], dtype=np.float64),
    )


@st.composite
def problems(draw: st.DrawFn, *, most: int = 8) -> Problem:
    """Any small problem; small integers make exact ties common and sums exact."""
    n = draw(st.integers(1, most))
    amount = st.integers(0, 8).map(float)
    unit = st.integers(PINNED_LOW, n - 1)
    times = st.tuples(amount, amount) | st.tuples(amount, st.just(INF))
    times |= st.tuples(st.just(INF), amount)
    free = st.tuples(amount, amount)
    drawn = [draw(times if draw(st.integers(0, 7)) == 0 else free) for _ in range(n)]
    consumers = st.lists(unit, max_size=4)
    values = st.lists(st.tuples(unit, consumers, amount, amount, amount), max_size=2 * n)
    return make_problem(
        high=[t[0] for t in drawn],
        low=[t[1] for t in drawn],
        error=draw(st.lists(amount, min_size=n, max_size=n)),
        values=draw(values),
    )


# Small prices are drawn twice as often: at large ones all units stay high.
LAMS = st.sampled_from([0.0, 0.0, 0.25, 0.25, 0.5, 0.5, 1.0, 4.0, 1e12, INF])


@settings(max_examples=400)
@given(problems(), LAMS)
def test_solve_equals_brute_force_with_fewest_low(problem: Problem, lam: float) -> None:
    answers = every_answer(problem)
    got = solved(problem, lam)
    best = min(a.cost(lam) for a in answers)
    winners = [a for a in answers if a.cost(lam) == best]
    least = set[int].intersection(*sets(winners))
    assert set(np.flatnonzero(got.low).tolist()) == least
    assert least in sets(winners)


@given(problems(most=6), st.data())
def test_evaluate_equals_the_law(problem: Problem, data: st.DataObject) -> None:
    n = len(problem.time_high)
    low = tuple(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    got, want = evaluate(problem, np.array(low)), reference(problem, low)
    assert (got.error, got.casts) == (want.error, want.casts)
    assert got.time_s == want.time_s


def test_a_unit_without_a_side_is_named() -> None:
    with pytest.raises(RuleConflictError, match="precision group 1"):
        make_problem(high=[1, INF], low=[1, INF], error=[0, 0], values=[])


def test_infinite_price_forbids_the_least_error() -> None:
    """No finite price has the same effect: here 1e3 s are gained for an error of 1e-300."""
    problem = make_problem(high=[2e3, 2], low=[1e3, 1], error=[1e-300, 0], values=[])
    assert solved(problem, INF).low.tolist() == [False, True]
    assert frontier(problem)[0].low.tolist() == [False, True]


@pytest.mark.parametrize("cast", [0.0, 0.3])
def test_equal_prices_are_one_step(cast: float) -> None:
    """Units of equal price up to round-off change in one step."""
    error = np.random.default_rng(5).uniform(0.1, 0.9, 100)
    gain = error * 0.7
    gain[0] += cast
    alike = make_problem(
        high=(1 + gain).tolist(),
        low=[1.0] * 100,
        error=error.tolist(),
        values=[(PINNED_HIGH, list(range(100)), cast, 0, 0)],
    )
    assert len(frontier(alike)) == 2


def envelope(answers: list[Answer]) -> list[tuple[float, float]]:
    """Vertices of the lower-left convex hull of (error, time), by error."""
    hull: list[tuple[float, float]] = []
    for point in sorted({(a.error, a.time_s) for a in answers}):
        if hull and point[1] >= hull[-1][1]:
            continue
        while len(hull) > 1 and _turns_right(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _turns_right(
    a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]
) -> bool:
    return (b[0] - a[0]) * (c[1] - a[1]) <= (b[1] - a[1]) * (c[0] - a[0])


@given(problems())
def test_frontier_is_the_envelope(problem: Problem) -> None:
    answers = every_answer(problem)
    steps = frontier(problem)
    assert [(s.error, s.time_s) for s in steps] == envelope(answers)
    for step in steps:
        again = reference(problem, tuple(step.low.tolist()))
        assert (again.error, again.time_s, again.casts) == (
            step.error,
            step.time_s,
            step.casts,
        )


@given(problems())
def test_frontier_is_nested_and_optimal_throughout(problem: Problem) -> None:
    answers = every_answer(problem)
    steps = frontier(problem)
    assert (steps[0].lam_high, steps[-1].lam_low) == (INF, 0.0)
    for before, after in pairwise(steps):
        assert before.lam_low == after.lam_high
        assert np.all(before.low <= after.low)
        assert before.low.sum() < after.low.sum()
    for step in steps:
        middle = (
            step.lam_low + 1 if step.lam_high == INF else (step.lam_low + step.lam_high) / 2
        )
        assert np.array_equal(step.low, solved(problem, middle).low)
        for lam in (step.lam_low, min(step.lam_high, 1e6)):
            best = min(a.cost(lam) for a in answers)[0]
            assert step.time_s + lam * step.error <= best * (1 + 1e-12)


def layered(seed: int, n: int) -> Problem:
    """A random layered DAG with realistic magnitudes over many decades."""
    rng = np.random.default_rng(seed)
    high = 10 ** rng.uniform(-6, -1, n)
    counts = rng.integers(0, 4, n)
    users = [rng.integers(i, min(n, i + 8), c) for i, c in enumerate(counts)]
    return Problem(
        time_high=high,
        time_low=high * rng.uniform(0.2, 1.3, n),
        error=10 ** rng.uniform(-12, 2, n),
        producer=np.arange(n),
        consumer_ptr=np.concatenate([[0], np.cumsum(counts)]),
        consumer_unit=np.concatenate(users).astype(np.int64),
        down_cost=10 ** rng.uniform(-6, -3, n),
        up_cost=10 ** rng.uniform(-6, -3, n),
        value_error=np.where(rng.random(n) < 0.5, 0.0, 10 ** rng.uniform(-12, 2, n)),
    )


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("factor", [1.0, 1e-6])
def test_small_problems_over_many_decades(seed: int, factor: float) -> None:
    problem = layered(seed, 10)
    scale = {"time_high", "time_low", "down_cost", "up_cost"}
    problem = replace(problem, **{k: getattr(problem, k) * factor for k in scale})
    answers = every_answer(problem)
    for lam in (0.0, 1e-8, 1e-3, 1.0, 1e4, 1e12):
        got = solved(problem, lam)
        best = min(a.cost(lam) for a in answers)[0]
        assert got.time_s + lam * got.error == pytest.approx(best, rel=1e-12, abs=0)
    steps = frontier(problem)
    hull = envelope(answers)
    assert len(steps) == len(hull)
    for step, (error, time) in zip(steps, hull, strict=True):
        assert step.error == pytest.approx(error, rel=1e-12, abs=0)
        assert step.time_s == pytest.approx(time, rel=1e-12, abs=0)


@pytest.mark.parametrize("seed", range(4))
def test_large_frontier_agrees_with_single_cuts(seed: int) -> None:
    problem = layered(seed, 1500)
    steps = frontier(problem)
    slopes = [(a.time_s - b.time_s) / (b.error - a.error) for a, b in pairwise(steps)]
    assert slopes == pytest.approx([s.lam_low for s in steps[:-1]], rel=1e-5)
    for step in steps[1 :: max(1, len(steps) // 10)]:
        lam = (step.lam_high * max(step.lam_low, step.lam_high / 4)) ** 0.5
        alone = solved(problem, lam)
        bound = alone.time_s + lam * alone.error
        assert step.time_s + lam * step.error <= bound * (1 + 1e-12)
        whole = evaluate(problem, step.low)
        assert whole.time_s == pytest.approx(step.time_s, rel=1e-11)
        assert whole.error == pytest.approx(step.error, rel=1e-11)
        assert whole.casts == step.casts


def test_thinning_keeps_ends_and_steps() -> None:
    problem = layered(1, 300)
    full, thin = frontier(problem), frontier(problem, max_steps=7)
    assert len(thin) <= 7
    assert [s.index for s in thin][:: len(thin) - 1] == [0, len(full) - 1]
    assert all(step == full[step.index] for step in thin)
    with pytest.raises(ValueError, match="two ends"):
        frontier(problem, max_steps=1)


def test_a_shared_value_is_cast_once() -> None:
    """Three low consumers gain 2 each; one shared cast costs 5: worth it only once."""
    shared = make_problem(
        high=[1, 4, 4, 4],
        low=[INF, 2, 2, 2],
        error=[0] * 4,
        values=[(0, [1, 2, 3, 3], 5, 5, 0)],
    )
    got = solved(shared, 0.0)
    assert got.low.tolist() == [False, True, True, True]
    assert (got.time_s, got.casts) == (12.0, 1)


def test_a_value_rounds_once() -> None:
    problem = make_problem(
        high=[3, 3, 3], low=[1, 1, 1], error=[0, 0, 0], values=[(0, [1, 2], 9, 9, 4)]
    )
    assert solved(problem, 1.0).low.all()
    assert solved(problem, 1.0).error == 4.0
    assert not solved(problem, 1.5).low.any()  # equal cost: nothing is lowered without gain


def same(a: Solution, b: Solution) -> bool:
    return np.array_equal(a.low, b.low) and (a.time_s, a.error) == (b.time_s, b.error)


def test_deterministic() -> None:
    problem = layered(3, 2000)
    assert same(solved(problem, 1e-2), solved(problem, 1e-2))
    assert frontier(problem) == frontier(problem)
    first, second = frontier(problem)[-1], frontier(problem)[-1]
    assert np.array_equal(first.order, second.order)


@settings(max_examples=50)
@given(problems(), st.integers(-60, 60), st.integers(-60, 60))
def test_units_of_measure_do_not_matter(problem: Problem, time: int, error: int) -> None:
    """Scaling times and errors by powers of two changes no choice."""
    t, e = 2.0**time, 2.0**error
    scaled = replace(
        problem,
        time_high=problem.time_high * t,
        time_low=problem.time_low * t,
        down_cost=problem.down_cost * t,
        up_cost=problem.up_cost * t,
        error=problem.error * e,
        value_error=problem.value_error * e,
    )
    assert np.array_equal(solved(problem, 1.5).low, solved(scaled, 1.5 * t / e).low)


def test_cut_needs_more_than_one_stage() -> None:
    """Capacities from 2 to 2**45: at the coarse scale alone a difference of 1 is lost."""
    big = 2.0**45
    weight = np.array([-big, big + 1, -3.0, 2.0])
    tail, head = np.array([0, 1, 2, 3]), np.array([1, 0, 3, 2])
    cost = np.array([big * 2, big * 2, 8.0, 8.0])
    assert minimal_cut(weight, tail, head, cost).tolist() == [False, False, True, True]
    weight[1] = big - 1
    assert minimal_cut(weight, tail, head, cost).tolist() == [True] * 4


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_cut_with_wide_capacities(seed: int) -> None:
    """Near-ties far below 32 bits are still decided exactly (integers up to 2**44)."""
    rng = np.random.default_rng(seed)
    n = 8
    tail, head = (rng.integers(0, n, 14) for _ in range(2))
    tail, head = tail[tail != head], head[tail != head]
    cost = rng.choice([1.0, 2.0**22, 2.0**43], len(tail)) * rng.choice([1.0, 2.0], len(tail))
    weight = rng.choice([-1, 1], n) * 2.0 ** rng.choice([0, 22, 43], n)
    weight += rng.integers(-1, 2, n)

    def value(low: tuple[bool, ...]) -> float:
        mask = np.array(low)
        return float(weight[mask].sum() + cost[mask[tail] & ~mask[head]].sum())

    everything = {low: value(low) for low in product((False, True), repeat=n)}
    best = min(everything.values())
    least = np.all([low for low, v in everything.items() if v == best], axis=0)
    assert minimal_cut(weight, tail, head, cost).tolist() == least.tolist()
