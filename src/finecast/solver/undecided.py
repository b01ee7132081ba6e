"""The undecided nodes of a minimum cut, and steps that decide nodes by their edges alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from finecast.solver.assignment import Bools, Ints

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
