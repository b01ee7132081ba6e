"""The lower convex envelope of error and time: a chain of nested assignments."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import scipy  # whose parts load on first use: sparse takes .2 s

from finecast.solver.assignment import Bools, Floats, Ints, Problem, chain_profile, total_by
from finecast.solver.mincut import minimal_cut
from finecast.solver.network import Network, build_network

_EPS = float(np.finfo(np.float64).eps)
_SAME_LAM = 2.0**-36  # relative; above the round-off of sums of a hundred thousand terms


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One vertex: the optimal assignment for every lam in ``[lam_low, lam_high]``.

    ``lam_high`` is also the seconds gained per squared error added since the step before.
    ``casts`` counts the casts that take time; ``order`` has the index of the first step in
    which each unit is low.
    """

    index: int
    lam_high: float
    lam_low: float
    time_s: float
    error: float
    casts: int
    order: Ints = field(repr=False, compare=False)

    @property
    def errors(self) -> Floats:
        """The squared errors of roundings to each of the two formats, as of a labelling."""
        return np.array([0.0, self.error])

    @property
    def low(self) -> Bools:
        """Which units are low (computed from ``order``, which all steps share)."""
        return self.order <= self.index


def frontier(problem: Problem, *, max_steps: int | None = None) -> tuple[Step, ...]:
    """All vertices of the lower convex envelope of (error, time), for lam from inf to 0.

    Laws: the first step has the least error, and the least time with it; the last has the
    least time. Each step's low set contains those before it. Error grows and time falls
    strictly, with falling gain per error. Each step is optimal throughout its lam interval,
    and the intervals cover 0..inf. With ``max_steps`` (at least 2) only steps that are about
    evenly spaced along the curve are returned, each with its own interval.

    Proof of nesting: lam multiplies weights of nodes only, by errors >= 0. Let S and S' be
    the smallest minimum cuts at lam > lam'. Cut costs are submodular, so
    c(S) + c(S') >= c(S & S') + c(S | S') at lam. Were c(S & S') > c(S), then
    c(S | S') < c(S') at lam, and at lam' too: going there lowers c(X) by
    (lam - lam') error(X), and error(S | S') >= error(S') as no error is negative. But S' is
    minimum at lam'. So S & S' is a minimum cut at lam, and S, the smallest, lies in S'.

    Method: the recursion of Eisner and Severance (1976), with what both ends of a lam
    interval agree on contracted away (Gallo, Grigoriadis and Tarjan, 1989), and the rest
    split into connected parts, each with a lam interval of its own. All parts are disjoint,
    so one cut over all of them does one level of the recursion.

    Raises:
        ValueError: If ``max_steps`` is less than 2.
    """
    if max_steps is not None and max_steps < 2:
        raise ValueError(f"max_steps is {max_steps}: a frontier has two ends")
    net = build_network(problem)
    order, lams = _rank(net, _breakpoints(net))
    profile = chain_profile(problem, order, len(lams))
    bounds = np.append(lams, 0.0)
    chosen = np.arange(len(lams))
    if max_steps is not None and len(lams) > max_steps:
        chosen = spread(profile.time_s, profile.error, max_steps)
    return tuple(
        Step(
            index=int(k),
            lam_high=float(bounds[k]),
            lam_low=float(bounds[k + 1]),
            time_s=float(profile.time_s[k]),
            error=float(profile.error[k]),
            casts=int(profile.casts[k]),
            order=order,
        )
        for k in chosen
    )


def spread(time_s: Floats, error: Floats, count: int) -> Ints:
    """Indices of both ends and of steps about evenly spaced along the curve between them.

    The position along the curve is the share of the time gained plus the share of the error
    (its square root) added: fast plans hardly differ in time, but in error.
    """
    won = (time_s[0] - time_s) / (time_s[0] - time_s[-1])
    wrong = np.sqrt(error) - np.sqrt(error[0])
    along = won + wrong / wrong[-1] if wrong[-1] > 0 else won
    wanted = np.linspace(along[0], along[-1], count)
    after = np.searchsorted(along, wanted).clip(1, len(along) - 1)
    nearer = np.abs(along[after - 1] - wanted) <= np.abs(along[after] - wanted)
    return np.unique(after - nearer)


def _rank(net: Network, breakpoints: Floats) -> tuple[Ints, Floats]:
    """The step at which each unit becomes low, and the lam at which each step begins.

    Breakpoints that are equal up to round-off are one step.
    """
    never = -1.0
    price = np.concatenate([breakpoints, [np.inf, never]])[net.node]  # [-2], [-1]: pins
    falling = np.unique(price[(price > 0) & (price < np.inf)])[::-1]
    new = np.ones(len(falling), dtype=np.bool_)
    new[1:] = falling[1:] < falling[:-1] * (1 - _SAME_LAM)
    lams = np.concatenate([[np.inf], falling[new]])
    step = np.append(np.cumsum(new), len(lams))  # the last entry: never
    at = np.searchsorted(-falling, -price)
    at[price <= 0] = len(falling)
    return np.where(price == np.inf, 0, step[at]), lams


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """Nodes whose breakpoints are undecided: each lies between its ``lower`` and ``upper``.

    ``time`` is the cost of being low, with the edges to decided neighbours included. So a
    part (connected component) costs the sum of time + lam * error if it is all low, 0 if it
    is all high.
    """

    ids: Ints
    time: Floats
    error: Floats
    lower: Floats
    upper: Floats
    tail: Ints
    head: Ints
    cost: Floats


