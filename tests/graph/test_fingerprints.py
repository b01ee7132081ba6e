"""Fingerprints do not depend on pieces, types and order of axes; distances are norms."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from finecast.graph import fingerprints as module
from finecast.graph.fingerprints import fingerprint, relative_difference

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def drawn(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@given(SHAPES, st.data())
def test_the_order_of_axes_does_not_count_as_a_set(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    array = drawn(shape)
    order = data.draw(st.permutations(range(array.ndim)))
    one, two = fingerprint(array), fingerprint(array.transpose(order))
    assert one.numbers == two.numbers
    assert sorted(one.axes) == sorted(two.axes)
    assert [one.axes[i][0] for i in range(len(one.axes))] == [n for n in shape if n != 1]


@given(SHAPES, st.sampled_from([1, 2, 7]))
def test_pieces_change_nothing(shape: tuple[int, ...], piece: int) -> None:
    array, other = drawn(shape), drawn(shape, 1)
    whole = fingerprint(array), relative_difference(array, other)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE", piece)
        assert fingerprint(array) == whole[0]
        assert relative_difference(array, other) == pytest.approx(whole[1])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64, np.int8, bool])
def test_the_type_does_not_count(dtype: Any) -> None:
    array = (drawn((3, 4)) * 2).astype(dtype)
    assert fingerprint(array) == fingerprint(array.astype(np.float32))


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ([0.0, 1.0], [-0.0, 1.0], True),
        ([math.nan, 1.0], [-math.nan, 1.0], True),
        ([math.inf, 1.0], [-math.inf, 1.0], False),
        ([1.0, 0.0], [0.0, 1.0], False),
        (["a", "b"], ["a", "c"], False),
        (["a", "b"], ["a", "b"], True),
        ([1 + 2j], [2 + 1j], False),
        ([1 + 2j], [1 + 2j], True),
        (1.0, 2.0, False),
        ([], [], True),
    ],
)
def test_which_arrays_are_the_same(one: Any, two: Any, same: bool) -> None:
    assert (fingerprint(np.array(one)) == fingerprint(np.array(two))) is same


def test_distances() -> None:
    array = drawn((4, 4))
    assert relative_difference(array, array) == 0.0
    assert relative_difference(array, -array) == pytest.approx(2.0)
    assert relative_difference(array, 0 * array) == pytest.approx(1.0)
    assert relative_difference(0 * array, array) == pytest.approx(1.0)
    assert relative_difference(0 * array, 0 * array) == 0.0
    assert relative_difference(array, array.reshape(16)) == 0.0
    near = array.T + np.float32(1e-3)
    norms = [np.linalg.norm(near), np.linalg.norm(array)]
    expected = 4e-3 / max(norms)
    assert relative_difference(array, near, turned=True) == pytest.approx(expected, rel=1e-3)
    assert (relative_difference(array, near) or 0.0) > 0.1


def test_what_has_no_distance() -> None:
    assert relative_difference(np.ones(3), np.ones(4)) is None
    assert relative_difference(np.array(["a"]), np.array(["b"])) is None
    assert relative_difference(np.full(3, 1e300), np.full(3, -1e300)) is None
    lost = np.array([math.nan, 2.0])
    assert relative_difference(lost, lost.copy()) == 0.0
    assert relative_difference(lost, np.array([1.0, 2.0])) == math.inf
    assert relative_difference(lost, np.array([math.inf, 2.0])) == math.inf
