"""Adjustments: applying them to arrays, merging two, saving and reading them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.graph import Graph
from finecast.planning.adjustments import Adjustment, together
from tests.planning import nets

EXPONENTS = st.lists(st.integers(-20, 20), min_size=3, max_size=3).map(tuple)
ADDED = st.lists(st.floats(-4, 4, width=32), min_size=3, max_size=3).map(tuple)


@given(EXPONENTS, ADDED, EXPONENTS)
def test_one_after_the_other_is_one(
    first: tuple[int, ...], add: tuple[float, ...], then: tuple[int, ...]
) -> None:
    """Exactly, unless numbers that were added are scaled afterwards."""
    one = Adjustment(node="a", port=1, exponents=first)
    other = Adjustment(node="a", port=1, exponents=then)
    array = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    for a, b in ((one, other), (one, replace(other, add=add))):
        np.testing.assert_array_equal(a.followed_by(b).of(array), b.of(a.of(array)))
    added = replace(one, add=add)
    np.testing.assert_allclose(
        added.followed_by(other).of(array), other.of(added.of(array)), rtol=1e-6, atol=1e-3
    )


def test_channels_lie_along_an_axis() -> None:
    array = np.ones((3, 2, 2), np.float32)
    first = Adjustment(node="a", port=1, axis=-3, exponents=(0, 1, -1))
    assert first.of(array)[:, 0, 0].tolist() == [1, 2, 0.5]


def test_adjustments_of_one_operand_and_axis_are_merged() -> None:
    bias = Adjustment(node="a", port=2, exponents=(1, 0))
    rows = Adjustment(node="a", port=1, axis=-2, exponents=(1, 0))
    columns = Adjustment(node="a", port=1, exponents=(2, 3))
    off = Adjustment(node="a", port=2, add=(0.5, 0.5))
    made = together([bias, rows, columns], [off, replace(rows, exponents=(-1, 0))])
    assert made == (replace(bias, add=(0.5, 0.5)), columns)


@pytest.mark.parametrize(
    "one",
    [
        Adjustment(node="a", port=0, exponents=(1, -2)),
        Adjustment(node="a", port=1, axis=-4, exponents=(1, -2)),
        Adjustment(node="a", port=2, exponents=(1, -2), add=(0.5, -0.25)),
        Adjustment(node="a", port=2, add=(0.5, 1e-30)),
    ],
)
def test_it_is_read_as_it_was_written(one: Adjustment) -> None:
    assert Adjustment.from_dict(one.to_dict()) == one


@pytest.mark.parametrize(
    "content",
    [
        {"port": 1},
        {"node": "a", "port": -1, "add": "1"},
        {"node": "a", "port": 1, "axis": 0, "add": "1 2"},
        {"node": "a", "port": 1},
        {"node": "a", "port": 1, "exponents": "0.5"},
        {"node": "a", "port": 1, "exponents": "999"},
        {"node": "a", "port": 1, "exponents": [1]},
        {"node": "a", "port": 1, "exponents": "1 2", "add": "1"},
        {"node": "a", "port": 1, "add": "inf"},
        {"node": "a", "port": 1, "add": "1e39"},
    ],
)
def test_invalid_content_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Adjustment.from_dict(content)


@pytest.fixture(scope="module")
def graph() -> Graph:
    text = """net (float[2, 3] u) => (float[2, 4] y) {
      [one] q = MatMul (u, w) [both] p = Mul (c, c) [two] y = Add (q, p) }"""
    return nets.prepared(text, nets.drawn(0, w=(3, 4), c=(4,))).graph


@pytest.mark.parametrize(
    ("one", "fits"),
    [
        (Adjustment(node="one", port=1, axis=-2, exponents=(1, 1, 1)), True),
        (Adjustment(node="one", port=1, exponents=(1, 1, 1, 1)), True),
        (Adjustment(node="one", port=1, exponents=(1, 1, 1)), False),
        (Adjustment(node="one", port=1, axis=-3, exponents=(1, 1, 1)), False),
        (Adjustment(node="one", port=1, add=(1.0, 1.0, 1.0, 1.0)), False),
        (Adjustment(node="one", port=0, exponents=(1, 1, 1)), True),
        (Adjustment(node="one", port=0, exponents=(1, 1)), False),
        (Adjustment(node="one", port=0, add=(1.0, 1.0, 1.0)), False),
        (Adjustment(node="one", port=2, exponents=(1, 1, 1)), False),
        (Adjustment(node="both", port=0, exponents=(1, 1, 1, 1)), False),
        (Adjustment(node="none", port=0, exponents=(1, 1, 1)), False),
    ],
)
def test_what_it_fits(graph: Graph, one: Adjustment, fits: bool) -> None:
    edit = one.edit(graph, {n.name: n for n in graph.nodes})
    assert (edit is not None) is fits