def _breakpoints(net: Network) -> Floats:
    """For each node the lam below which it is low; inf if it always is, -1 if never."""
    result = np.full(len(net.time), -1.0)
    state = _Open(
        ids=np.arange(len(net.time)),
        time=net.time,
        error=net.error,
        lower=np.zeros(len(net.time)),
        upper=np.full(len(net.time), np.inf),
        tail=net.tail,
        head=net.head,
        cost=net.cost,
    )
    fastest = minimal_cut(net.time, net.tail, net.head, net.cost)
    state = _keep(_cut_apart(state, fastest), fastest)
    least = minimal_cut(
        np.where(state.error > 0, np.inf, state.time), state.tail, state.head, state.cost
    )
    result[state.ids[least]] = np.inf
    state = _keep(_cut_apart(state, least), ~least)
    while len(state.ids):
        state = _level(state, result)
    return result


def _keep(state: _Open, keep: Bools) -> _Open:
    """The nodes of the mask ``keep``, and the edges between them."""
    number = np.cumsum(keep) - 1
    edges = keep[state.tail] & keep[state.head]
    return _Open(
        ids=state.ids[keep],
        time=state.time[keep],
        error=state.error[keep],
        lower=state.lower[keep],
        upper=state.upper[keep],
        tail=number[state.tail[edges]],
        head=number[state.head[edges]],
        cost=state.cost[edges],
    )


def _cut_apart(state: _Open, low: Bools) -> _Open:
    """Replace the edges between ``low`` and the rest by weights; ``low`` becomes low first.

    When a node of ``low`` changes, the rest is still high, so it pays for its edges to the
    rest. When a node of the rest changes, ``low`` is low already, so it saves the edges from
    there. Edges from the rest to ``low`` are never cut.
    """
    across = low[state.tail] != low[state.head]
    out = across & low[state.tail]
    n = len(state.ids)
    time = state.time + total_by(state.tail[out], state.cost[out], n)
    time -= total_by(state.head[out], state.cost[out], n)
    kept = ~across
    return replace(
        state,
        time=time,
        tail=state.tail[kept],
        head=state.head[kept],
        cost=state.cost[kept],
    )


def _level(state: _Open, result: Floats) -> _Open:
    """One level: cut every part at the lam where all low and all high cost the same.

    If no other set costs less there, the part changes side as a whole at that lam. Otherwise
    the nodes that the cut made low change at that lam or a higher one, the rest at a lower
    one. These bounds make the chain nested in spite of round-off.
    """
    n = len(state.ids)
    graph = scipy.sparse.csr_array(
        (np.ones(len(state.tail)), (state.tail, state.head)), shape=(n, n)
    )
    count, part = scipy.sparse.csgraph.connected_components(graph, directed=False)
    part = part.astype(np.int64)
    error = total_by(part, state.error, count)
    gain = np.maximum(-total_by(part, state.time, count), 0.0)
    price = np.divide(gain, error, out=np.full(count, np.inf), where=error > 0)
    lam = np.clip(price[part], state.lower, state.upper)
    size = np.bincount(part, minlength=count)
    single = (size == 1)[part] | ~np.isfinite(lam)
    result[state.ids[single]] = lam[single]
    rest = _keep(state, ~single)
    lam, part = lam[~single], part[~single]
    if not len(rest.ids):
        return rest
    weight = rest.time + lam * rest.error
    low = minimal_cut(weight, rest.tail, rest.head, rest.cost, part)
    split = _improved(rest, weight, low, part, count)[part]
    result[rest.ids[~split]] = lam[~split]
    lower, upper = np.where(low, lam, rest.lower), np.where(low, rest.upper, lam)
    return _keep(_cut_apart(replace(rest, lower=lower, upper=upper), low), split)


def _improved(state: _Open, weight: Floats, low: Bools, part: Ints, count: int) -> Bools:
    """Which parts the cut splits, with a gain above round-off."""
    cut = low[state.tail] & ~low[state.head]
    gain = -total_by(part, weight * low, count)
    gain -= total_by(part[state.tail[cut]], state.cost[cut], count)
    size = np.bincount(part, minlength=count)
    lows = total_by(part, low, count)
    scale = total_by(part, np.abs(weight), count)
    return (lows > 0) & (lows < size) & (gain > 8 * size * _EPS * scale)
