"""Facts of parts merge to the facts of the whole; shares of elements are exact."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from finecast.numbers.formats import FLOATS, Format
from finecast.numbers.rounding import round_to
from finecast.rules import facts as module
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
# All bits that there are: subnormals, both zeros, and NaN of every kind, too.
BITS = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1 << 31, 1, 0x7F800001, 0xFF800000])
ANY_NUMBERS = arrays(np.uint32, st.integers(0, 40), elements=BITS).map(
    lambda x: x.view(np.float32)
)
LOW = st.sampled_from([f for f in FLOATS if f.bits < 32])


def same(a: ValueFacts, b: ValueFacts, *, but: frozenset[str] = frozenset()) -> bool:
    names = [f.name for f in fields(ValueFacts) if f.name not in but]
    return all(np.array_equal(getattr(a, n), getattr(b, n)) for n in names)


def of_each_number(array: NDArray[np.generic]) -> dict[str, object]:
    """The facts by their definitions, one number after the other."""
    numbers = [float(x) for x in array.astype(np.float32).ravel()]
    finite = [x for x in numbers if math.isfinite(x)]
    nonzero = [abs(x) for x in finite if x]
    bins = Counter[int]()
    for x in filter(None, finite):
        fraction, exponent = math.frexp(abs(x))
        place = (exponent + 148) * 8 + int((fraction - 0.5) * 16)
        bins[place if x > 0 else -1 - place] += 1
    return {
        "shape": array.shape,
        "count": len(numbers),
        "zeros": finite.count(0.0),
        "nans": sum(map(math.isnan, numbers)),
        "infs": sum(map(math.isinf, numbers)),
        "largest": max(nonzero, default=0.0),
        "smallest_nonzero": min(nonzero, default=math.inf),
        "lowest": min(finite, default=math.inf),
        "highest": max(finite, default=-math.inf),
        "bins": sorted(bins.items()),
    }


def stated(facts: ValueFacts) -> dict[str, object]:
    told: dict[str, object] = {f.name: getattr(facts, f.name) for f in fields(facts)}
    found = facts.histogram
    del told["histogram"], told["moments"]
    return told | {"bins": [*zip(found.bins.tolist(), found.counts.tolist(), strict=True)]}


@given(ANY_NUMBERS | ARRAYS, st.integers(1, 5))
def test_facts_are_those_of_each_number(x: F32, part: int) -> None:
    """However many numbers are read at a time."""
    with patch.object(module, "_PART", part):
        assert stated(ValueFacts.of(x)) == of_each_number(x)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_facts_of_all_numbers_of_16_bits(dtype: type) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(256, 256)
    assert stated(ValueFacts.of(every.T[::2])) == of_each_number(every.T[::2])


@given(arrays(np.int64, (2, 3), elements=st.integers(-(2**62), 2**62)))
def test_facts_of_integers_are_those_of_their_fp32(x: NDArray[np.int64]) -> None:
    assert stated(ValueFacts.of(x)) == of_each_number(x)


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
