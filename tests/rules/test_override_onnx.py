"""Overrides hold for ONNX models, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

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
    assert converted("after.onnx") == {"product": "bf16", "sum": "bf16"}


def high(args: Any, ret: Any, amp: Any) -> list[str | None]:
    del args, ret, amp
    return ["float32", "float32", None]


def test_raf_s_bias_add_is_each_addition_of_a_bias_to_a_product(tmp_path: Path) -> None:
    pytest.importorskip("finecast_raf")
    """No residual, scalar or vector along another axis is a bias, nor is that of a sum."""
    rng = np.random.default_rng(0)
    sizes = {"w": (4, 4), "k": (4, 4, 1, 1), "b": (4,), "c": (1, 4, 1, 1), "one": (1,)}
    constants = [
        numpy_helper.from_array(rng.normal(size=size).astype(np.float32), name)
        for name, size in sizes.items()
    ]
    constants.append(numpy_helper.from_array(np.array([2, 2, 4]), "by_row"))
    steps = [
        ("MatMul", "x w", "m"),
        ("Add", "m b", "bias"),
        ("Add", "bias x", "residual"),
        ("Add", "residual b", "shift"),
        ("MatMul", "shift w", "m2"),
        ("Add", "m2 one", "scalar"),
        ("MatMul", "scalar w", "m3"),
        ("Reshape", "m3 by_row", "rows"),
        ("Add", "b rows", "reshaped_bias"),
        ("Conv", "picture k", "conv"),
        ("Add", "conv c", "channel_bias"),
        ("Conv", "channel_bias k", "conv2"),
        ("Add", "conv2 b", "column"),  # along the last axis: positions, not channels
    ]
    shapes = {"x": [4, 4], "picture": [1, 4, 4, 4], "reshaped_bias": None, "column": None}
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    ]
    graph = helper.make_graph(
        [helper.make_node(op, read.split(), [out], name=out) for op, read, out in steps],
        "g",
        ports[:2],
        ports[2:],
        constants,
    )
    opset = helper.make_opsetid("", 17)
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path)
    with override({"raf.op.bias_add": high}):
        plan = finecast.convert(path, tmp_path / "low.onnx", "all:bf16").plan
    kept = {d.node for d in plan.decisions if d.format.label == "fp32"}
    assert kept == {"bias", "reshaped_bias", "channel_bias"}


def test_raf_s_bias_add_matches_nothing_in_a_model_without_biases(model: Path) -> None:
    pytest.importorskip("finecast_raf")
    with override({"raf.op.bias_add": high}), pytest.raises(UsageError, match="bias_add"):
        finecast.convert(model, model.with_name("low.onnx"), "all:bf16")


def test_an_override_of_what_the_model_does_not_have_is_an_error(model: Path) -> None:
    with (
        override({"onnx::MatMull": keep}),
        pytest.raises(UsageError, match=r"does not match any op.*did you mean MatMul"),
    ):
        finecast.convert(model, model.with_name("low.onnx"), "all:bf16")
    assert not model.with_name("low.onnx").exists()
