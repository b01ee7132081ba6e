"""Reductions preserve the smallest minimum cut."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.solver.assignment import Bools
from finecast.solver.mincut import minimal_cut
from finecast.solver.reducing import Undecided, reduced


@st.composite
def networks(draw: st.DrawFn) -> Undecided:
    """Sparse networks of up to 8 nodes; costs and weights that often tie."""
    count = draw(st.integers(1, 8))
    node, cost = st.integers(0, count - 1), st.sampled_from([0, 1, 1, 2, 3, 5, 40])
    edges = draw(st.lists(st.tuples(node, node, cost), max_size=12))
    edges = [e for e in edges if e[0] != e[1]]
    weight = draw(st.lists(st.integers(-6, 6), min_size=count, max_size=count))
    return Undecided(
        ids=np.arange(count),
        weight=np.array(weight, dtype=np.int64),
        tail=np.array([t for t, _, _ in edges], dtype=np.int64),
        head=np.array([h for _, h, _ in edges], dtype=np.int64),
        cost=np.array([c for _, _, c in edges], dtype=np.int64),
    )


def cut_cost(net: Undecided, low: Bools) -> int:
    crosses = low[net.tail] & ~low[net.head]
    return int(net.weight[low].sum() + net.cost[crosses].sum())


def smallest(net: Undecided) -> Bools:
    """The smallest minimum cut by brute force: the intersection of all minimum cuts."""
    sides = [np.array(s, dtype=bool) for s in product((False, True), repeat=len(net.ids))]
    costs = [cut_cost(net, s) for s in sides]
    best = [s for s, c in zip(sides, costs, strict=True) if c == min(costs)]
    return np.logical_and.reduce(best)


@given(networks())
def test_what_is_taken_out_is_on_the_side_that_the_smallest_cut_has(net: Undecided) -> None:
    low = np.zeros(len(net.ids), dtype=bool)
    left, merged = reduced(net, low)
    low[left.ids[smallest(left)]] = True
    for ids, into in reversed(merged):
        low[ids] = low[into]
    assert low.tolist() == smallest(net).tolist()


@given(networks())
def test_a_cut_is_the_smallest(net: Undecided) -> None:
    low = minimal_cut(net.weight.astype(float), net.tail, net.head, net.cost.astype(float))
    assert low.tolist() == smallest(net).tolist()


@pytest.mark.parametrize("length", [10, 1000])
def test_little_is_left_of_a_line(length: int) -> None:
    """Most of its nodes are decided or merged with a neighbour."""
    random = np.random.default_rng(length)
    ends = np.arange(length - 1)
    net = Undecided(
        ids=np.arange(length),
        weight=random.integers(-9, 10, length),
        tail=np.concatenate([ends, ends + 1]),
        head=np.concatenate([ends + 1, ends]),
        cost=random.integers(5, 15, 2 * (length - 1)),
    )
    left, _ = reduced(net, np.zeros(length, dtype=bool))
    assert len(left.ids) < length / 4


def test_sums_that_would_not_fit_are_not_made() -> None:
    most = 2**58
    net = Undecided(
        ids=np.arange(4),
        weight=np.array([-most, -1, 1, most]),
        tail=np.array([0, 1, 1, 2, 2, 3]),
        head=np.array([1, 0, 2, 1, 3, 2]),
        cost=np.full(6, most),
    )
    low = np.zeros(4, dtype=bool)
    left, merged = reduced(net, low)
    low[left.ids[smallest(left)]] = True
    for ids, into in reversed(merged):
        low[ids] = low[into]
    assert low.tolist() == smallest(net).tolist()
