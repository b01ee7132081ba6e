"""What is advised where ONNX Runtime has no kernel for a model that OpenVINO runs works."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import finecast
from finecast.errors import EngineError

X = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A product by weights of float4 with a scale a column."""
    levels = np.random.default_rng(1).choice([-6.0, -1.5, 0.0, 0.5, 4.0], 32 * 32)
    weights = helper.make_tensor("w", TensorProto.FLOAT4E2M1, [32, 32], levels)
    scales = onnx.numpy_helper.from_array(np.linspace(0.01, 0.1, 32, dtype=np.float32), "s")
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"], name="decode", axis=1),
        helper.make_node("MatMul", ["x", "d"], ["y"], name="product"),
    ]
    ports = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 32]) for n in ("x", "y")
    ]
    graph = helper.make_graph(nodes, "net", ports[:1], ports[1:], [weights, scales])
    opset = [helper.make_opsetid("", 23)]
    proto = helper.make_model(graph, opset_imports=opset, ir_version=11)
    onnx.save(proto, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.mark.parametrize("data", [None, {"x": X}])
def test_float4_weights_are_to_be_written_as_ir(
    model: Path, tmp_path: Path, data: dict[str, np.ndarray] | None
) -> None:
    with pytest.raises(EngineError, match=r"no kernel for Dequ.*name the output NAME\.xml"):
        finecast.convert(model, tmp_path / "low.onnx", policy="all:bf16", data=data)
    done = finecast.convert(model, tmp_path / "low.xml", policy="all:bf16", data=data)
    assert done.verified.relative_error is not None
    assert done.verified.relative_error < 0.02  # a few roundings to bf16, of 2**-9 each
