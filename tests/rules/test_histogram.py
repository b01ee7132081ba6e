"""Histograms merge by addition, and their bins hold what they count."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from finecast.rules.facts import Histogram

numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
samples = arrays(np.float32, st.integers(0, 60), elements=numbers).map(lambda x: x[x != 0])


@given(samples)
def test_every_number_is_within_its_bin(x: np.ndarray) -> None:
    found = Histogram.of(x)
    assert found.counts.sum() == x.size
    lower, upper = found.edges
    held = (x[:, None] >= lower) & (x[:, None] <= upper)
    assert held.any(axis=1).all()
    assert np.all(np.diff(lower) > 0)
    # An eighth of a binade: the two ends differ by 12.5% at most.
    assert np.all(np.abs(upper - lower) <= np.minimum(np.abs(lower), np.abs(upper)) / 8)


@given(samples, samples)
def test_merged_is_of_both(x: np.ndarray, y: np.ndarray) -> None:
    merged = Histogram.of(x).merge(Histogram.of(y))
    assert merged == Histogram.of(np.concatenate([x, y]))


@given(samples)
def test_binades_are_of_magnitudes(x: np.ndarray) -> None:
    exponents = np.frexp(x)[1].astype(int) + 148
    assert np.array_equal(Histogram.of(x).binades, np.bincount(exponents, minlength=277))


def test_zeros_are_left_out_and_subnormals_are_not() -> None:
    found = Histogram.of(np.array([0.0, -0.0, 2.0**-149, -(2.0**-127), 1.0], np.float32))
    assert found.counts.tolist() == [1, 1, 1]
    assert found == Histogram.of(np.array([-(2.0**-127), 1.0, 2.0**-149], np.float32))
