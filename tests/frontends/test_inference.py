"""Types and shapes are the same, whether onnx reads the file's message or the model anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from finecast import api
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import types
from finecast.rules.policy import Policy, Scope

NOTHING = Policy(scope=Scope.NONE)


def model(
    nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], ir_version: int = 8
) -> onnx.ModelProto:
    ports = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
        for n, s in (("x", ["N", 32]), ("y", None))
    ]
    if ir_version < 4:
        declared = [
            helper.make_tensor_value_info(w.name, w.data_type, list(w.dims)) for w in weights
        ]
    else:
        declared = []
    graph = helper.make_graph(nodes, "g", [ports[0], *declared], ports[1:], weights)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir_version)


def large(name: str = "w") -> onnx.TensorProto:
    return numpy_helper.from_array(np.eye(32, dtype=np.float32), name)


def plain() -> onnx.ModelProto:
    sizes = numpy_helper.from_array(np.array([-1, 4, 8], np.int64), "sizes")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Reshape", ["h", "sizes"], ["y"]),
    ]
    return model(nodes, [large(), sizes])


def old() -> onnx.ModelProto:
    return model([helper.make_node("MatMul", ["x", "w"], ["y"])], [large()], ir_version=3)


def contributed() -> onnx.ModelProto:
    """onnx knows no op of com.microsoft; the definitions type what it gives."""
    nodes = [
        helper.make_node("FastGelu", ["x"], ["h"], domain="com.microsoft"),
        helper.make_node("MatMul", ["h", "w"], ["m"]),
        helper.make_node("Relu", ["m"], ["y"]),
    ]
    return model(nodes, [large()])


def branching() -> onnx.ModelProto:
    def body(op: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
        nodes = [
            helper.make_node(op, ["x"], ["inner"]),
            helper.make_node("MatMul", ["inner", "w"], ["out"]),
        ]
        return helper.make_graph(nodes, op, [], [out])

    yes = numpy_helper.from_array(np.array(True), "yes")
    choice = helper.make_node(
        "If", ["yes"], ["y"], then_branch=body("Relu"), else_branch=body("Sigmoid")
    )
    return model([choice], [large(), yes])


@pytest.mark.parametrize("make", [plain, old, contributed, branching])
def test_the_message_tells_what_the_model_does(
    make: Callable[[], onnx.ModelProto], tmp_path: Path
) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(make(), path)
    file = frontend.load(path)
    assert file.message is not None
    values = frontend.prepare(file, NOTHING).graph.values
    anew = frontend.prepare(replace(file, message=None), NOTHING).graph.values
    assert [(v.name, v.dtype, v.shape) for v in values] == [
        (v.name, v.dtype, v.shape) for v in anew
    ]
    assert all(v.dtype != "unknown" for v in values)


def test_a_model_as_it_was_read_is_not_written_for_onnx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(plain(), path)
    monkeypatch.delattr(types, "without_weights")
    shapes = {
        v.name: v.shape for v in frontend.prepare(frontend.load(path), NOTHING).graph.values
    }
    assert shapes["h"] == ("N", 32)


def test_nodes_out_of_order_are_written_anew(tmp_path: Path) -> None:
    proto = plain()
    first = onnx.NodeProto()
    first.CopyFrom(proto.graph.node[0])
    del proto.graph.node[0]
    proto.graph.node.append(first)
    path = tmp_path / "net.onnx"
    onnx.save(proto, path)
    file = frontend.load(path)
    assert file.message is None
    shapes = {v.name: v.shape for v in frontend.prepare(file, NOTHING).graph.values}
    assert shapes["h"] == ("N", 32)


def test_inspecting_leaves_a_loaded_model_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(plain(), path)
    file = api.load(path)
    api.inspect(file)
    assert [n.name for n in file.model.graph] == ["", ""]
    assert all(v.shape is None for n in file.model.graph for v in n.outputs)
