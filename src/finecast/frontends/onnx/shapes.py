"""Shapes of a model's values for inputs of known shapes, without running it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

import onnx
import onnx_ir as ir

from finecast.errors import ModelError
from finecast.frontends.onnx import native
from finecast.frontends.onnx.skeleton import run_without_weights
from finecast.frontends.onnx.types import inferred

_LOG: Final = logging.getLogger(__name__)


def static_shapes(
    model: ir.Model, inputs: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    """Shapes of values outside of bodies, by name, where onnx's inference knows all sizes.

    Args:
        model: The model, which is not changed.
        inputs: Shapes of its inputs by name.
    """

    def with_inputs(proto: onnx.ModelProto) -> onnx.ModelProto:
        graph = proto.graph
        for port in graph.input:
            if port.name in inputs:
                dims = [
                    onnx.TensorShapeProto.Dimension(dim_value=d) for d in inputs[port.name]
                ]
                port.type.tensor_type.shape.CopyFrom(onnx.TensorShapeProto(dim=dims))
        graph.ClearField("value_info")  # the stated shapes have symbolic dimensions
        for port in graph.output:
            port.type.tensor_type.ClearField("shape")
        return inferred(proto)

    try:
        graph = run_without_weights(model, with_inputs).graph
    except (native.PassError, ValueError, ModelError) as error:
        _LOG.debug("onnx infers no shapes: %s", error)
        return {}
    found = {v.name: _sizes(v.type.tensor_type) for v in (*graph.value_info, *graph.output)}
    return {name: sizes for name, sizes in found.items() if sizes is not None}


def correct_outputs(model: ir.Model) -> tuple[str, ...]:
    """Give outputs whose declared number of axes is wrong their right one, in place.

    onnx can find this out of a converted model alone: more is inferred of newer opsets.

    Returns:
        What was wrong, for people.
    """

    def undeclared(proto: onnx.ModelProto) -> onnx.ModelProto:
        made = {name for node in proto.graph.node for name in node.output}
        for value in (*proto.graph.output, *proto.graph.value_info):
            if value.name in made:
                value.type.tensor_type.ClearField("shape")
        return inferred(proto)

    try:
        graph = run_without_weights(model, undeclared).graph
    except (native.PassError, ValueError) as error:
        _LOG.debug("onnx infers no shapes: %s", error)
        return ()
    kinds = {v.name: v.type.tensor_type for v in (*graph.value_info, *graph.output)}
    found: list[str] = []
    for value in (v for node in model.graph for v in node.outputs):  # casts of outputs, too
        kind = kinds.get(value.name or "")
        if kind is None or not kind.HasField("shape") or value.shape is None:
            continue
        declared, axes = len(value.shape), len(kind.shape.dim)
        if declared == axes:
            continue
        value.shape = ir.Shape([d.dim_value or None for d in kind.shape.dim])
        if value.is_graph_output():
            text = f"output {value.name!r} is declared with {declared} axes and has {axes}"
            found.append(f"{text}: the declaration is corrected")
    return tuple(found)


def _sizes(kind: onnx.TypeProto.Tensor) -> tuple[int, ...] | None:
    if not kind.HasField("shape") or not all(d.HasField("dim_value") for d in kind.shape.dim):
        return None
    sizes = tuple(d.dim_value for d in kind.shape.dim)
    return sizes if min(sizes, default=0) >= 0 else None  # inputs too small for a window
