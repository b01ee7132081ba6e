"""Names that are free in a model, for nodes and values that are added."""

from __future__ import annotations

import onnx_ir as ir


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
