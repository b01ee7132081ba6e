"""Taking back an earlier conversion, so that another policy starts from the original.

Marks tell what an edit changed from what the model's author wrote. Digits that constants
lost do not come back: an fp16 weight becomes the fp32 number that it is.
"""

from __future__ import annotations

import onnx_ir as ir

from finecast.frontends.onnx.arithmetic import take_back
from finecast.frontends.onnx.constants import MARK
from finecast.frontends.onnx.reader import Binding, read
from finecast.frontends.onnx.types import every_node, infer
from finecast.frontends.onnx.writer import apply_edits, phi_mark
from finecast.graph import Node
from finecast.numbers.formats import Format
from finecast.planning.edits import edits

PLAN_KEY = "finecast.plan"
POLICY_KEY = "finecast.policy"


def undo(model: ir.Model, policy: str) -> None:
    """Give ``model`` the formats it had before a conversion to another than ``policy``.

    Law: a model that was never converted, or to ``policy`` itself, stays as it is.
    """
    if model.metadata_props.get(POLICY_KEY, policy) == policy:
        return
    take_back(model)
    infer(model, shapes=False)
    graph, binding = read(model, own_casts=True)
    formats: dict[int, Format] = {}
    for node in graph.float_nodes:
        was = _mark_of(node, binding)
        if was is not None:
            # An inserted cast that becomes fp32 to fp32 is dropped by the editor.
            formats[node.id] = Format.parse(was) if was else Format.FP32
    apply_edits(graph, binding, edits(graph, formats))
    for node in every_node(model.graph):
        for key in [k for k in node.metadata_props if k.startswith(MARK)]:
            del node.metadata_props[key]
    for key in (PLAN_KEY, POLICY_KEY):
        model.metadata_props.pop(key, None)


def _mark_of(node: Node, binding: Binding) -> str | None:
    native = binding.nodes[node.id]
    if native is not None:
        return native.metadata_props.get(MARK)
    return binding.owners[node.id].metadata_props.get(phi_mark(node))
