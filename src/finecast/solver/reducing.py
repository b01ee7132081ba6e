"""Reductions of a minimum cut problem: steps that remove nodes before a flow is computed.

Law: each step preserves the smallest minimum cut. The sides that it decides for removed nodes
are those of that cut, given the sides of the remaining ones. No step raises the maximum flow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from finecast.solver.assignment import Bools, Ints

# The undecided nodes of a minimum cut, and steps that decide nodes by their edges alone.


# A further pass is made if the last one decided at least 1/64 of the nodes, and the first one
# drops nodes only if it decided 1/16: else they take longer than they save in the flow
# (measured on densely connected graphs).
_WORTH_A_PASS: Final = 64
_WORTH_DROPPING: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """Nodes and edges of a cut with integer costs; ``ids`` are the original node numbers."""

    ids: Ints
    weight: Ints
    tail: Ints
    head: Ints
    cost: Ints


def presolve(net: Undecided, low: Bools, most: int = 30) -> Undecided:
    """Decide nodes whose side does not depend on their neighbours; sets ``low`` of those in S.

    Node i is in every minimum cut if its gain exceeds the cost of all edges out of it, and not
    in the smallest one if its weight is no less than the cost of all edges into it. An edge
    that costs more than its head's joining S can cost (or its tail's leaving) is lowered to
    just above that: cutting it is still never optimal, so the minimum cuts stay the same, and
    infinite costs vanish.
    """
    for done in range(most):
        out, into = totals(net)
        inside = -net.weight > out
        outside = net.weight >= into
        settled = int(np.count_nonzero(inside)) + int(np.count_nonzero(outside))
        join = np.maximum(net.weight, 0) + out
        leave = np.maximum(-net.weight, 0) + into
        bound = np.minimum(join[net.head], leave[net.tail]) + 1
        net = replace(net, cost=np.minimum(net.cost, bound))
        if not done and settled * _WORTH_DROPPING < len(net.ids) and most > 1:
            continue  # lower costs let the next pass settle many
        low[net.ids[inside]] = True
        net = settle(net, inside, outside)
        if not len(net.ids) or settled * _WORTH_A_PASS < len(net.ids):
            break
    return net


def settle(net: Undecided, low: Bools, high: Bools) -> Undecided:
    """Drop decided nodes: their edges become weights of the neighbours that stay."""
    keep = ~(low | high)
    weight = net.weight.copy()
    # A node in S pays for an edge to a node that is out, and saves the edge from one in S.
    pays, saves = np.flatnonzero(high[net.head]), np.flatnonzero(low[net.tail])
    np.add.at(weight, net.tail[pays], net.cost[pays])
    np.subtract.at(weight, net.head[saves], net.cost[saves])
    edges = np.flatnonzero(keep[net.tail] & keep[net.head] & (net.cost > 0))
    number = np.cumsum(keep) - 1
    return Undecided(
        ids=net.ids[keep],
        weight=weight[keep],
        tail=number[net.tail[edges]],
        head=number[net.head[edges]],
        cost=net.cost[edges],
    )


def totals(net: Undecided) -> tuple[Ints, Ints]:
    """Sum of costs of the edges out of and into each node."""
    out = np.zeros(len(net.ids), dtype=np.int64)
    into = np.zeros(len(net.ids), dtype=np.int64)
    np.add.at(out, net.tail, net.cost)
    np.add.at(into, net.head, net.cost)
    return out, into


# Beyond this total, sums over the edges of merged nodes might not fit into int64.
_LARGEST_SUM: Final = 2.0**60
# A step that removes less than 1/16 of the nodes takes longer than it saves in the flow:
# measured on densely connected graphs.
_WORTH_A_STEP: Final = 16
# Further passes of ``presolve`` in a row gain less than the other steps do.
_PASSES: Final = 3
_TURNS: Final = 2


class Removed(Protocol):
    """Nodes that a step removed."""

    def decide(self, low: Bools) -> None:
        """Set ``low`` (indexed by ids) for the removed nodes, given the others'."""
        ...


