"""One choice for several price lists, against brute force."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from finecast.solver import expansion
from finecast.solver.expansion import highest, least_worst
from finecast.solver.labelling import LabelProblem, evaluate
from tests.solver.test_expansion import chain_of, every, problems


def priced(problem: LabelProblem, seed: int) -> LabelProblem:
    """The same choice on a machine with other times."""
    draw = np.random.default_rng(seed)
    factors = draw.uniform(0.2, 3.0, problem.time.shape)
    casts = draw.uniform(0.2, 3.0, problem.cast.shape)
    return replace(problem, time=problem.time * factors, cast=problem.cast * casts)


@settings(max_examples=20, deadline=None)
@given(problems(), st.integers(0, 99), st.sampled_from([0.0, 0.3, 1.0, math.inf]))
def test_small_choices_are_the_least_worst(
    problem: LabelProblem, seed: int, share: float
) -> None:
    """The bound is below it, and it is no worse than the best of any machine by itself."""
    lists = [problem, priced(problem, seed), priced(problem, seed + 1)]
    more = np.array([0.0, 0.5, 0.1])
    error = max(found.error for found in every(problem)) * min(share, 1.0)
    known = highest(problem).label
    found = least_worst(lists, more, error, known)

    def worst(label: np.ndarray) -> float:
        return max(evaluate(p, label).time_s + m for p, m in zip(lists, more, strict=True))

    kept = [one.label for one in every(problem) if one.error <= error]
    best = min((worst(label) for label in kept), default=math.inf)
    assert math.isclose(found.worst, worst(found.label))
    assert found.worst <= worst(known)
    if evaluate(problem, known).error <= error:
        assert evaluate(problem, found.label).error <= error
        assert found.worst <= best * (1 + 1e-5) + 1e-9
    assert found.bound <= best * (1 + 1e-5)


def test_a_known_optimum_is_between_the_best_of_both() -> None:
    """Two units, of which each machine gains by another one: both low serve both."""
    base = chain_of(2)
    k = base.labels
    fast, slow = np.full((2, k), 4.0), np.full((2, k), 4.0)
    fast[0, 1], fast[1, 1], slow[0, 1], slow[1, 1] = 1.0, 4.5, 4.5, 1.0
    free = replace(
        base,
        time=fast,
        error=np.zeros_like(base.error),
        cast=np.zeros_like(base.cast),
    )
    both = [free, replace(free, time=slow)]
    known = highest(free).label
    assert [evaluate(one, known).time_s for one in both] == [8.0, 8.0]
    found = least_worst(both, np.zeros(2), 1.0, known)
    assert found.label.tolist() == [1, 1]
    assert found.worst == 5.5
    assert math.isclose(found.bound, 5.5, rel_tol=1e-6)


def test_a_choice_that_is_too_large_keeps_what_is_known() -> None:
    problem = chain_of(2000)
    known = highest(problem)
    assert expansion._size(problem) > expansion._LARGEST_SHARED  # pyright: ignore[reportPrivateUsage]
    found = least_worst([problem, problem], np.zeros(2), 1.0, known.label)
    assert found.label is known.label
    assert found.bound == 0.0
