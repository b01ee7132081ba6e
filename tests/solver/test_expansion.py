"""Expansion moves against brute force, and against the exact cut for two formats."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from finecast.errors import RuleConflictError
from finecast.solver import expansion
from finecast.solver.expansion import envelope, fastest_within, highest, label
from finecast.solver.labelling import (
    Labelling,
    LabelProblem,
    RoundingErrors,
    Rows,
    evaluate,
    two_sided,
)
from tests.solver import costs

LAMS = (0.0, 0.5, 2.0, 64.0)


def dyadic(draw: st.DrawFn, *shape: int) -> np.ndarray:
    """Multiples of 1/8, whose sums are exact."""
    count = int(np.prod(shape))
    numbers = draw(st.lists(st.integers(0, 32), min_size=count, max_size=count))
    return np.array(numbers, dtype=np.float64).reshape(shape) / 8


@st.composite
def problems(draw: st.DrawFn, labels: int = 3, *, bound: bool = True) -> LabelProblem:
    """``bound``: formats may be forbidden, and pins be of low formats."""
    n, m = draw(st.integers(1, 5)), draw(st.integers(0, 5))
    unit = st.integers(-labels if bound else -1, n - 1)
    time = dyadic(draw, n, labels)
    if bound:
        banned = np.array(
            draw(st.lists(st.integers(0, labels), min_size=n, max_size=n)), dtype=np.int64
        )
        for u in range(n):
            if banned[u] < labels:
                time[u, banned[u]] = np.inf
    consumers = [draw(st.lists(unit, max_size=3)) for _ in range(m)]
    roundings: list[RoundingErrors] = []
    for _ in range(labels - 1):
        lists = draw(st.lists(st.lists(st.integers(0, n - 1), max_size=3), max_size=3))
        roundings.append(RoundingErrors(rows=Rows.of(lists), error=dyadic(draw, len(lists))))
    error = dyadic(draw, n, labels)
    error[:, 0] = 0
    cast = dyadic(draw, labels, labels, m)
    if not bound:
        cast[range(labels), range(labels)] = 0
    return LabelProblem(
        time=time,
        error=error,
        producer=np.array(draw(st.lists(unit, min_size=m, max_size=m)), dtype=np.int64),
        consumers=Rows.of(consumers),
        cast=cast,
        roundings=tuple(roundings),
    )


def reference(problem: LabelProblem, label: tuple[int, ...]) -> tuple[float, float, int]:
    """Time, error and casts of a labelling by the definition, with a loop for each sum."""

    def of(unit: int) -> int:
        return label[unit] if unit >= 0 else -1 - unit

    def row(rows: Rows, r: int) -> list[int]:
        return [of(int(u)) for u in rows.unit[rows.ptr[r] : rows.ptr[r + 1]]]

    time = sum(float(problem.time[u, x]) for u, x in enumerate(label))
    error = sum(float(problem.error[u, x]) for u, x in enumerate(label))
    casts = 0
    for v in range(len(problem.producer)):
        made = of(int(problem.producer[v]))
        for fmt in set(row(problem.consumers, v)):
            time += float(problem.cast[made, fmt, v])
            casts += problem.cast[made, fmt, v] > 0
    for fmt, found in enumerate(problem.roundings, start=1):
        for r, amount in enumerate(found.error):
            error += float(amount) if fmt in row(found.rows, r) else 0.0
    return time, error, casts


def every(problem: LabelProblem) -> list[Labelling]:
    n = len(problem.time)
    answers = [
        evaluate(problem, np.array(x, dtype=np.int64))
        for x in product(range(problem.labels), repeat=n)
    ]
    return [a for a in answers if a.time_s < np.inf]


@given(problems(), st.data())
def test_what_a_labelling_costs(problem: LabelProblem, data: st.DataObject) -> None:
    n = len(problem.time)
    given = tuple(data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
    found = evaluate(problem, np.array(given, dtype=np.int64))
    assert (found.time_s, found.error, found.casts) == reference(problem, given)


@given(problems(), st.data())
def test_a_part_has_the_same_differences(problem: LabelProblem, data: st.DataObject) -> None:
    n = len(problem.time)
    labels = st.lists(st.integers(0, 2), min_size=n, max_size=n)
    one, kept = (np.array(data.draw(labels), dtype=np.int64) for _ in range(2))
    free = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    one = np.where(free, one, kept)
    whole = [evaluate(problem, x) for x in (one, kept)]
    assume(all(np.isfinite(x.time_s) for x in whole))
    part = problem.part(free, kept)
    own = [evaluate(part, x[free]) for x in (one, kept)]
    assert whole[0].time_s - whole[1].time_s == own[0].time_s - own[1].time_s
    assert whole[0].error - whole[1].error == own[0].error - own[1].error


def uniform(problem: LabelProblem, amounts: np.ndarray) -> LabelProblem:
    """``problem`` with casts of equal time between any two formats: moves are then exact."""
    k = problem.labels
    return replace(problem, cast=(1.0 - np.eye(k))[:, :, None] * amounts)


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from(LAMS), st.data())
def test_no_expansion_move_improves_it(
    problem: LabelProblem, lam: float, data: st.DataObject
) -> None:
    count = len(problem.producer)
    eighths = data.draw(st.lists(st.integers(0, 32), min_size=count, max_size=count))
    problem = uniform(problem, np.array(eighths, dtype=np.float64) / 8)
    found = label(problem, lam)
    assert found.time_s < np.inf
    assert found.cost(lam) <= highest(problem).cost(lam)
    n = len(problem.time)
    for to in range(problem.labels):
        for moved in product((False, True), repeat=n):
            after = np.where(np.array(moved, dtype=np.bool_), to, found.label)
            assert evaluate(problem, after).cost(lam) >= found.cost(lam) - 1e-9


@settings(max_examples=150, deadline=None)
@given(problems(bound=False), st.sampled_from(LAMS))
def test_never_worse_than_the_best_of_two_formats(problem: LabelProblem, lam: float) -> None:
    n = len(problem.time)
    start = evaluate(problem, np.arange(n, dtype=np.int64) % problem.labels)
    found = label(problem, lam, start)
    assert found.cost(lam) <= start.cost(lam)
    for low in range(1, problem.labels):
        pair = [a for a in every(problem) if set(a.label) <= {0, low}]
        assert found.cost(lam) <= min(a.cost(lam) for a in pair) + 1e-9


@settings(max_examples=150, deadline=None)
@given(problems(labels=2, bound=False), st.sampled_from(LAMS))
def test_of_two_formats_it_is_the_best(problem: LabelProblem, lam: float) -> None:
    best = min(a.cost(lam) for a in every(problem))
    assert label(problem, lam).cost(lam) == pytest.approx(best, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(problems(labels=2, bound=False), st.sampled_from(LAMS), st.data())
def test_of_two_formats_it_is_the_best_where_errors_cancel(
    problem: LabelProblem, lam: float, data: st.DataObject
) -> None:
    """A unit that rounds what several read may take away some of their single errors."""
    eighths = data.draw(
        st.lists(st.integers(-32, 0), min_size=len(problem.time), max_size=len(problem.time))
    )
    less = np.stack([np.zeros(len(eighths)), np.array(eighths) / 8], axis=1)
    problem = replace(problem, error=problem.error + less)
    best = min(a.cost(lam) for a in every(problem))
    assert label(problem, lam).cost(lam) == pytest.approx(best, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(problems(bound=False), st.floats(0.01, 8))
def test_the_fastest_within_an_error(problem: LabelProblem, error: float) -> None:
    known = highest(problem)
    best = min(a.time_s for a in every(problem) if a.error <= error)
    found = fastest_within(problem, error, known)
    assert found.error <= error
    assert found.time_s == pytest.approx(best, rel=1e-5, abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(problems(labels=2))
def test_the_problem_of_two_sides_costs_the_same(problem: LabelProblem) -> None:
    """If casts of a unit's results to its own label cost no more than from the other one."""
    made = problem.producer >= 0
    cast = problem.cast.copy()
    cast[0, 0] = np.where(made, np.minimum(cast[0, 0], cast[1, 0]), cast[0, 0])
    cast[1, 1] = np.where(made, np.minimum(cast[1, 1], cast[0, 1]), cast[1, 1])
    problem = replace(problem, cast=cast)
    exact = two_sided(problem)
    for labels in product((0, 1), repeat=len(problem.time)):
        want = evaluate(problem, np.array(labels, dtype=np.int64))
        got = costs.evaluate(exact, np.array(labels, dtype=np.bool_))
        assert got.time_s == pytest.approx(want.time_s)
        assert got.error == want.error


