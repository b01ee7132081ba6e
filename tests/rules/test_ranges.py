"""The range that codes cover, by each calibration."""

from __future__ import annotations

import numpy as np
import pytest

from finecast.errors import UsageError
from finecast.numbers.encodings import Scaled
from finecast.numbers.formats import Format
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy
from finecast.rules.ranges import Calibration, covered

GRID = Format.INT8.grid(constant=False)
DRAW = np.random.default_rng(0)
NORMAL = DRAW.standard_normal(100_000).astype(np.float32)
# Clipping helps here: all numbers but a few lie in a small part of the range.
OUTLIERS = np.concatenate([NORMAL, np.array([40.0, -60.0], np.float32)])


def error(x: np.ndarray, calibration: Calibration) -> float:
    low, high = covered(ValueFacts.of(x), GRID, calibration)
    fitted = Scaled.fitted(Format.INT8, GRID, np.asarray(low), np.asarray(high))
    return float(np.mean((fitted.round(x) - x) ** 2))


def test_minmax_covers_what_was_observed() -> None:
    seen = ValueFacts.of(OUTLIERS)
    assert covered(seen, GRID, Calibration.MINMAX) == (-60.0, 40.0)


@pytest.mark.parametrize("x", [NORMAL, OUTLIERS, np.abs(OUTLIERS), NORMAL + 9])
def test_a_percentile_leaves_that_share_out(x: np.ndarray) -> None:
    low, high = covered(ValueFacts.of(x), GRID, Calibration.PERCENTILE)
    assert min(x.min(), 0) <= low <= 0 <= high <= x.max() or low == pytest.approx(x.min())
    assert np.mean(x > high) <= 1e-4
    assert np.mean(x < low) <= 1e-4
    # No more than the bin that holds the quantile is kept beyond it.
    assert high <= max(1.13 * np.quantile(x, 1 - 1e-4), 0)


def test_the_least_error_is_less_where_few_numbers_are_far_away() -> None:
    wide = DRAW.laplace(size=100_000).astype(np.float32)
    assert error(wide, Calibration.MSE) < 0.9 * error(wide, Calibration.MINMAX)


@pytest.mark.parametrize("x", [NORMAL, OUTLIERS, np.abs(NORMAL), NORMAL + 9, -np.abs(NORMAL)])
def test_the_least_error_is_never_more_than_that_of_all(x: np.ndarray) -> None:
    assert error(x, Calibration.MSE) <= 1.02 * error(x, Calibration.MINMAX)


@pytest.mark.parametrize("calibration", Calibration)
@pytest.mark.parametrize("x", [np.zeros(4), np.array([3.0]), np.array([-2.0, 0.0]), [1e-40]])
def test_ranges_of_a_few_numbers_are_within_them(
    x: np.ndarray, calibration: Calibration
) -> None:
    seen = ValueFacts.of(np.asarray(x, np.float32))
    low, high = covered(seen, GRID, calibration)
    assert min(seen.lowest, 0) <= low <= high <= max(seen.highest, 0)


def test_its_name_is_checked() -> None:
    assert Policy.parse("auto:int8@mse").calibration is Calibration.MSE
    with pytest.raises(UsageError, match="entropy"):
        Policy.parse("auto:int8@entropy")
