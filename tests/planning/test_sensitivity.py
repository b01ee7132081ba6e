"""Probing finds each rounding's error; probing in groups misses no large one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from finecast.planning.points import RoundingPoint, RoundingPoints
from finecast.planning.sensitivity import (
    ProbeOptions,
    Saturation,
    Sensitivity,
    measure,
    squared_error,
)

Array = NDArray[np.generic]


class Model:
    """Each point changes an output element of its own, so squared errors add up exactly."""

    def __init__(self, errors: Sequence[float]) -> None:
        self.errors = np.array(errors, dtype=np.float64)
        self.runs = 0

    def __call__(self, switch: NDArray[np.bool_]) -> list[Array]:
        self.runs += 1
        # The reference has squared norm 1: one element of 1 before those of the points.
        return [np.concatenate([[1.0], np.sqrt(self.errors) * switch])]


ERRORS = st.floats(0, 10, allow_subnormal=False)


@given(st.lists(ERRORS, max_size=20), st.lists(ERRORS, max_size=5))
def test_errors_of_all_points(values: list[float], weights: list[float]) -> None:
    model = Model(values + weights)
    found = measure(len(values), model, weights=len(weights))
    assert found.values == pytest.approx(np.array(values))
    assert found.weights == pytest.approx(np.array(weights))
    assert found.total == pytest.approx(sum(values) + sum(weights))
    assert found.probes == model.runs - 1  # all but the reference


@given(st.integers(9, 60), st.integers(0, 59), st.integers(0, 3))
def test_weights_beside_values_are_split_where_one_of_them_matters(
    count: int, bad: int, worst_values: int
) -> None:
    """Also where a few values hide it, which a plan may keep in a higher format."""
    bad %= count
    values = [1e-2] * count
    values[:worst_values] = [1.0] * min(worst_values, count // 4)
    weights = [1e-5] * count
    small, planted = list(weights), list(weights)
    planted[bad] = 0.5 * sum(sorted(values)[: round(count * 0.75)])
    few = measure(len(values), model := Model(values + small), weights=count)
    assert few.weights == pytest.approx(np.array(small))
    assert model.runs <= 2 + len(values) + 2 * math.isqrt(count) + 2
    found = measure(len(values), Model(values + planted), weights=count)
    assert found.weights == pytest.approx(np.array(planted))


@given(st.integers(9, 60), st.integers(0, 99))
def test_weights_that_share_their_error_bring_all_of_it(count: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    values, weights = draw.random(count), 0.01 * draw.random(count)
    found = measure(count, Model([*values, *weights]), weights=count)
    assert found.values == pytest.approx(values)
    assert found.weights.sum() == pytest.approx(weights.sum())
    assert found.weights.max() <= weights.max() + 1e-12


def test_what_several_readers_share_is_measured_together() -> None:
    """Two branches that are subtracted: a rounding that both read cancels."""

    def cancels(switch: NDArray[np.bool_]) -> list[Array]:
        first, second, apart = switch * np.array([0.2, 0.2, 0.1])
        return [np.array([1.0, first - second, apart])]

    found = measure(3, cancels, shared=[(0, 1), (0, 2)])
    assert found.values == pytest.approx([0.04, 0.04, 0.01])
    assert found.shared == pytest.approx([-0.08, 0.0])  # independent ones add up
    assert found.probes == 1 + 3 + 2


def test_a_model_that_rounds_everywhere_says_how_much_and_probes_of_what() -> None:
    found = measure(2, Model([0.1, 0.3])).toward(0.8)
    assert found.total == pytest.approx(0.8)
    assert found.values == pytest.approx([0.2, 0.6])


def test_how_far_off_lost_outputs_are_says_nothing_of_small_errors() -> None:
    found = measure(2, Model([0.01, 1.5])).toward(3.4)
    assert found.total == pytest.approx(3.4)
    assert found.values == pytest.approx([0.01, 1.5])


@pytest.mark.parametrize("total", [math.nan, math.inf, 0.0])
def test_a_model_that_is_broken_by_rounding_scales_nothing(total: float) -> None:
    found = measure(2, Model([0.1, 0.3])).toward(total)
    assert found.values == pytest.approx([0.1, 0.3])
    assert found.total == pytest.approx(0.4)


@given(st.integers(0, 999))
def test_finds_the_one_bad_point_among_a_thousand(bad: int) -> None:
    errors = np.full(1000, 1e-9)
    errors[bad] = 1.0
    model = Model(errors.tolist())
    found = measure(1000, model)
    assert int(np.argmax(found.values)) == bad
    assert found.values[bad] == pytest.approx(1.0)
    assert found.values.sum() == pytest.approx(found.total)
    assert model.runs < 200


def test_groups_that_matter_are_split_and_others_share_evenly() -> None:
    errors = np.zeros(320)  # groups of two
    errors[[10, 11]] = 0.75, 0.25
    errors[[20, 21]] = 3e-4, 1e-4
    found = measure(320, Model(errors.tolist()))
    assert found.values[[10, 11]] == pytest.approx([0.75, 0.25])
    assert found.values[[20, 21]] == pytest.approx([2e-4, 2e-4])


@given(st.sets(st.integers(0, 4999), min_size=1, max_size=12))
def test_bad_points_among_many_are_found_in_few_runs(bad: set[int]) -> None:
    """A group that matters is split into parts, and a part that does not matter is left."""
    errors = np.full(5000, 1e-9)
    errors[sorted(bad)] = 1.0
    model = Model(errors.tolist())
    found = measure(5000, model)
    assert set(np.argsort(found.values)[-len(bad) :].tolist()) == bad
    assert found.values.sum() == pytest.approx(found.total)
    assert model.runs <= 2 + 160 + 12 * len(bad)


def test_runs_are_bounded_and_spent_on_the_largest_errors() -> None:
    """Bad points in more groups than can all be split: weights still get their share."""
    values, weights = np.full(20_000, 1e-9), np.full(20_000, 1e-9)
    values[::650] = 1.0  # each of 31 is more than 3% of all, in a group of its own
    weights[7] = 40.0
    model = Model([*values, *weights])
    found = measure(len(values), model, weights=len(weights))
    assert model.runs <= 500  # 480 for values at most; 674 without the bound
    assert found.weights[7] == pytest.approx(40.0)
    assert found.values.sum() + found.weights.sum() == pytest.approx(found.total)


def test_a_point_that_breaks_the_output_stays_finite_and_worst() -> None:
    def probe(switch: NDArray[np.bool_]) -> list[Array]:
        return [np.array([1.0, np.nan if switch[1] else 0.0, 0.1 if switch[0] else 0.0])]

    found = measure(3, probe)
    assert np.isfinite(found.values).all()
    assert found.values[1] == found.values.max() == pytest.approx(1e6)
    assert found.values[0] == pytest.approx(0.01)
    assert found.values[2] == 0.0


def test_a_small_output_s_error_is_not_hidden_by_others() -> None:
    """Of four outputs one loses a tenth; the mean would be a quarter of that."""

    def probe(switch: NDArray[np.bool_]) -> list[Array]:
        lost = np.array([1.0, 0.1 if switch[0] else 0.0])
        return [lost, *(np.ones(1000) for _ in range(3))]

    assert measure(1, probe).values == pytest.approx([0.01])
    assert measure(1, probe, probing=ProbeOptions(counted=[1, 2])).values == pytest.approx(
        [0.0]
    )


def test_progress_counts_up_to_what_was_expected() -> None:
    told: list[tuple[int, int]] = []
    measure(
        5, Model([1.0] * 5), probing=ProbeOptions(on_probe=lambda *step: told.append(step))
    )
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert all(done <= total for done, total in told)


def test_nothing_to_probe() -> None:
    found = measure(0, Model([]))
    assert found.values.shape == found.weights.shape == (0,)
    assert found.total == 0.0


def test_zero_is_free_rounding() -> None:
    point = RoundingPoint(places=((0, 0),), readers=(0,))
    weights = ({0: (1,)}, {1: (1,)})
    where = RoundingPoints(points=(point,) * 3, weights=weights, weight_units=(0, 1))
    zero = Sensitivity.zero(where)
    assert zero.values.shape == (3,)
    assert zero.weights.shape == (2,)
    assert not zero.values.any()


@pytest.mark.parametrize(
    ("got", "wanted", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.5], [3.0, 4.0], 0.01),
        ([3.0, math.nan], [3.0, 4.0], math.inf),
        ([3.0, math.inf], [3.0, 4.0], math.inf),
        # Where fp32 itself is not finite there is nothing to keep.
        ([3.0, math.nan], [3.0, math.nan], 0.0),
        ([0.0, 0.5], [0.0, 0.0], 0.25),
        ([], [], 0.0),
    ],
)
def test_squared_error(got: list[float], wanted: list[float], error: float) -> None:
    y, r = (np.array(a, np.float32) for a in (got, wanted))
    assert squared_error([y], [r]) == pytest.approx(error)


def test_only_float_outputs_count_and_the_worst_decides() -> None:
    one, off = np.array([1.0], np.float32), np.array([1.5], np.float32)
    index, other = np.array([1]), np.array([7])
    assert squared_error([off, one, other], [one, one, index]) == pytest.approx(0.25)


def test_an_output_of_another_shape_is_left_out() -> None:
    one, off = np.array([1.0], np.float32), np.array([1.5], np.float32)
    assert squared_error([off, np.ones(3)], [one, np.ones(4)]) == pytest.approx(0.25)
    assert squared_error([np.ones(3)], [np.ones(4)]) == 1  # nothing is left to compare


class Saturating:
    """An output that all points change in the same direction, up to a limit."""

    def __init__(self, steps: Sequence[float], most: float) -> None:
        self.steps, self.most = np.array(steps), most

    def __call__(self, switch: NDArray[np.bool_]) -> list[Array]:
        off = self.most * np.tanh((self.steps * switch).sum() / self.most)
        return [np.array([1.0, off])]


def test_where_an_output_saturates_single_errors_stay_what_they_are() -> None:
    model = Saturating([0.5, 0.5, 1.0], most=0.7)
    found = measure(3, model)
    off = 0.7 * np.tanh(np.array([0.5, 0.5, 1.0]) / 0.7)
    assert found.values == pytest.approx(off**2)
    assert found.total == pytest.approx((0.7 * math.tanh(2 / 0.7)) ** 2)
    assert found.added > found.total
    assert found.saturation.together(found.added) == pytest.approx(found.total)
    small = found.saturation.together(1e-4)
    assert small == pytest.approx(1e-4, rel=1e-3)


def test_errors_that_push_the_same_way_bring_more_than_their_sum() -> None:
    found = measure(4, Saturating([0.1] * 4, most=1e3))
    assert found.total == pytest.approx(0.16, rel=1e-5)
    assert found.added == pytest.approx(0.04, rel=1e-5)
    assert found.saturation.together(0.04) == pytest.approx(0.16, rel=1e-4)
    assert 0.02 < found.saturation.together(0.02) < 0.16


SUMS = st.floats(1e-6, 10)


@given(SUMS, SUMS, st.lists(SUMS, min_size=2, max_size=9))
def test_more_errors_bring_more(added: float, total: float, sums: list[float]) -> None:
    """Also beyond the measured sum; ``apart`` is the inverse."""
    one = Saturation.through(added, total)
    assert one.together(0.0) == 0.0
    assert one.together(added) == pytest.approx(total)
    assert math.isinf(one.together(math.inf))
    errors = [one.together(x) for x in sorted(sums)]
    assert errors == sorted(errors)
    for x in sums:
        assert one.apart(one.together(x)) == pytest.approx(x, rel=1e-6)


def test_no_error_lies_beyond_what_an_output_saturates_at() -> None:
    one = Saturation.through(4.0, 1.0)
    assert one.together(1e9) < 4 / 3
    assert math.isinf(one.apart(4 / 3))


def of(values: Sequence[float], total: float) -> Sensitivity:
    return Sensitivity(
        values=np.array(values), weights=np.zeros(0), shared=np.zeros(0), total=total
    )


def test_what_breaks_an_output_says_nothing_of_how_errors_add_up() -> None:
    assert of([1e6, 0.1], 0.2).saturation == Saturation()
    assert of([0.0], 0.0).saturation == Saturation()
    assert of([1e6, 0.1], 0.2).shares.tolist() == [1e6, 0.1]


def test_roundings_that_cancel_have_no_error_below_zero() -> None:
    """Their measured sum may be below 0: that of a residual stream, without its values'."""
    assert Saturation().relative(-1e-8) == 0.0
    assert Saturation().relative(4e-6) == pytest.approx(2e-3)


@given(count=st.integers(1, 300), data=st.data())
def test_few_runs_find_the_point_of_the_largest_error(count: int, data: st.DataObject) -> None:
    worst = data.draw(st.integers(0, count - 1))
    errors = np.full(count, 1e-6)
    errors[worst] = 1e-2
    model = Model(errors.tolist())
    found = measure(count, model, most=24)
    assert model.runs <= 24 + 2  # nothing on, and all
    assert int(found.values.argmax()) == worst
    assert found.values.max() == pytest.approx(1e-2)
    assert found.added == pytest.approx(errors.sum())
