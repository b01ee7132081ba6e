"""Takes an earlier conversion back, so that another policy starts from the original model.

Marks in the nodes' metadata tell what an edit changed from what the model's author wrote.
Digits that constants lost to rounding do not come back: an fp16 weight becomes the equal fp32
number. Adjusted constants get their former numbers back.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from finecast.frontends.onnx.adjusting import SCALES, take_back_constants
from finecast.frontends.onnx.constants import (
    MARK,
    ROUNDING,
    DecodedTensor,
    constant_tensor,
)
from finecast.frontends.onnx.model import POLICY_KEY
from finecast.frontends.onnx.reader import OnnxBinding, read
from finecast.frontends.onnx.restating import take_back_ops
from finecast.frontends.onnx.statements import STATEMENTS
from finecast.frontends.onnx.types import every_node, infer
from finecast.frontends.onnx.writer import apply_edits, phi_mark
from finecast.graph import Node
from finecast.numbers.formats import Format
from finecast.planning.edits import edits
from finecast.rules.policy import conversion_stays

PLAN_KEY = "finecast.plan"


def undo(model: ir.Model, policy: str) -> None:
    """Give ``model`` the formats it had before a conversion to another than ``policy``.

    Law: a model that was never converted, or whose conversion stays, is left as it is.
    """
    was = model.metadata_props.get(POLICY_KEY)
    if was is None or conversion_stays(was, policy):
        return
    take_back_ops(model)
    take_back(model)
    infer(model, shapes=False)
    graph, binding = read(model, own_casts=True)
    formats: dict[int, Format] = {}
    for node in graph.float_nodes:
        was = _mark_of(node, binding)
        if was is not None:
            # An inserted cast has an empty mark. Casts from fp32 to fp32 are then dropped.
            formats[node.id] = Format.parse(was) if was else Format.FP32
    apply_edits(graph, binding, edits(graph, formats))
    take_back_constants(model)
    for node in every_node(model.graph):
        for key in [k for k in node.metadata_props if k.startswith(MARK)]:
            del node.metadata_props[key]
    for key in (PLAN_KEY, POLICY_KEY):
        model.metadata_props.pop(key, None)


def _mark_of(node: Node, binding: OnnxBinding) -> str | None:
    native = binding.nodes[node.id]
    if native is not None:
        return native.metadata_props.get(MARK)
    return binding.owners[node.id].metadata_props.get(phi_mark(node))


def take_back(model: ir.Model) -> None:
    """Remove marked roundings and multiplications that an earlier conversion inserted.

    Their readers read the value before them again, or the numbers that a constant's codes
    stand for. Nodes stay where another tool changed them or reads a value between them.
    """
    roundings: dict[str, list[ir.Node]] = {}
    for node in every_node(model.graph):
        label = node.metadata_props.get(ROUNDING)
        if label is not None:
            roundings.setdefault(label, []).append(node)
    scales = [[n] for n in every_node(model.graph) if SCALES in n.metadata_props]
    for nodes in (*roundings.values(), *scales):
        _take_out(nodes)


def _take_out(nodes: Sequence[ir.Node]) -> None:
    """Remove the nodes of one rounding, in order, and constants that only they read."""
    if not (nodes[0].inputs and nodes[-1].outputs):
        return
    graph, source, result = nodes[0].graph, nodes[0].inputs[0], nodes[-1].outputs[0]
    steps = [v for n in nodes for v in n.outputs]
    read = dict.fromkeys(v for n in nodes for v in n.inputs if v is not None)
    scalars = [v for v in read if v is not source and v not in steps]
    inner = [u.node for v in steps if v is not result for u in v.uses()]
    whole = (
        graph is not None
        and all(n.graph is graph for n in nodes)
        and all(n in nodes for n in inner)
        and not any(v.is_graph_output() for v in steps)
        and all(constant_tensor(v) is not None for v in scalars)
    )
    if not whole or graph is None or source is None:
        return
    kept = _original(nodes, source)
    if kept is None:
        return
    if kept is not source:
        graph.register_initializer(kept)
        scalars.append(source)
    result.replace_all_uses_with(kept)
    graph.remove(nodes, safe=True)
    for value in scalars:
        home = value.graph
        if value.uses() or value.is_graph_output() or not isinstance(home, ir.Graph):
            continue
        if value.is_initializer():
            home.initializers.pop(value.name or "")
            if value in home.inputs:
                home.inputs.remove(value)


def _original(nodes: Sequence[ir.Node], source: ir.Value) -> ir.Value | None:
    """What readers of a rounding read again: ``source``, or the numbers of constant codes.

    None if ``source`` is constant codes, and the ``nodes`` do not state their encoding.
    """
    tensor = constant_tensor(source)
    if tensor is None or tensor.dtype == ir.DataType.FLOAT:
        return source
    label = nodes[0].metadata_props[ROUNDING].partition(" ")[0]
    read = next((row.read for f, row in STATEMENTS.items() if f.label == label), None)
    if read is None:
        return None
    try:
        encoding = read(nodes)
        encoding.along(tuple(tensor.shape.numpy()))
    except ValueError:
        return None
    name = nodes[-1].outputs[0].name or ""
    return ir.val(name, const_value=DecodedTensor(tensor, encoding, name))
