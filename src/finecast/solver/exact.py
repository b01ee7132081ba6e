"""The optimal assignment of two formats, by one minimum cut."""

from __future__ import annotations

from finecast.solver.assignment import Problem, Solution, evaluate
from finecast.solver.mincut import minimal_cut
from finecast.solver.network import build_network, node_weights, unit_sides


def solve(problem: Problem, lam: float) -> Solution:
    """The assignment of least cost at ``lam`` (seconds per unit of squared error).

    Law: no assignment costs less, and among those of equal cost this has the fewest low
    units (it is contained in each of them). ``lam = inf`` minimises error first, then time.
    Costs are compared to 2**-50 of the total gain (see ``mincut``). Deterministic.
    """
    net = build_network(problem)
    low = minimal_cut(node_weights(net, lam), net.tail, net.head, net.cost)
    return evaluate(problem, unit_sides(net, low))
