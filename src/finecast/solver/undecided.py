"""What is undecided of a minimum cut, and nodes that are decided whatever the others are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from finecast.solver.assignment import Bools, Ints

# A pass that settles less than this share of the nodes, inverted, takes longer than it spares
# the flow: measured on tangles. So does dropping fewer than that other share.
_WORTH_A_PASS: Final = 64
_WORTH_DROPPING: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """Nodes and edges of a cut, in integers; ``ids`` are the numbers that a caller has."""

    ids: Ints
    weight: Ints
    tail: Ints
    head: Ints
    cost: Ints


def presolve(net: Undecided, low: Bools, most: int = 30) -> Undecided:
    """Decide nodes whatever their neighbours are; sets ``low`` of those found in S.

    Node i is in every minimum cut when its gain exceeds all it can cut, and in no smallest
    one when its weight is no less than all it can save. An edge above what its head would
    cost by joining S (its tail, by leaving) may be lowered to just above that: cutting it
    is still never best, so the minimum cuts stay the same, and infinities vanish.
    """
    for done in range(most):
        out, into = totals(net)
        inside = -net.weight > out
        outside = net.weight >= into
        settled = int(np.count_nonzero(inside)) + int(np.count_nonzero(outside))
        join = np.maximum(net.weight, 0) + out
        leave = np.maximum(-net.weight, 0) + into
        bound = np.minimum(join[net.head], leave[net.tail]) + 1
        net = _replace_cost(net, np.minimum(net.cost, bound))
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
    # Staying in S beside a node that is out pays the edge; joining beside one in S saves it.
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


def _replace_cost(net: Undecided, cost: Ints) -> Undecided:
    return Undecided(ids=net.ids, weight=net.weight, tail=net.tail, head=net.head, cost=cost)
