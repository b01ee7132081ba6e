"""Reductions of a minimum cut problem: steps that remove nodes before a flow is computed.

Law: each step preserves the smallest minimum cut. The sides that it decides for removed nodes
are those of that cut, given the sides of the remaining ones. No step raises the maximum flow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import scipy  # whose parts load on first use: sparse takes .2 s

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
# Further passes of ``presolve`` in a row gain less than merging does.
_PASSES: Final = 3
_TURNS: Final = 2

Merged: TypeAlias = tuple[Ints, Ints]
"""Ids of nodes, and of the nodes on whose sides each of them is."""


def reduced(net: Undecided, low: Bools) -> tuple[Undecided, list[Merged]]:
    """Reduce a network; sets ``low`` of nodes that are decided.

    Returns:
        The smaller network, and the merged nodes. The sides of those merged last are copied
        first.
    """
    merged: list[Merged] = []
    for _ in range(_TURNS):
        net = presolve(net, low, most=_PASSES)
        before = len(net.ids)
        if not before:
            return net, merged
        net, step = _merged(net)
        merged += [] if step is None else [step]
        if len(net.ids) * _WORTH_A_STEP > before * (_WORTH_A_STEP - 1):
            break
    return presolve(net, low), merged


def _merged(net: Undecided) -> tuple[Undecided, Merged | None]:
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
    pairs = scipy.sparse.csr_array(
        (np.ones(len(same), dtype=np.int8), (tail[same], head[same])), shape=(count, count)
    )
    groups, group = scipy.sparse.csgraph.connected_components(pairs, directed=False)
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
    return left, (net.ids, net.ids[first][group])


def _both_ways(net: Undecided) -> tuple[Ints, Ints, Ints, Ints]:
    """Pairs of nodes with an edge: tail, head, its cost, and that of the reverse edge."""
    count = len(net.ids)
    lower, upper = np.minimum(net.tail, net.head), np.maximum(net.tail, net.head)
    along = np.where(net.tail == lower, net.cost, 0)
    there, back_again = (
        scipy.sparse.csr_array((cost, (lower, upper)), shape=(count, count))
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
