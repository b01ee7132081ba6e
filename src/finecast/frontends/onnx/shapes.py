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


def _sizes(kind: onnx.TypeProto.Tensor) -> tuple[int, ...] | None:
    if not kind.HasField("shape") or not all(d.HasField("dim_value") for d in kind.shape.dim):
        return None
    return tuple(d.dim_value for d in kind.shape.dim)
