from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from finecast.engines import get_engine, installed
from finecast.engines.openvino_text import explain

pytestmark = pytest.mark.skipif(not installed("openvino"), reason="openvino is not installed")


def gelu_block() -> bytes:
    """MatMul, Add, GELU written out, a convolution with bias and clip: all get fused."""
    rng = np.random.default_rng(0)

    def constant(name: str, *shape: int) -> TensorProto:
        return numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)

    def scalar(name: str, value: float) -> TensorProto:
        return numpy_helper.from_array(np.array(value, np.float32), name)

    nodes = [
        helper.make_node(
            "Conv", ["x", "k", "kb"], ["c"], name="stem, with comma", pads=[1] * 4
        ),
        helper.make_node("Relu", ["c"], ["r"], name="stem/relu"),
        helper.make_node("Flatten", ["r"], ["f"], name="flatten"),
        helper.make_node("MatMul", ["f", "w"], ["m"], name="dense/MatMul"),
        helper.make_node("Add", ["m", "b"], ["s"], name="dense/Add"),
        helper.make_node("Div", ["s", "root2"], ["g1"], name="gelu/Div"),
        helper.make_node("Erf", ["g1"], ["g2"], name="gelu/Erf"),
        helper.make_node("Add", ["g2", "one"], ["g3"], name="gelu/Add"),
        helper.make_node("Mul", ["s", "g3"], ["g4"], name="gelu/Mul"),
        helper.make_node("Mul", ["g4", "half"], ["y"], name="gelu/Mul_1"),
    ]
    initializers = [
        constant("k", 8, 3, 3, 3),
        constant("kb", 8),
        constant("w", 8 * 16 * 16, 64),
        constant("b", 64),
        scalar("root2", 2**0.5),
        scalar("one", 1),
        scalar("half", 0.5),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 16, 16])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 64])
    graph = helper.make_graph(nodes, "g", [x], [y], initializers)
    net = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    return net.SerializeToString()


def test_fused_kernels_name_all_their_nodes() -> None:
    session = get_engine("openvino").load(gelu_block(), profiling=True)
    kernels = session.profile({"x": np.ones((8, 3, 16, 16), np.float32)}, repeats=3)
    homes = {op: k for k in kernels for op in k.ops}
    assert homes["stem, with comma"] is homes["stem/relu"]
    assert homes["dense/MatMul"] is homes["dense/Add"]
    assert homes["gelu/Erf"] is homes["gelu/Mul_1"]
    work = [k for k in kernels if not k.kind.startswith("Reorder")]
    named = sum(k.time_s for k in work if k.ops)
    assert named >= 0.95 * sum(k.time_s for k in work)


def test_kernels_that_the_engine_added_have_no_nodes() -> None:
    session = get_engine("openvino").load(gelu_block(), profiling=True)
    kernels = session.profile({"x": np.ones((8, 3, 16, 16), np.float32)}, repeats=3)
    assert all(not k.ops for k in kernels if k.kind.startswith("Reorder"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            (
                "Exception from src/inference/src/cpp/core.cpp:105:\nCheck 'false' failed at "
                "src/x.cpp:1:\nFrontEnd API failed with OpConversionFailure:\n"
                "No conversion rule found for operations: my.Foo, my.Bar\n"
            ),
            "no kernel for my.Foo, my.Bar",
        ),
        (
            (
                "Exception from src/infer_request.cpp:224:\nException from src/node.cpp:794:\n"
                "[CPU] MatMul node with name 'y' "
                "Check 'k_lhs == k_rhs' failed at src/m.cpp:45:\n"
                "Matmul input shapes are incompatible\n\n"
            ),
            "Matmul input shapes are incompatible at MatMul 'y'",
        ),
        (
            (
                "Check 'false' failed at src/unconverted_ops_report.cpp:151:\n"
                "FrontEnd API failed with OpConversionFailure:\n"
                "Model wasn't fully converted. Failed operations detailed log:\n"
                "-- Conv-15 with a message:\n"
                "While validating ONNX node '<Node(Conv): /a/C>': "
                "Check 'x' failed at a.cpp:38:\n"
                "FrontEnd API failed with GeneralFailure:\nThe rank has to be known\n\n"
                "-- ReduceMean-15 with a message:\nUnsupported input type dynamic\n\n"
                "Summary:\n-- Conversion is failed for: Conv-15, ReduceMean-15\n"
            ),
            "The rank has to be known at Conv '/a/C'",
        ),
        ("", "RuntimeError"),
    ],
)
def test_reasons_are_one_line(text: str, expected: str) -> None:
    assert explain(RuntimeError(text)) == expected
