"""Ops with bodies: which op each region of a graph belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from finecast.graph import PHI, Graph, Node

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


def owner_of(graph: Graph, node: Node) -> Node | None:
    """The op with bodies of which ``node``, a phi, is a result; None for other nodes."""
    if node.op != PHI:
        return None
    owners = graph.once(body_owners).values()
    same = (o for o in owners if (o.name, o.region) == (node.scope, node.region))
    return next(same, None)


def nodes_within(graph: Graph, owner: Node) -> Iterator[Node]:
    """The nodes of the bodies of ``owner``, and of the bodies within these."""
    owners = graph.once(body_owners)
    for node in graph.nodes:
        around = owners.get(node.region)
        while around is not None and around is not owner:
            around = owners.get(around.region)
        if around is owner:
            yield node