def reduced(net: Undecided, low: Bools) -> tuple[Undecided, list[Removed]]:
    """Reduce a network; sets ``low`` of nodes that are decided.

    Returns:
        The smaller network, and the removed nodes, to be decided in reverse order.
    """
    removed: list[Removed] = []
    for _ in range(_TURNS):
        net = presolve(net, low, most=_PASSES)
        before = len(net.ids)
        if not before:
            return net, removed
        net, beside = _eliminated(net)
        net, merged = _merged(net)
        removed += [t for t in (beside, merged) if t is not None]
        if len(net.ids) * _WORTH_A_STEP > before * (_WORTH_A_STEP - 1):
            break
    return presolve(net, low), removed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """An edge of each of some nodes: its other end, its cost, whether it enters the node."""

    other: Ints
    cost: Ints
    into: Bools

    def cut(self, node_low: bool, other_low: Bools | bool) -> Ints:
        """The cost that is cut, given whether the node and the other end are in S."""
        crosses = np.where(self.into, other_low, np.logical_not(other_low))
        return self.cost * (crosses & (self.into != node_low))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Between:
    """Removed nodes with one or two edges: they take the side that costs less."""

    ids: Ints
    weight: Ints
    first: _Ends
    second: _Ends

    def decide(self, low: Bools) -> None:
        """Put nodes into S where that costs less."""
        a, b = low[self.first.other], low[self.second.other]
        low[self.ids] = self._inside(a, b) < self._outside(a, b)

    def least(self, a: bool, b: bool) -> Ints:
        """The least cost of the node and its edges, given whether the other ends are in S."""
        return np.minimum(self._inside(a, b), self._outside(a, b))

    def _inside(self, a: Bools | bool, b: Bools | bool) -> Ints:
        return self.weight + self.first.cut(True, a) + self.second.cut(True, b)

    def _outside(self, a: Bools | bool, b: Bools | bool) -> Ints:
        return self.first.cut(False, a) + self.second.cut(False, b)


def _eliminated(net: Undecided) -> tuple[Undecided, Removed | None]:
    """The network without nodes of one or two edges; of two neighbours only one is removed.

    The least cost of such a node, as a function of the sides of its two neighbours, is stated
    by a weight of each neighbour and an edge between them.
    """
    count = len(net.ids)
    degree = np.bincount(net.tail, minlength=count) + np.bincount(net.head, minlength=count)
    chosen = (degree > 0) & (degree <= 2)
    both = chosen[net.tail] & chosen[net.head]
    chosen[np.maximum(net.tail[both], net.head[both])] = False
    if not chosen.any() or np.count_nonzero(chosen) * _WORTH_A_STEP < count:
        return net, None
    between = _between(net, chosen)
    one, other = between.first.other, between.second.other
    neither, first = between.least(False, False), between.least(True, False)
    second, all_ = between.least(False, True), between.least(True, True)
    weight = net.weight.copy()
    np.add.at(weight, one, all_ - second)
    np.add.at(weight, other, second - neither)
    apart = first - neither - all_ + second  # added cost if only the first end is in S
    new = (apart > 0) & (one != other)
    stays = ~(chosen[net.tail] | chosen[net.head])
    number = np.cumsum(~chosen) - 1
    left = Undecided(
        ids=net.ids[~chosen],
        weight=weight[~chosen],
        tail=number[np.concatenate([net.tail[stays], one[new]])],
        head=number[np.concatenate([net.head[stays], other[new]])],
        cost=np.concatenate([net.cost[stays], apart[new]]),
    )
    removed = replace(
        between,
        ids=net.ids[between.ids],
        first=replace(between.first, other=net.ids[one]),
        second=replace(between.second, other=net.ids[other]),
    )
    return left, removed


