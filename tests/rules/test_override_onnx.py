"""Overrides hold for ONNX models, too."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import finecast
from finecast.errors import UsageError
from finecast.rules import NodeView, override


@pytest.fixture
def model(tmp_path: Path) -> Path:
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 4]) for n in "xwy"]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["m"], name="product"),
            helper.make_node("Add", ["m", "x"], ["y"], name="sum"),
        ],
        "g",
        ports[:2],
        ports[2:],
    )
    opset = helper.make_opsetid("", 17)
    onnx.save(
        helper.make_model(graph, opset_imports=[opset], ir_version=8), tmp_path / "model.onnx"
    )
    return tmp_path / "model.onnx"


def keep(node: NodeView) -> str:
    del node
    return "fp32"


def test_convert_honours_overrides(model: Path) -> None:
    def converted(name: str) -> dict[str, str]:
        plan = finecast.convert(model, model.with_name(name), "all:bf16").plan
        return {d.node: d.format.label for d in plan.decisions}

    assert converted("plain.onnx") == {"product": "bf16", "sum": "bf16"}
    with override({"Add": keep}):
        assert converted("kept.onnx") == {"product": "bf16", "sum": "fp32"}
    with override({"raf.op.bias_add": lambda args, ret, amp: ["float32", "float32", None]}):
        assert converted("raf.onnx") == {"product": "bf16", "sum": "fp32"}
    assert converted("after.onnx") == {"product": "bf16", "sum": "bf16"}


def test_an_override_of_what_the_model_does_not_have_is_an_error(model: Path) -> None:
    with (
        override({"onnx::MatMull": keep}),
        pytest.raises(UsageError, match=r"does not match any op.*did you mean MatMul"),
    ):
        finecast.convert(model, model.with_name("low.onnx"), "all:bf16")
    assert not model.with_name("low.onnx").exists()
