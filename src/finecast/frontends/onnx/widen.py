"""Converts a model with low types of its own to fp32, and notes which values were low.

ONNX Runtime's CPU provider cannot run most ops in bf16 or fp8. The emulator runs them in fp32
and rounds the values that were stored low.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from finecast.frontends.onnx.constants import DATA_TYPES
from finecast.numbers.formats import Format

STORED_KEY: Final = "finecast.stored"
"""Metadata of a value: the low format that it was stored in."""

_LOW: Final = {t: f for f, t in DATA_TYPES.items() if f is not Format.FP32}
_FLOAT: Final = ir.DataType.FLOAT


def widen(model: ir.Model) -> ir.Model:
    """A copy with all low floats in fp32; ``model`` itself if it has none.

    Law: if the copy's values with ``STORED_KEY`` are rounded to that format, the copy computes
    what ``model`` computes. Its inputs and outputs are fp32.
    """
    if not any(_low(v) for v in every_value(model)):
        return model
    copy = model.clone()
    for value in list(every_value(copy)):
        fmt = _low(value)
        if fmt is None:
            continue
        value.type = ir.TensorType(_FLOAT)
        if value.const_value is not None:
            value.const_value = _float(value.const_value)
        else:
            value.metadata_props[STORED_KEY] = fmt.label
    for node in copy.graph.all_nodes():
        for name, attribute in list(node.attributes.items()):
            if attribute.type is ir.AttributeType.TENSOR and attribute.value.dtype in _LOW:
                node.attributes[name] = ir.AttrTensor(name, _float(attribute.value))
            elif name == "to" and attribute.as_int() in _LOW:
                node.attributes[name] = ir.AttrInt64(name, int(_FLOAT))
    return copy


def stored_format(value: ir.Value) -> Format | None:
    """The format that ``widen`` noted for the value."""
    label = value.metadata_props.get(STORED_KEY)
    return None if label is None else Format.parse(label)


def _low(value: ir.Value) -> Format | None:
    return _LOW.get(value.dtype) if value.dtype is not None else None


def every_value(model: ir.Model) -> list[ir.Value]:
    """All values of the model and its bodies: inputs, initializers and results."""
    found: dict[int, ir.Value] = {}
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in (*graph.inputs, *graph.initializers.values()):
            found[id(value)] = value
        for node in graph:
            for value in node.outputs:
                found[id(value)] = value
    return list(found.values())


def _float(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name)
