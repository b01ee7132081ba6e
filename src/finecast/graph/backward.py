"""Which ops of a training graph belong to its backward pass."""

from __future__ import annotations

from finecast.graph import Graph


def backward_ops(graph: Graph) -> frozenset[int]:
    """Ops of the backward pass: all that depend on gradients of the outputs.

    AOT autograd calls those inputs ``tangents_1``, ``tangents_2`` and so on. A graph without
    such inputs has no backward pass.
    """
    reached = {v.id for v in graph.inputs if v.name.startswith("tangents")}
    found = set[int]()
    for node in graph.nodes if reached else ():
        if any(value in reached for value in node.inputs):
            found.add(node.id)
            reached.update(v for v in node.outputs if v is not None)
    return frozenset(found)


def ops_for_backward(graph: Graph) -> frozenset[int]:
    """Ops of the backward pass, and those whose results only such ops read."""
    found = set(backward_ops(graph))
    for node in reversed(graph.nodes) if found else ():
        outputs = [graph.values[v] for v in node.outputs if v is not None]
        uses = [n for v in outputs for n in v.uses]
        if uses and found.issuperset(uses) and not any(v.is_output for v in outputs):
            found.add(node.id)
    return frozenset(found)
