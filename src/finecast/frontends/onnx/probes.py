"""A small ONNX model that measures what a cast takes."""

from __future__ import annotations

import onnx_ir as ir

from finecast.frontends.onnx.constants import DATA_TYPES
from finecast.frontends.onnx.statements import STATEMENTS, Maker
from finecast.numbers.formats import Format
from finecast.numbers.scaled import Scaled


def cast_model(low: Format, size: int) -> bytes:
    """A serialized model with a cast to ``low`` between Softmaxes, which it is not fused into.

    The input ``x`` is fp32 of shape [size / 64, 64], the output is ``y``. For a format with a
    scale the cast is a node to codes and one back.
    """
    shape = ir.Shape([size // 64, 64])
    x = ir.Value(name="x", shape=shape, type=ir.TensorType(ir.DataType.FLOAT))
    first = ir.node("Softmax", [x], {"axis": 0}, name="before")
    read = first.outputs[0]
    read.name, read.type, read.shape = "a", ir.TensorType(ir.DataType.FLOAT), shape
    constants: list[ir.Value] = []
    casts = _casts(read, low, constants)
    casts[0].name = "cast"
    last = ir.node("Softmax", [casts[-1].outputs[0]], {"axis": 0}, name="after")
    y = last.outputs[0]
    y.name, y.shape, y.type = "y", shape, casts[-1].outputs[0].type
    nodes = [first, *casts, last]
    graph = ir.Graph(
        [x], [y], nodes=nodes, initializers=constants, opset_imports={"": 17}, name="cast"
    )
    return ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()


def _casts(value: ir.Value, low: Format, constants: list[ir.Value]) -> list[ir.Node]:
    maker = Maker(lambda name: name, constants.append)
    if not low.has_scales:
        dtype = DATA_TYPES[low]
        return [maker.node("Cast", [value], {"to": int(dtype)}, label=low.label, dtype=dtype)]
    unit = Scaled.of_value(low, 0.0, 1.0)
    row = STATEMENTS[low]
    nodes = row.into(maker, value, unit)
    return nodes + row.back(maker, nodes[-1].outputs[0], unit)
