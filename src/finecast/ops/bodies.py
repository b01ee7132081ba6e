"""Ops with bodies: which op each region of a graph belongs to."""

from __future__ import annotations

from typing import Final

from finecast.graph import Graph, Node

LOOPS: Final = frozenset({"loop", "scan"})
"""Canonical ops whose body may run several times in a call."""
_WITH_BODIES: Final = LOOPS | {"if"}


def body_owners(graph: Graph) -> dict[int, Node]:
    """By number of a region, the op of control flow that it is a body of.

    The nodes of a body come before the op that owns it, and a body's region has a higher
    number than the owner's. Regions without nodes are left out.
    """
    owners: dict[int, Node] = {}
    waiting: set[int] = set()
    for node in graph.nodes:
        waiting.add(node.region)
        if node.op in _WITH_BODIES:
            own = {region for region in waiting if region > node.region}
            owners |= dict.fromkeys(own, node)
            waiting -= own
    return owners
