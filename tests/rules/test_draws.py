"""Outputs that depend on no input: a model that has only such outputs is refused."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import finecast
from finecast.errors import ModelError
from finecast.native.opening import opened
from finecast.rules.draws import constant_outputs


def _model(nodes: list[onnx.NodeProto], outputs: str, inputs: str = "x") -> onnx.ModelProto:
    """Nodes over the input ``x`` and the constant ``c``, both of four floats."""
    fed, given = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in names]
        for names in (inputs, outputs)
    )
    constant = helper.make_tensor("c", TensorProto.FLOAT, [4], [1.0, 2.0, 3.0, 4.0])
    graph = helper.make_graph(nodes, "g", fed, given, [constant])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


OF_X = helper.make_node("Relu", ["x"], ["y"])
OF_C = helper.make_node("Exp", ["c"], ["z"])
DRAWN = helper.make_node("RandomNormalLike", ["c"], ["z"])


def test_no_output_depends_on_an_input(tmp_path: Path) -> None:
    model = _model([OF_C], "z")
    with pytest.raises(ModelError, match=r"'z' depends on no input.*see whether it lost ops"):
        finecast.convert(model, tmp_path / "low.onnx", "all:bf16")
    assert not list(tmp_path.iterdir())


def test_of_several_outputs_the_constant_one_is_named() -> None:
    done = finecast.convert(_model([OF_X, OF_C], "yz"), None, "all:bf16")
    assert "'z': the same numbers whatever is fed in" in done.warnings


@pytest.mark.parametrize(
    ("nodes", "inputs"),
    [([DRAWN], "x"), ([OF_C], ""), ([helper.make_node("Add", ["x", "c"], ["z"])], "x")],
)
def test_draws_and_models_without_inputs_are_not_refused(
    nodes: list[onnx.NodeProto], inputs: str
) -> None:
    assert finecast.convert(_model(nodes, "z", inputs), None, "all:bf16").model is not None


def test_control_flow_depends_on_its_condition() -> None:
    branches = [
        helper.make_graph(
            [helper.make_node("Constant", [], ["v"], value_floats=[number] * 4)],
            "branch",
            [],
            [helper.make_tensor_value_info("v", TensorProto.FLOAT, [4])],
        )
        for number in (1.0, 2.0)
    ]
    condition = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Cast", ["sum"], ["which"], to=TensorProto.BOOL),
        helper.make_node(
            "If", ["which"], ["z"], then_branch=branches[0], else_branch=branches[1]
        ),
    ]
    graph = opened(_model(condition, "z")).read_graph()  # pyright: ignore[reportAttributeAccessIssue]
    assert not constant_outputs(graph)