def _between(net: Undecided, chosen: Bools) -> _Between:
    """The chosen nodes, of which no two are neighbours, and their edges.

    If a node has one edge only, its second one has cost 0.
    """
    leaving, entering = np.flatnonzero(chosen[net.tail]), np.flatnonzero(chosen[net.head])
    node = np.concatenate([net.tail[leaving], net.head[entering]])
    order = np.argsort(node, kind="stable")
    node = node[order]
    other = np.concatenate([net.head[leaving], net.tail[entering]])[order]
    cost = np.concatenate([net.cost[leaving], net.cost[entering]])[order]
    into = order >= len(leaving)
    at = np.flatnonzero(np.append(True, node[1:] != node[:-1]))
    last = np.append(at[1:], len(node)) - 1
    first = _Ends(other=other[at], cost=cost[at], into=into[at])
    second = _Ends(other=other[last], cost=np.where(last > at, cost[last], 0), into=into[last])
    nodes = node[at]
    return _Between(ids=nodes, weight=net.weight[nodes], first=first, second=second)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Merged:
    """Nodes ``ids`` are on the same sides as the nodes ``into``."""

    ids: Ints
    into: Ints

    def decide(self, low: Bools) -> None:
        """Copy the sides of the nodes that they were merged into."""
        low[self.ids] = low[self.into]


def _merged(net: Undecided) -> tuple[Undecided, Removed | None]:
    """The network with nodes merged that are on the same side in the smallest minimum cut.

    If i is in S, so is j if the edge from i to j costs more than j's joining S can cost. If j
    is out, so is i if that edge costs no less than i's leaving S can cost.
    """
    count = len(net.ids)
    total = float(net.cost.sum(dtype=np.float64)) + float(np.abs(net.weight).sum())
    if not len(net.cost) or total >= _LARGEST_SUM:
        return net, None
    tail, head, cost, back = _both_ways(net)
    out, into = totals(net)
    join, leave = net.weight + out, into - net.weight
    follows = (cost > join[head] - back) | (cost >= leave[tail] - back)
    leads = (back > join[tail] - cost) | (back >= leave[head] - cost)
    same = np.flatnonzero(follows & leads)
    if not len(same) or len(same) * _WORTH_A_STEP < count:
        return net, None
    pairs = csr_array(
        (np.ones(len(same), dtype=np.int8), (tail[same], head[same])), shape=(count, count)
    )
    groups, group = connected_components(pairs, directed=False)
    group = group.astype(np.int64)
    weight = np.zeros(groups, dtype=np.int64)
    np.add.at(weight, group, net.weight)
    first = np.empty(groups, dtype=np.int64)
    first[group[::-1]] = np.arange(count)[::-1]
    tail, head = group[net.tail], group[net.head]
    keep = np.flatnonzero(tail != head)
    left = Undecided(
        ids=net.ids[first],
        weight=weight,
        tail=tail[keep],
        head=head[keep],
        cost=net.cost[keep],
    )
    return left, _Merged(ids=net.ids, into=net.ids[first][group])


def _both_ways(net: Undecided) -> tuple[Ints, Ints, Ints, Ints]:
    """Pairs of nodes with an edge: tail, head, its cost, and that of the reverse edge."""
    count = len(net.ids)
    lower, upper = np.minimum(net.tail, net.head), np.maximum(net.tail, net.head)
    along = np.where(net.tail == lower, net.cost, 0)
    there, back_again = (
        csr_array((cost, (lower, upper)), shape=(count, count))
        for cost in (along, net.cost - along)
    )
    # Costs of 0 are stored, too, so both arrays have the same entries in the same order.
    there.sum_duplicates()
    back_again.sum_duplicates()
    tail = np.repeat(np.arange(count), np.diff(there.indptr))
    head, cost, back = (
        np.asarray(a, dtype=np.int64) for a in (there.indices, there.data, back_again.data)
    )
    return tail, head, cost, back
