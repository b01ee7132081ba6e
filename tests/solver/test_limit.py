"""A limit of size, against brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from finecast.solver import expansion
from finecast.solver.expansion import envelope, fastest_within, label, smallest
from finecast.solver.labelling import (
    Labelling,
    LabelProblem,
    RoundingErrors,
    Rows,
    SizeLimit,
    evaluate,
)
from tests.solver.test_expansion import every
from tests.solver.test_integer import drawn


def limited_problem(seed: int) -> tuple[LabelProblem, float]:
    """A random problem whose units, and copies that readers share, have sizes."""
    problem, lam = drawn(seed)
    draw = np.random.default_rng(seed + 1000)
    (n, k), shared = problem.time.shape, 3
    nothing = RoundingErrors(rows=Rows.of([]), error=np.zeros(0))
    copies = np.broadcast_to(draw.uniform(0, 3, (1, k, 1)), (k, k, shared)).copy()
    sizes = LabelProblem(
        time=np.sort(draw.uniform(1, 8, (n, k)), axis=1)[:, ::-1].copy(),
        error=np.zeros((n, k)),
        producer=np.full(shared, -1),
        consumers=Rows.of([draw.integers(0, n, 2).tolist() for _ in range(shared)]),
        cast=copies,
        roundings=(nothing,) * (k - 1),
    )
    amounts = [one.time_s for one in every(sizes)]
    most = min(amounts) + draw.uniform(0, 0.7) * (max(amounts) - min(amounts))
    return replace(problem, limit=SizeLimit(sizes=sizes, most=most)), lam


def size(problem: LabelProblem, labelling: Labelling) -> float:
    assert problem.limit is not None
    return problem.limit.size(labelling.label)


@pytest.mark.parametrize("seed", range(12))
def test_the_best_of_all_that_keep_the_limit(seed: int) -> None:
    problem, lam = limited_problem(seed)
    fitting = [one for one in every(problem) if problem.fits(one.label)]
    best = label(problem, lam)
    assert problem.fits(best.label)
    assert best.cost(lam) == pytest.approx(min(one.cost(lam) for one in fitting), rel=1e-6)
    steps = envelope(problem, max_steps=8)
    assert all(problem.fits(one.label) for one in steps)
    assert steps[0].error == pytest.approx(min(one.error for one in fitting), abs=1e-5)
    assert steps[-1].time_s == pytest.approx(min(one.time_s for one in fitting), rel=1e-6)
    middle = (steps[0].error + steps[-1].error) / 2
    within = fastest_within(problem, middle, steps[0])
    fastest = min(one.time_s for one in fitting if one.error <= middle)
    assert problem.fits(within.label)
    assert within.time_s == pytest.approx(fastest, rel=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_prices_alone_keep_the_limit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for problems too large for the integer program."""
    problem, lam = limited_problem(seed)
    monkeypatch.setattr(expansion, "_LARGEST", 0)
    fitting = [one.cost(lam) for one in every(problem) if problem.fits(one.label)]
    found = label(problem, lam)
    assert problem.fits(found.label)
    assert found.cost(lam) <= 1.25 * min(fitting)


def test_the_smallest_labelling_and_a_limit_that_nothing_keeps() -> None:
    problem, lam = limited_problem(0)
    least = min(size(problem, one) for one in every(problem))
    assert size(problem, smallest(problem)) == pytest.approx(least)
    assert problem.limit is not None
    tight = replace(problem, limit=replace(problem.limit, most=0.99 * least))
    assert not tight.fits(label(tight, lam).label)
    assert envelope(tight, max_steps=8) == ()


def test_a_price_of_size_is_added_to_the_costs() -> None:
    problem, lam = limited_problem(3)
    priced = problem.priced(0.5)
    assert priced.limit is None
    for one in every(problem)[:20]:
        costs = evaluate(priced, one.label).cost(lam)
        assert costs == pytest.approx(one.cost(lam) + 0.5 * size(problem, one))