def test_three_labels_and_dear_casts_to_the_own_label_have_no_exact_cut() -> None:
    def of(labels: int, *, own: float, producer: int) -> LabelProblem:
        cast = np.ones((labels, labels, 1))
        cast[range(labels), range(labels)] = own
        return LabelProblem(
            time=np.ones((1, labels)),
            error=np.zeros((1, labels)),
            producer=np.array([producer]),
            consumers=Rows.of([[0]]),
            cast=cast,
            roundings=(RoundingErrors(rows=Rows.of([]), error=np.zeros(0)),) * (labels - 1),
        )

    two_sided(of(2, own=1.0, producer=0))
    two_sided(of(2, own=2.0, producer=-1))
    with pytest.raises(ValueError, match="3 labels"):
        two_sided(of(3, own=0.0, producer=0))
    with pytest.raises(ValueError, match="own label"):
        two_sided(of(2, own=2.0, producer=0))


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_envelope_falls(problem: LabelProblem) -> None:
    steps = envelope(problem, max_steps=4)
    assert 1 <= len(steps) <= 4
    for before, after in pairwise(steps):
        assert after.time_s < before.time_s
        assert after.error > before.error
    assert steps[-1].time_s <= min(label(problem, 0.0).time_s, highest(problem).time_s)


@settings(max_examples=60, deadline=None)
@given(problems(labels=2, bound=False), st.floats(0, 8), st.floats(0, 8))
def test_a_part_of_the_envelope_is_as_low_about_the_errors(
    problem: LabelProblem, one: float, other: float
) -> None:
    """With two formats, where the envelope is exact."""
    low, high = sorted((one, other))
    part = envelope(problem, max_steps=64, errors=(low, high))
    for step in envelope(replace(problem), max_steps=64):
        if low < step.error < high:
            line = np.interp(step.error, [s.error for s in part], [s.time_s for s in part])
            assert line <= step.time_s + 1e-9


