"""The assignment problem as a minimum cut.

For each value an auxiliary node makes each cast count once, however many consumers need it,
and another one its rounding; where only one unit is concerned, none is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from finecast.solver.assignment import (
    PINNED_HIGH,
    PINNED_LOW,
    Bools,
    Floats,
    Ints,
    Problem,
    total_by,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The cut problem. ``node[u]`` is the node of unit u, or the side that it is pinned to.

    For a set S of low nodes, up to a constant, cost = sum over S of (time + lam * error)
    plus the sum of ``cost`` of the edges from S to outside. lam multiplies weights alone, by
    errors >= 0, which makes the minimum cuts shrink as lam grows.
    """

    node: Ints
    time: Floats
    error: Floats
    tail: Ints
    head: Ints
    cost: Floats


def build_network(problem: Problem) -> Network:
    """The cut problem of an assignment problem; edges to pins become weights or constants."""
    node, count = _sides(problem)
    build = _Builder(count)
    free = np.flatnonzero(node >= 0)
    gain = problem.time_low[free] - problem.time_high[free]
    build.weigh(node[free], time=gain, error=problem.error[free])
    sides = np.concatenate([node, [PINNED_LOW, PINNED_HIGH]])  # [-2] and [-1]: the pins
    producer_sides = sides[problem.producer]
    value, used = _unique(problem.consumer_value, sides[problem.consumer_unit], count)
    build.casts(value, used, producer_sides, problem.down_cost, down=True)
    build.casts(value, used, producer_sides, problem.up_cost, down=False)
    both = (
        np.concatenate([np.arange(len(producer_sides)), value]),
        np.concatenate([producer_sides, used]),
    )
    build.rounding(*_unique(*both, count), problem.value_error)
    return build.network(node)


def _unique(value: Ints, side: Ints, nodes: int) -> tuple[Ints, Ints]:
    """The distinct pairs of value and side, sorted by value; sides are nodes or pins."""
    span = nodes - PINNED_LOW
    key = np.sort(value * span + (side - PINNED_LOW))  # np.unique hashes: eight times slower
    key = key[np.append(True, key[1:] != key[:-1])[: len(key)]]
    return key // span, key % span + PINNED_LOW


def node_weights(net: Network, lam: float) -> Floats:
    """Weight of each node at ``lam``; at infinity no node that adds error may be low.

    That gives the least error: units that must be low are not in the network, and the others
    can have an error of zero.
    """
    if np.isinf(lam):
        return np.where(net.error > 0, np.inf, net.time)
    return net.time + lam * net.error


def unit_sides(net: Network, low_nodes: Bools) -> Bools:
    """Which units are low, by the cut's mask over nodes."""
    # PINNED_LOW and PINNED_HIGH index the last two entries.
    return np.concatenate([low_nodes, [True, False]])[net.node]


def _sides(problem: Problem) -> tuple[Ints, int]:
    """The node or the pin of each unit, and the number of nodes."""
    low, high = np.isinf(problem.time_high), np.isinf(problem.time_low)
    free = ~(low | high)
    number = np.where(low, PINNED_LOW, np.where(high, PINNED_HIGH, np.cumsum(free) - 1))
    return number, int(np.count_nonzero(free))


class _Builder:
    """Collects weights and edges; ``nodes`` grows as auxiliary nodes are added."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.weights: list[tuple[Ints, Floats, Floats]] = []
        self.edges: list[tuple[Ints, Ints, Floats]] = []

    def weigh(
        self, node: Ints, *, time: Floats | None = None, error: Floats | None = None
    ) -> None:
        zero = np.zeros(len(node))
        self.weights.append(
            (node, zero if time is None else time, zero if error is None else error)
        )

    def _link(self, tail: Ints, head: Ints, cost: Floats) -> None:
        """Add edges; one with a pinned end becomes a weight of the other end."""
        to_high, from_low = head == PINNED_HIGH, tail == PINNED_LOW
        free = (tail >= 0) & (head >= 0) & (tail != head)
        self.edges.append((tail[free], head[free], cost[free]))
        pays, saves = to_high & (tail >= 0), from_low & (head >= 0)
        self.weigh(tail[pays], time=cost[pays])
        self.weigh(head[saves], time=-cost[saves])

    def casts(self, value: Ints, used: Ints, made: Ints, cost: Floats, *, down: bool) -> None:
        """One cast per value: from a high producer for any low consumer, or the reverse.

        Down: consumer -> d -> producer, cut once if a consumer is low and the producer high;
        up: producer -> u -> consumer. If a pin needs the cast, other consumers add no cost.
        """
        needs, idle = (PINNED_LOW, PINNED_HIGH) if down else (PINNED_HIGH, PINNED_LOW)
        always = np.zeros(len(made), dtype=np.bool_)
        always[value[used == needs]] = True
        keep = (cost > 0)[value] & (used != idle) & (used != made[value])
        keep &= (used == needs) | ~always[value]
        value, used = value[keep], used[keep]
        many = np.bincount(value, minlength=len(made)) > 1
        aux = np.full(len(made), PINNED_HIGH)
        aux[many] = self._new_nodes(int(np.count_nonzero(many)))
        near = np.where(many, aux, made)[value]
        middle = np.flatnonzero(many)
        for tail, head, at in ((used, near, value), (aux[middle], made[middle], middle)):
            if down:
                self._link(tail, head, cost[at])
            else:
                self._link(head, tail, cost[at])

    def rounding(self, value: Ints, touched_by: Ints, error: Floats) -> None:
        """The error of a value, once, if any low unit makes or uses it: unit -> a.

        ``a`` is the auxiliary node, whose weight is the error.
        """
        always = np.zeros(len(error), dtype=np.bool_)  # rounded whatever is chosen
        always[value[touched_by == PINNED_LOW]] = True
        keep = (touched_by >= 0) & (error > 0)[value] & ~always[value]
        value, touched_by = value[keep], touched_by[keep]
        many = np.bincount(value, minlength=len(error)) > 1
        alone = ~many[value]
        self.weigh(touched_by[alone], error=error[value[alone]])
        aux = np.zeros(len(error), dtype=np.int64)
        aux[many] = self._new_nodes(int(np.count_nonzero(many)))
        self.weigh(aux[many], error=error[many])
        tail, head = touched_by[~alone], aux[value[~alone]]
        self._link(tail, head, np.full(len(tail), np.inf))

    def _new_nodes(self, count: int) -> Ints:
        self.nodes += count
        return np.arange(self.nodes - count, self.nodes)

    def network(self, node: Ints) -> Network:
        where = np.concatenate([w[0] for w in self.weights])
        return Network(
            node=node,
            time=total_by(where, np.concatenate([w[1] for w in self.weights]), self.nodes),
            error=total_by(where, np.concatenate([w[2] for w in self.weights]), self.nodes),
            tail=np.concatenate([e[0] for e in self.edges]),
            head=np.concatenate([e[1] for e in self.edges]),
            cost=np.concatenate([e[2] for e in self.edges]),
        )
