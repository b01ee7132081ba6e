"""What a conversion must not leave in an ONNX model: stale types, and what nothing reads."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass


def with_stated_types(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a value_info for each value, as exporters write it."""
    return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)


def without_dead(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without what no output needs."""
    found = ir.from_proto(model)
    RemoveUnusedNodesPass()(found)
    RemoveUnusedFunctionsPass()(found)
    return ir.to_proto(found)


def stale_types(model: onnx.ModelProto) -> list[str]:
    """The values whose stated types or sizes strict shape inference does not confirm."""
    bare = onnx.ModelProto.FromString(model.SerializeToString())
    bare.graph.ClearField("value_info")
    inferred = onnx.shape_inference.infer_shapes(bare, strict_mode=True, data_prop=True)
    found = {v.name: v.type for v in inferred.graph.value_info}
    made = {name for node in model.graph.node for name in node.output}
    initial = {t.name: t for t in model.graph.initializer}
    wrong: list[str] = []
    for stated in model.graph.value_info:
        if (tensor := initial.get(stated.name)) is not None:
            other = tensor.data_type != stated.type.tensor_type.elem_type
            other |= _differ(list(tensor.dims), _sizes(stated.type))
        elif stated.name not in made:
            wrong.append(f"{stated.name} does not exist")
            continue
        elif stated.name not in found:
            continue
        else:
            kind = found[stated.name]
            other = kind.tensor_type.elem_type != stated.type.tensor_type.elem_type
            other |= _differ(_sizes(kind), _sizes(stated.type))
        if other:
            wrong.append(stated.name)
    return wrong


def _sizes(kind: onnx.TypeProto) -> list[int | None] | None:
    if not kind.tensor_type.HasField("shape"):
        return None
    dims = kind.tensor_type.shape.dim
    return [d.dim_value if d.HasField("dim_value") else None for d in dims]


def _differ(some: list[int | None] | None, others: list[int | None] | None) -> bool:
    if some is None or others is None:
        return False
    return len(some) != len(others) or any(
        None not in (a, b) and a != b for a, b in zip(some, others, strict=True)
    )


def unread(model: onnx.ModelProto) -> set[str]:
    """Nodes, by their first results, and initializers that nothing needs."""
    graph = model.graph
    needed = {port.name for port in graph.output}
    found: set[str] = set()
    for node in reversed(graph.node):
        if needed.isdisjoint(node.output):
            found.add(next(filter(None, node.output), node.name))
        else:
            needed.update(_reads(node))
    return found | {t.name for t in graph.initializer if t.name not in needed}


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """What a node and its bodies read; names of the bodies' own values among them."""
    yield from node.input
    for attribute in node.attribute:
        for body in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
            yield from (port.name for port in body.output)
            for inner in body.node:
                yield from _reads(inner)
