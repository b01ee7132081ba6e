"""Facts of parts merge to the facts of the whole; shares of elements are exact."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from finecast.numbers.formats import FLOATS, Format
from finecast.numbers.rounding import round_to
from finecast.rules.facts import ValueFacts, merge

F32 = NDArray[np.float32]
SPECIAL = st.sampled_from(
    [0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-149, 2.0**-126, 1.0]
)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Where the limits of formats lie, and the floats beside them.
LIMITS = [
    limit
    for f in FLOATS
    if f.bits < 32
    for limit in (f.smallest_subnormal / 2, f.smallest_subnormal, f.smallest_normal, f.max)
]
EDGES = [
    float(x)
    for limit in np.array(LIMITS, np.float32)
    for x in (
        np.nextafter(limit, np.float32(0)),
        limit,
        np.nextafter(limit, np.float32(np.inf)),
    )
]
NUMBERS = FINITE | SPECIAL | st.sampled_from(EDGES)
ARRAYS = st.lists(NUMBERS, max_size=20).map(lambda x: np.array(x, np.float32))
LOW = st.sampled_from([f for f in FLOATS if f.bits < 32])


def same(a: ValueFacts, b: ValueFacts, *, but: frozenset[str] = frozenset()) -> bool:
    names = [f.name for f in fields(ValueFacts) if f.name not in but]
    return all(np.array_equal(getattr(a, n), getattr(b, n)) for n in names)


@given(ARRAYS, ARRAYS)
def test_merge_is_the_facts_of_both(a: F32, b: F32) -> None:
    merged = ValueFacts.of(a).merge(ValueFacts.of(b))
    whole = ValueFacts.of(np.concatenate([a, b]))
    assert same(merged, whole, but=frozenset({"shape"}))


@given(ARRAYS, ARRAYS, ARRAYS)
def test_merge_is_associative_and_commutative(a: F32, b: F32, c: F32) -> None:
    x, y, z = (ValueFacts.of(v) for v in (a, b, c))
    assert same(x.merge(y), y.merge(x))
    assert same(x.merge(y).merge(z), x.merge(y.merge(z)))


def test_merge_keeps_the_largest_shape() -> None:
    small, large = (ValueFacts.of(np.ones(s, np.float32)) for s in ((2, 3), (4, 3)))
    assert small.merge(large).shape == large.merge(small).shape == (4, 3)


@given(ARRAYS, LOW)
def test_flushed_share_is_what_rounds_to_zero(x: F32, fmt: Format) -> None:
    facts = ValueFacts.of(x)
    half = fmt.smallest_subnormal / 2
    # A tie at half the smallest number rounds to even, which is zero; the histogram counts it
    # in the binade above, whose other numbers do not round to zero.
    vanished = (x != 0) & (round_to(x, fmt) == 0) & (np.abs(x) != half)
    assert facts.flushed_share(fmt) == (vanished.sum() / x.size if x.size else 0.0)


@given(ARRAYS, LOW)
def test_subnormal_share_counts_what_is_below_the_normal_range(x: F32, fmt: Format) -> None:
    below = (x != 0) & (np.abs(x) < np.float32(fmt.smallest_normal))
    assert ValueFacts.of(x).subnormal_share(fmt) == (below.sum() / x.size if x.size else 0.0)


def test_counts() -> None:
    facts = ValueFacts.of(np.array([[0, -3, np.nan], [np.inf, 0.5, 0]], np.float32))
    assert facts.shape == (2, 3)
    assert (facts.count, facts.zeros, facts.nans, facts.infs) == (6, 2, 1, 1)
    assert (facts.largest, facts.smallest_nonzero) == (3.0, 0.5)
    assert facts.binades.sum() == 2


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int64, bool])
def test_any_number_type(dtype: type) -> None:
    assert ValueFacts.of(np.array([0, 1, 1], dtype)).largest == 1.0


def test_nothing_observed() -> None:
    facts = ValueFacts.of(np.zeros(0, np.float32))
    assert facts.largest == 0.0
    assert facts.smallest_nonzero == math.inf
    assert facts.flushed_share(Format.FP16) == 0.0


def test_merge_of_observations_is_their_union() -> None:
    one, two = (ValueFacts.of(np.array([v], np.float32)) for v in (1.0, 2.0))
    merged = merge({0: one, 1: one}, {1: two, 2: two})
    assert sorted(merged) == [0, 1, 2]
    assert merged[1].count == 2
    assert merged[1].largest == 2.0
