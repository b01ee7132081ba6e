"""Copies of a model that output its values."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from finecast.frontends.onnx.reader import OnnxBinding
from finecast.graph import Graph


def observable(graph: Graph, binding: OnnxBinding) -> dict[str, int]:
    """Ids, by name, of the float values that can be outputs: those outside of bodies."""
    names: dict[str, int] = {}
    for value in graph.values:
        native = binding.values[value.id]
        producer = native.producer()
        if value.format is None or value.constant is not None or producer is None:
            continue
        if producer.graph is binding.model.graph and native.name:
            names[native.name] = value.id
    return names


def with_outputs(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """A copy of ``model`` whose outputs are just the values called ``names``."""
    copy = model.clone()
    by_name = {v.name: v for node in copy.graph for v in node.outputs}
    copy.graph.outputs.clear()
    copy.graph.outputs.extend(by_name[name] for name in names)
    return copy
