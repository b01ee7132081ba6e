"""Models without their weights, for onnx's C++ passes, which take messages below 2 GiB."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import onnx
import onnx_ir as ir

from finecast.frontends.onnx.constants import shape_of

# onnx's passes read small constants (axes, scales, shapes); larger ones are left out.
KEEP_BELOW_BYTES: Final = 1024


def run_without_weights(
    model: ir.Model, function: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> onnx.ModelProto:
    """Apply ``function`` to ``model`` as a message whose large initializers are plain inputs.

    ``model`` is unchanged when this returns.
    """
    return function(_serialized(model, large_tensors(model)))


def message_without_weights(message: onnx.ModelProto) -> onnx.ModelProto:
    """``message`` as ``run_without_weights`` would pass the model that was read from it.

    Copying parts of a message takes a twentieth of the time of serializing the model.
    """
    graph, light = message.graph, onnx.ModelProto(ir_version=message.ir_version)
    light.opset_import.extend(message.opset_import)
    light.functions.extend(message.functions)
    copy = light.graph
    copy.name = graph.name
    for field in ("node", "input", "output", "value_info", "sparse_initializer"):
        getattr(copy, field).extend(getattr(graph, field))
    inputs = {v.name for v in graph.input}
    for tensor in graph.initializer:
        if size_bytes(tensor) <= KEEP_BELOW_BYTES:
            copy.initializer.append(tensor)
        elif tensor.name not in inputs:
            copy.input.append(
                onnx.helper.make_tensor_value_info(
                    tensor.name, tensor.data_type, list(tensor.dims)
                )
            )
    return light


def size_bytes(tensor: onnx.TensorProto) -> int:
    """Bytes of the tensor's elements as raw data; 0 for strings, which have no such form."""
    if tensor.data_type == ir.DataType.STRING:
        return 0
    return math.ceil(math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth / 8)


def large_tensors(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """Initializers of the main graph that are left out of such messages, by name."""
    return {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and value.const_value.nbytes > KEEP_BELOW_BYTES
    }


def _serialized(model: ir.Model, tensors: Mapping[str, ir.TensorProtocol]) -> onnx.ModelProto:
    graph = model.graph
    values = [graph.initializers[name] for name in tensors]
    inputs, initializers = list(graph.inputs), list(graph.initializers.items())
    given = set(inputs)
    for value in values:
        tensor = tensors[value.name or ""]
        value.shape = value.shape or shape_of(tensor)
        value.type = value.type or ir.TensorType(tensor.dtype)
        graph.initializers.pop(value.name or "")
        if value not in given:
            graph.inputs.append(value)
    try:
        return ir.to_proto(model)
    finally:
        graph.inputs.clear()
        graph.inputs.extend(inputs)
        for name, value in initializers:  # all of them, to restore their order
            graph.initializers.pop(name, None)
            graph.initializers[name] = value


def restored(proto: onnx.ModelProto, original: ir.Model) -> ir.Model:
    """The model of ``proto``, with the weights and metadata of ``original`` put back."""
    tensors = large_tensors(original)
    model = ir.from_proto(proto)
    graph = model.graph
    was_input = {v.name for v in original.graph.inputs}
    kept: list[ir.Value] = []
    weights: list[ir.Value] = []
    for value in graph.inputs:
        if value.name in tensors:
            value.const_value = tensors[value.name]
            weights.append(value)
            if value.name not in was_input:
                continue
        kept.append(value)
    graph.inputs.clear()
    graph.inputs.extend(kept)
    for value in weights:
        graph.register_initializer(value)
    by_name = {n.name: n for n in original.graph.all_nodes()}
    for node in graph.all_nodes():
        twin = by_name.get(node.name)
        if twin is not None and twin.op_type == node.op_type:
            node.metadata_props.update(twin.metadata_props)
            node.doc_string = node.doc_string or twin.doc_string
    model.metadata_props.update(original.metadata_props)
    return model
