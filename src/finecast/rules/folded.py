"""What is computed from constants alone keeps fp32: a standardized weight, a scaled table.

Engines compute it once, when they load the model, so that a low format gains no time,
and each of its ops would add a rounding to the weight that they give. What only moves
a constant rounds it once wherever it stands, and may be low, unless such an op reads it.
"""

from __future__ import annotations

from finecast.graph import Graph, Node
from finecast.ops import by_name
from finecast.rules.base import KEEP, Context, Rule, Ruling


def _judge(node: Node, context: Context) -> Ruling | None:
    if node.id not in context.graph.once(_folded):
        return None
    return Ruling(
        permits=KEEP, text="it reads constants alone: computed once, when the model is loaded"
    )


def computed_once(graph: Graph) -> frozenset[int]:
    """Ids of the values that are computed from float constants alone."""
    return graph.once(_computed)


def _computed(graph: Graph) -> frozenset[int]:
    constants = {v.id for v in graph.values if v.constant is not None}
    fixed = set(constants)
    for node in graph.nodes:
        reads = [i for i in node.inputs if i is not None]
        if any(graph.following_inputs(node)) and fixed.issuperset(reads):
            fixed.update(i for i in node.outputs if i is not None)
    return frozenset(fixed - constants)


def _folded(graph: Graph) -> frozenset[int]:
    """Ids of the nodes that compute from float constants, or move what those read."""
    fixed = computed_once(graph)
    computed = [n for n in graph.nodes if not fixed.isdisjoint(n.outputs)]
    found: set[int] = set()
    for node in reversed(computed):
        readers = {n for v in graph.following_outputs(node) for n in v.uses}
        if not by_name(node.op).exact or readers & found:
            found.add(node.id)
    return frozenset(found)


FOLDED = Rule(name="folded", judge=_judge)
