"""Ops on codes, written as float ops between codes, give the same outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import parser

from finecast.frontends.onnx.qlinear import write_out_codes

HEAD = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>'
STEP = 0.11
OPS = {
    "QLinearConv": (
        "Conv",
        "uint8[1,2,4,4] x, int8[3,2,3,3] w, int32[3] b",
        "QLinearConv<pads = [1,1,1,1]>(x, s, z, w, ws, wz, t, z, b)",
    ),
    "QLinearMatMul": (
        "MatMul",
        "uint8[4,2] x, int8[2,3] w",
        "QLinearMatMul(x, s, z, w, ws, wz, t, z)",
    ),
    "QGemm": (
        "Gemm",
        "uint8[4,2] x, int8[3,2] w, int32[3] b",
        "com.microsoft.QGemm<transB = 1>(x, s, z, w, ws, wz, b, t, z)",
    ),
    "QLinearAdd": (
        "Add",
        "uint8[4,2] x, uint8[4,2] w",
        "com.microsoft.QLinearAdd(x, s, z, w, s, z, t, z)",
    ),
    "QLinearGlobalAveragePool": (
        "GlobalAveragePool",
        "uint8[1,2,4,4] x",
        "com.microsoft.QLinearGlobalAveragePool(x, s, z, t, z)",
    ),
}


def model(op: str) -> onnx.ModelProto:
    """A model of one op on codes; weights have a scale for each channel of the result."""
    rng = np.random.default_rng(0)
    _, ports, call = OPS[op]
    codes = parser.parse_model(
        f"{HEAD}\nnet ({ports}) => (float y) <float s = {{0.021}}, uint8 z = {{3}},"
        f" float t = {{{STEP}}}> {{\n [op_quant] y_quantized = {call}\n"
        " y = DequantizeLinear(y_quantized, t, z)\n}"
    )
    graph = codes.graph
    given: dict[str, Any] = {
        "ws": np.array([0.03, 0.02, 0.05], np.float32),
        "wz": np.zeros(3, np.int8),
    }
    for port in list(graph.input)[1:]:
        kind = port.type.tensor_type
        shape = [d.dim_value for d in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        given[port.name] = rng.integers(0, 100, size=shape).astype(dtype)
        graph.input.remove(port)
    graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in given.items())
    return codes


def run(proto: onnx.ModelProto) -> Any:
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    shape = [d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(1).integers(0, 255, size=shape).astype(np.uint8)
    session = runtime.InferenceSession(proto.SerializeToString(), options)
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("op", OPS)
def test_outputs_stay_but_for_numbers_in_the_middle_of_two_codes(op: str) -> None:
    proto = model(op)
    written = ir.from_proto(proto)
    write_out_codes(written)
    by_kind = {node.op_type: node for node in written.graph}
    assert op not in by_kind
    assert by_kind[OPS[op][0]].name == "op"
    right = run(proto)
    assert np.unique(right).size > 1
    difference = np.abs(run(ir.to_proto(written)) - right)
    assert difference.max() <= 1.01 * STEP
    assert (difference > STEP / 2).mean() < 0.1


def test_codes_of_computed_scales_stay() -> None:
    proto = model("QLinearMatMul")
    graph = proto.graph
    graph.initializer.remove(next(one for one in graph.initializer if one.name == "ws"))
    graph.input.append(onnx.helper.make_tensor_value_info("ws", onnx.TensorProto.FLOAT, [3]))
    written = ir.from_proto(proto)
    write_out_codes(written)
    assert "QLinearMatMul" in [node.op_type for node in written.graph]
