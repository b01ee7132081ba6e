"""Small ONNX models that measurements run."""

from __future__ import annotations

import onnx_ir as ir

from finecast.frontends.onnx.reader import DATA_TYPES
from finecast.numbers.formats import Format


def cast_model(low: Format, size: int) -> bytes:
    """X -> Softmax -> Cast to ``low`` -> Softmax -> y: a cast that nothing absorbs.

    ``x`` is fp32 of shape [size / 64, 64].
    """
    shape = ir.Shape([size // 64, 64])
    x = ir.Value(name="x", shape=shape, type=ir.TensorType(ir.DataType.FLOAT))
    first = ir.node("Softmax", [x], {"axis": 0}, name="before")
    cast = ir.node("Cast", [first.outputs[0]], {"to": int(DATA_TYPES[low])}, name="cast")
    last = ir.node("Softmax", [cast.outputs[0]], {"axis": 0}, name="after")
    y = last.outputs[0]
    for value, name in ((first.outputs[0], "a"), (cast.outputs[0], "b"), (y, "y")):
        value.name = name
    y.shape, y.type = shape, ir.TensorType(DATA_TYPES[low])
    graph = ir.Graph([x], [y], nodes=[first, cast, last], opset_imports={"": 17}, name="cast")
    return ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
