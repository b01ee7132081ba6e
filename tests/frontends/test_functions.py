"""Local functions are inlined by onnx, whose inliner converts bodies of another opset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import InlinePass

import finecast
from finecast.frontends.onnx.functions import inline_functions


def calling(opset: int, body: onnx.NodeProto, *calls: tuple[str, str]) -> onnx.ModelProto:
    """A model of opset 18, from ``x`` to ``y``, that calls a function of another opset."""
    imports = [helper.make_opsetid("", opset)]
    function = helper.make_function("local", "f", ["a"], ["b"], [body], imports)
    nodes = [
        helper.make_node("f", [read], [made], domain="local", name=f"call_{made}")
        for read, made in calls
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [x], [y])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, functions=[function], opset_imports=imports, ir_version=9)


def reduction_of_opset_12() -> onnx.ModelProto:
    """A ReduceSum whose axes are an attribute, as they were before opset 13."""
    body = helper.make_node("ReduceSum", ["a"], ["b"], name="total", axes=[1], keepdims=1)
    return calling(12, body, ("x", "y"))


def test_body_of_another_opset_is_converted() -> None:
    done = ir.to_proto(inline_functions(ir.from_proto(reduction_of_opset_12())))
    assert [len(n.input) for n in done.graph.node if n.op_type == "ReduceSum"] == [2]
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    (got,) = ReferenceEvaluator(done).run(None, {"x": x})
    np.testing.assert_array_equal(np.asarray(got), x.sum(1, keepdims=True))


def test_pass_of_onnx_ir_refuses_other_opsets() -> None:
    """Once onnx_ir converts opsets, its InlinePass can replace onnx's inliner."""
    with pytest.raises(Exception, match="Opset mismatch"):
        InlinePass()(ir.from_proto(reduction_of_opset_12()))


def test_names_of_inlined_nodes_have_the_number_of_the_call() -> None:
    """Plans name nodes: one that was saved has to fit the model when it is read again."""
    body = helper.make_node("Relu", ["a"], ["b"], name="relu")
    model = ir.from_proto(calling(18, body, ("x", "once"), ("once", "y")))
    assert [n.name for n in inline_functions(model).graph] == ["relu__1", "relu__2"]


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
@pytest.mark.parametrize("apart", [False, True], ids=["one file", "external data"])
def test_openvino_reads_them_inlined(tmp_path: Path, suffix: str, apart: bool) -> None:
    """OpenVINO has no rule for a function: bf16 was not to be had, nor IR."""
    openvino = pytest.importorskip("openvino")
    layer = helper.make_node("MatMul", ["a", "w"], ["b"], name="product")
    model = calling(18, layer, ("x", "once"), ("once", "y"))
    for node in model.graph.node:
        node.input.append("w")
    model.functions[0].input.append("w")
    weight = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    given, low = tmp_path / "given.onnx", tmp_path / f"low{suffix}"
    onnx.save(model, given, save_as_external_data=apart, location="w.data", size_threshold=0)
    with pytest.raises(RuntimeError, match="No conversion rule found"):
        openvino.Core().read_model(given)
    done = finecast.convert(given, low, "all:bf16", engine="openvino")
    assert done.verified is not None
    assert (done.verified.engine or "").startswith("openvino")
    assert 0 < (done.verified.relative_error or 0) < 0.02
    x = np.ones((2, 3), np.float32)
    compiled = openvino.Core().compile_model(low, "CPU")
    assert np.allclose(compiled([x])[0], x @ weight @ weight, atol=0.1)