def chain_of(count: int) -> LabelProblem:
    """A chain of units with random times and errors, and casts between formats."""
    draw = np.random.default_rng(0)
    units = np.arange(count)
    cast = np.broadcast_to((1.0 - np.eye(3))[:, :, None] * 0.05, (3, 3, count - 1))
    none = RoundingErrors(rows=Rows.of([]), error=np.zeros(0))
    fast, slow = np.sort(draw.uniform(1, 3, (2, count)), axis=0)
    errors = [np.zeros(count), draw.uniform(0, 1, count), draw.uniform(1, 9, count)]
    return LabelProblem(
        time=np.stack([np.full(count, 4.0), slow, fast], axis=1),
        error=np.stack(errors, axis=1),
        producer=units[:-1],
        consumers=Rows.of([[int(u)] for u in units[1:]]),
        cast=np.array(cast),
        roundings=(none, none),
    )


def test_a_part_of_the_envelope_takes_few_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, solved = chain_of(120), 0
    exact = expansion.solve

    def counted(*given: Any) -> Any:
        nonlocal solved
        solved += 1
        return exact(*given)

    monkeypatch.setattr(expansion, "solve", counted)
    whole = envelope(problem, max_steps=64)
    all_cuts, solved = solved, 0
    middle = whole[len(whole) // 2].error
    part = envelope(replace(problem), max_steps=64, errors=(middle, middle))
    assert solved < all_cuts / 4
    assert middle in {s.error for s in part}


@settings(max_examples=40, deadline=None)
@given(problems(), st.lists(st.floats(0, 8), min_size=2, max_size=4))
def test_what_a_problem_knows_changes_no_envelope(
    problem: LabelProblem, errors: list[float]
) -> None:
    for one, other in pairwise(errors):
        low, high = sorted((one, other))
        again = envelope(problem, max_steps=8, errors=(low, high))
        fresh = envelope(replace(problem), max_steps=8, errors=(low, high))
        assert [s.label.tolist() for s in again] == [s.label.tolist() for s in fresh]


def test_the_same_envelope_takes_no_cut_again(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = chain_of(40)
    whole = envelope(problem, max_steps=16)

    def never(*_: Any) -> Any:
        raise AssertionError("a cut")

    travelled = pickle.loads(pickle.dumps(problem))
    assert problem.known
    assert not travelled.known
    np.testing.assert_array_equal(travelled.time, problem.time)
    monkeypatch.setattr(expansion, "solve", never)
    again = envelope(problem, max_steps=16)
    assert [s.label.tolist() for s in again] == [s.label.tolist() for s in whole]
    with pytest.raises(AssertionError, match="a cut"):
        envelope(replace(problem), max_steps=16)


def test_a_mix_beats_each_format_alone() -> None:
    # Two products: the first may be in the third format, the second would lose too much.
    problem = LabelProblem(
        time=np.array([[8.0, 4.0, 2.0], [8.0, 4.0, 2.0]]),
        error=np.array([[0.0, 1.0, 2.0], [0.0, 1.0, 99.0]]),
        producer=np.array([0]),
        consumers=Rows.of([[1]]),
        cast=0.5 * (1 - np.eye(3))[:, :, None],
        roundings=(RoundingErrors(rows=Rows.of([]), error=np.zeros(0)),) * 2,
    )
    found = label(problem, 0.5)
    assert found.label.tolist() == [2, 1]
    assert found.casts == 1
    assert [s.label.tolist() for s in envelope(problem, max_steps=9)] == [
        [0, 0],
        [1, 1],
        [2, 1],
        [2, 2],
    ]


def test_a_unit_without_a_format_is_an_error() -> None:
    with pytest.raises(RuleConflictError, match="precision group 0"):
        LabelProblem(
            time=np.full((1, 2), np.inf),
            error=np.zeros((1, 2)),
            producer=np.zeros(0, dtype=np.int64),
            consumers=Rows.of([]),
            cast=np.zeros((2, 2, 0)),
            roundings=(RoundingErrors(rows=Rows.of([]), error=np.zeros(0)),),
        )
