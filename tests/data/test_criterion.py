from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.data.criterion import Criterion, CriterionKind
from finecast.errors import FinecastError, ModelError, UsageError
from finecast.naming import member_of

RELATIVE, ABSOLUTE = CriterionKind.RELATIVE, CriterionKind.ABSOLUTE
NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=32)


@pytest.mark.parametrize(
    ("kind", "higher", "baseline", "target"),
    [
        (RELATIVE, True, 0.8, 0.72),
        (RELATIVE, True, -2.0, -2.2),
        (RELATIVE, False, 2.0, 2.2),
        (RELATIVE, True, 0.0, -0.1),
        (ABSOLUTE, True, 0.8, 0.7),
        (ABSOLUTE, False, 0.0, 0.1),
        (ABSOLUTE, True, math.inf, 0.1),
        (RELATIVE, True, math.inf, 0.1),
    ],
)
def test_targets(kind: CriterionKind, higher: bool, baseline: float, target: float) -> None:
    criterion = Criterion(kind=kind, tolerance=0.1, higher_is_better=higher)
    assert criterion.target(baseline) == pytest.approx(target)


def test_snr_tolerance_is_the_least_snr() -> None:
    criterion = Criterion(kind=ABSOLUTE, tolerance=30)
    assert criterion.passes(30.0, math.inf)
    assert criterion.passes(math.inf, math.inf)
    assert not criterion.passes(29.9, math.inf)


@given(st.sampled_from(CriterionKind), st.booleans(), NUMBERS, st.floats(0, 10))
def test_the_baseline_passes_and_nan_does_not(
    kind: CriterionKind, higher: bool, baseline: float, tolerance: float
) -> None:
    criterion = Criterion(kind=kind, tolerance=tolerance, higher_is_better=higher)
    assert criterion.passes(baseline, baseline)
    assert not criterion.passes(math.nan, baseline)


@given(st.sampled_from(CriterionKind), st.booleans(), NUMBERS, NUMBERS, st.floats(0, 1))
def test_what_is_better_passes_if_the_worse_does(
    kind: CriterionKind, higher: bool, value: float, baseline: float, step: float
) -> None:
    criterion = Criterion(kind=kind, tolerance=0.5, higher_is_better=higher)
    better = value + step if higher else value - step
    assert criterion.passes(better, baseline) or not criterion.passes(value, baseline)


def test_a_baseline_of_nan_is_an_error() -> None:
    with pytest.raises(ModelError, match="fp32 model's metric is NaN"):
        Criterion().passes(1.0, math.nan)


@pytest.mark.parametrize("tolerance", [-0.1, math.nan, math.inf])
def test_tolerances_that_mean_nothing(tolerance: float) -> None:
    with pytest.raises(UsageError, match="tolerance"):
        Criterion(tolerance=tolerance)


def test_kinds_are_read_by_name() -> None:
    assert member_of(CriterionKind, " Absolute ", what="criterion") is ABSOLUTE
    with pytest.raises(FinecastError, match="use one of relative, absolute"):
        member_of(CriterionKind, "percent", what="criterion")


@pytest.mark.parametrize(
    ("kind", "tolerance", "baseline", "worst"),
    [
        (RELATIVE, 5, 0.9, 0.0),
        (RELATIVE, 1, 0.9, None),
        (ABSOLUTE, 5, 0.9, 0.0),
        (ABSOLUTE, 0.5, 0.4, 0.0),
        (ABSOLUTE, 2, 1.0, -1.0),
    ],
)
def test_a_tolerance_that_everything_meets_is_refused(
    kind: CriterionKind, tolerance: float, baseline: float, worst: float | None
) -> None:
    with pytest.raises(UsageError, match="lets every result pass"):
        Criterion(kind=kind, tolerance=tolerance).check(baseline, worst)


@pytest.mark.parametrize(
    ("criterion", "baseline", "worst"),
    [
        (Criterion(tolerance=0.99), 0.9, 0.0),
        (Criterion(kind=ABSOLUTE, tolerance=0.5), 0.9, 0.0),
        (Criterion(kind=ABSOLUTE, tolerance=5), 90.0, None),
        (Criterion(tolerance=30), math.inf, None),  # snr_db: the least to keep
        (Criterion(tolerance=1.5, higher_is_better=False), 0.01, None),
    ],
)
def test_others_are_not(criterion: Criterion, baseline: float, worst: float | None) -> None:
    criterion.check(baseline, worst)


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_infinity_is_no_accuracy_beside_a_finite_baseline(higher_is_better: bool) -> None:
    kept = Criterion(tolerance=0.5, higher_is_better=higher_is_better)
    assert not kept.passes(math.inf, 1.0)
    assert not kept.passes(-math.inf, 1.0)
    assert kept.passes(1.0, 1.0)


def test_a_drop_is_absolute_as_in_nncf() -> None:
    assert Criterion(max_drop=0.02) == Criterion(kind=CriterionKind.ABSOLUTE, tolerance=0.02)
    assert Criterion(max_drop=0.5).target(2.0) == 1.5


@pytest.mark.parametrize(
    "given", [{"tolerance": 0.5}, {"keep": "99%"}, {"tolerance": 0.1, "keep": "99%"}]
)
def test_what_may_be_lost_is_said_once(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="says how much may be lost, and so does another"):
        Criterion(max_drop=0.1, **given)


def test_what_may_be_lost_is_a_number_or_a_percentage() -> None:
    read: Any = Criterion
    for good in (0.02, "0.02", " 2% ", "2 %"):
        assert read(tolerance=good).tolerance == 0.02
    for bad in ("much", "%", "-1%", "nan", "1/0"):
        with pytest.raises(UsageError, match=f"'{bad}' is not a number") as caught:
            read(tolerance=bad)
        assert caught.value.fix == "give 0.01 or 1%"


def test_a_drop_in_percent_is_refused() -> None:
    """It became a hundredth of the metric's unit, where a share of fp32's metric was meant."""
    read: Any = Criterion
    assert read(max_drop="0.02").tolerance == 0.02
    with pytest.raises(UsageError, match="'1%' is a share, and this is in the metric's own"):
        read(max_drop="1%")
