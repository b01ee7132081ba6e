"""Names for nodes and values: unique ones for all nodes, and free ones for those added.

onnx_ir's ``NameFixPass`` makes names unique in each graph only. Plans need names of nodes that
are unique in the whole model, bodies included, and that stay the same when it is read again.
"""

from __future__ import annotations

import itertools

import onnx_ir as ir

from finecast.frontends.onnx.types import every_node


class FreshNames:
    """Makes names unique: in the model, and among those that it gave before."""

    def __init__(self, model: ir.Model) -> None:
        self.taken: set[str] = set()
        for graph in (model.graph, *model.graph.subgraphs()):
            self.taken.update(v.name or "" for v in graph.inputs)
            self.taken.update(graph.initializers)
            for node in graph:
                self.taken.add(node.name or "")
                self.taken.update(v.name or "" for v in node.outputs)

    def __call__(self, name: str) -> str:
        """``name``, with underscores appended while it is taken."""
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name


def name_nodes(model: ir.Model) -> None:
    """Give every node a unique, non-empty name; names that already are unique stay."""
    nodes = list(every_node(model.graph))
    kept: set[str] = set()
    renamed: list[tuple[int, ir.Node]] = []
    for number, node in enumerate(nodes):
        if node.name and node.name not in kept:
            kept.add(node.name)
        else:
            renamed.append((number, node))
    for number, node in renamed:
        name = base = f"{node.name or node.op_type}_{number}"
        for attempt in itertools.count():
            if name not in kept:
                break
            name = f"{base}_{attempt}"
        kept.add(name)
        node.name = name
