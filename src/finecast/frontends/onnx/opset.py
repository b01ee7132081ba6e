"""Raising a model's opset, only as far as a format needs it."""

from __future__ import annotations

from typing import Final

import onnx
import onnx_ir as ir
from onnx import version_converter

from finecast.errors import ModelError
from finecast.formats import Format
from finecast.frontends.onnx.schema import signature

# onnx's converter parses small constants (axes, scales); larger ones need not travel.
_KEEP_BELOW_BYTES: Final = 1024


def opset_of(model: ir.Model) -> int:
    """Version of the default domain."""
    return model.opset_imports.get("", model.opset_imports.get("ai.onnx", 1))


def needed_opset(model: ir.Model, fmt: Format, ops: frozenset[str] | None = None) -> int:
    """Smallest opset at which every op that can ever take ``fmt`` admits it.

    Args:
        model: The model.
        fmt: The low format.
        ops: Op types that the policy may lower; None for all.
    """
    current = opset_of(model)
    needed = current
    for node in model.graph.all_nodes():
        if node.domain not in ("", "ai.onnx") or (ops is not None and node.op_type not in ops):
            continue
        if not _carries_fp32(node):
            continue
        found = signature(node.op_type, "", current)
        since = dict(found.since).get(fmt) if found else None
        needed = max(needed, since or current)
    return needed


def _carries_fp32(node: ir.Node) -> bool:
    values = (*node.inputs, *node.outputs)
    return any(v is not None and v.dtype in (None, ir.DataType.FLOAT) for v in values)


def raise_opset(model: ir.Model, version: int) -> ir.Model:
    """The same model at opset ``version`` of the default domain, weights shared.

    Local functions are inlined first: the converter would leave their bodies behind.

    Raises:
        ModelError: If onnx has no conversion for one of the ops.
    """
    if version <= opset_of(model):
        return model
    if model.functions:
        from onnx_ir.passes.common import InlinePass

        model = InlinePass()(model.clone()).model
    tensors = {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and value.const_value.nbytes > _KEEP_BELOW_BYTES
    }
    proto = _without_weights(model, tensors)
    try:
        raised = version_converter.convert_version(proto, version)
    except (RuntimeError, onnx.onnx_cpp2py_export.version_converter.ConvertError) as error:
        first = str(error).strip().splitlines()[0][:200]
        raise ModelError(
            f"the model's opset cannot be raised to {version}, which the format needs: {first}",
            fix="export the model at a newer opset, or use fp16",
        ) from error
    return _restored(ir.from_proto(raised), model, tensors, version)


def _without_weights(
    model: ir.Model, tensors: dict[str, ir.TensorProtocol]
) -> onnx.ModelProto:
    """Serialize with large initializers as plain inputs, leaving ``model`` as it was."""
    graph = model.graph
    values = [graph.initializers[name] for name in tensors]
    inputs = list(graph.inputs)
    for value in values:
        tensor = tensors[value.name or ""]
        value.shape = value.shape or ir.Shape(tensor.shape)
        value.type = value.type or ir.TensorType(tensor.dtype)
        graph.initializers.pop(value.name or "")
        if value not in graph.inputs:
            graph.inputs.append(value)
    try:
        return ir.to_proto(model)
    finally:
        graph.inputs.clear()
        graph.inputs.extend(inputs)
        for value in values:
            graph.initializers[value.name or ""] = value


def _restored(
    raised: ir.Model, original: ir.Model, tensors: dict[str, ir.TensorProtocol], version: int
) -> ir.Model:
    """Put back what the converter does not carry: weights, metadata, IR version."""
    graph = raised.graph
    was_input = {v.name for v in original.graph.inputs}
    for value in list(graph.inputs):
        if value.name in tensors:
            value.const_value = tensors[value.name]
            if value.name not in was_input:
                graph.inputs.remove(value)
            graph.register_initializer(value)
    by_name = {n.name: n for n in original.graph.all_nodes()}
    for node in graph.all_nodes():
        twin = by_name.get(node.name)
        if twin is not None and twin.op_type == node.op_type:
            node.metadata_props.update(twin.metadata_props)
            node.doc_string = node.doc_string or twin.doc_string
    raised.metadata_props.update(original.metadata_props)
    raised.ir_version = max(raised.ir_version, onnx.helper.OP_SET_ID_VERSION_MAP["ai.onnx", version])
    return raised
