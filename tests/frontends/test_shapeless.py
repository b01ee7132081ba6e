"""Models with inputs of no declared shape are converted, and it is said what was not seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from finecast import api
from finecast.engines import get_engine, installed
from finecast.errors import ModelError, UsageError
from finecast.frontends import onnx as frontend
from tests.frontends.tools import parse

ENGINES = [None, *(e for e in ("openvino", "onnxruntime") if installed(e))]


def net(shape: list[int | str | None] | None = None) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    weights = helper.make_tensor("w", TensorProto.FLOAT, (4, 4), np.eye(4).reshape(-1))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="product"),
        helper.make_node("Tanh", ["h"], ["y"], name="last"),
    ]
    graph = helper.make_graph(nodes, "net", [x], [y], [weights])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


DATA = {"x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)}


@pytest.mark.parametrize("engine", ENGINES)
def test_without_data_it_is_converted_and_not_run(engine: str | None) -> None:
    done = api.convert(net(), policy="all:bf16", engine=engine)
    assert done.verified.relative_error is None
    assert "loaded, not run: input 'x' has no declared shape" in done.verified.note
    assert "--data" in done.verified.note
    assert "--dim x.0=SIZE" in done.verified.note


def test_where_random_sizes_do_not_run_it_says_how_to_state_them() -> None:
    sevens = parse(
        """g (float[n, 4] x) => (float[7, k] y) {
          s = Constant<value_ints = [7, -1]>()
          r = Reshape(x, s)
          y = Tanh(r)
        }""",
        opset=17,
    )
    note = api.convert(sevens, policy="all:bf16").verified.note
    assert note.startswith("loaded, not run: ")
    assert note.endswith("give --data, or sizes by --dim n=SIZE")
    assert "not run" not in api.convert(sevens, policy="all:bf16", dims={"n": 7}).verified.note


@pytest.mark.parametrize("engine", ENGINES)
def test_on_data_it_is_run_somewhere(engine: str | None) -> None:
    done = api.convert(net(), policy="all:bf16", engine=engine, data=DATA)
    assert done.verified.engine is not None
    assert done.verified.relative_error is not None
    assert "not run" not in done.verified.note


def test_sizes_of_each_axis_are_a_shape() -> None:
    done = api.convert(net(), policy="all:bf16", dims={"x.0": 3, "x.1": 4})
    assert done.verified.relative_error is not None
    with pytest.raises(UsageError, match=r"unknown free dimension 'x\.7'"):
        api.convert(net(), policy="all:bf16", dims={"x.0": 3, "x.7": 4})


def test_the_shape_stays_undeclared_and_all_else_is_checked(tmp_path: Path) -> None:
    path, low = tmp_path / "net.onnx", tmp_path / "low.onnx"
    onnx.save(net(), path)
    api.convert(path, low, "all:bf16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["low.onnx", "net.onnx"]
    model = onnx.load(low)
    assert not model.graph.input[0].type.tensor_type.HasField("shape")
    frontend.check(low, shapeless={"x", "y"})
    with pytest.raises(ModelError, match="not valid ONNX"):
        frontend.check(low)
    model.graph.node[0].input[0] = "nothing"
    onnx.save(model, low)
    with pytest.raises(ModelError, match="not valid ONNX"):
        frontend.check(low, shapeless={"x", "y"})


def test_engines_say_that_there_is_no_shape(tmp_path: Path) -> None:
    onnx.save(net(), tmp_path / "net.onnx")
    session = get_engine("onnxruntime").load(tmp_path / "net.onnx")
    assert [spec.shape for spec in (*session.inputs, *session.outputs)] == [None, None]
    assert session.run(DATA)["y"].shape == (3, 4)


def test_outputs_without_elements_prove_nothing() -> None:
    done = api.convert(net([0, 4]), policy="all:bf16")
    assert "nothing was compared" in done.verified.note


def test_other_verbs_take_them(tmp_path: Path) -> None:
    assert api.inspect(net()).nodes == 2
    assert api.inspect(net(), data=DATA).nodes == 2
    outcome = api.tune(net(), data=DATA, metric="cosine", policy="auto:bf16", tolerance=0.5)
    assert outcome.baseline.metric == 1


def test_outputs_of_a_wrong_number_of_axes_are_corrected(tmp_path: Path) -> None:
    """onnx infers the axes only at the opset that bf16 needs."""
    proto = parse(
        """g (float[1, 1, k] x) => (float[1, s] y)
        <int64 last = {2}, int64[1] one = {1}, float[1,1,1] w = {0.7}> {
          r = Conv(x, w)
          sizes = Shape(r)
          length = Gather(sizes, last)
          u = Unsqueeze<axes = [0]>(length)
          to = Concat<axis = 0>(u, one, one)
          y = Reshape(r, to)
        }""",
        opset=12,
    )
    done = api.convert(proto, tmp_path / "low.onnx", policy="all:bf16")
    assert "output 'y' is declared with 2 axes and has 3" in done.verified.note
    assert done.verified.relative_error
    onnx.checker.check_model(tmp_path / "low.onnx", full_check=True)
    kept = api.convert(proto, policy="all:fp16").verified
    assert not kept.note
