"""Sizes that do not fit a model are an error, and no read beyond the end of memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from finecast import api
from finecast.engines import get_engine, installed
from finecast.errors import EngineError
from tests.frontends.tools import parse

pytestmark = pytest.mark.skipif(not installed("openvino"), reason="no OpenVINO")


def windows() -> onnx.ModelProto:
    """A convolution over windows of 40 steps, as of sound."""
    net = parse(
        """g (float[n, 1, t] x) => (float[n, 2, s] y) {
          h = Conv<strides = [8]>(x, w)
          y = Relu(h)
        }""",
        opset=17,
    )
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((2, 1, 40)).astype(np.float32)
    net.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    net.graph.node[0].name = "window"
    return net


def branches() -> onnx.ModelProto:
    """Windows of 40 steps where the sound has as many, else the sound as it is."""
    return parse(
        """g (float[n, 1, t] x) => (float[a, b, c] y)
          <int64[3] shape = {1, 1, 40}, int64 most = {39}> {
          w = ConstantOfShape<value = float[1] {0.5}>(shape)
          sizes = Shape(x)
          two = Constant<value_int = 2>()
          length = Gather(sizes, two)
          long = Greater(length, most)
          y = If(long) <
            then_branch = t1 () => (float[d, e, f] h) { h = Conv(x, w) },
            else_branch = t2 () => (float[d, e, f] i) { i = Neg(x) }
          >
        }""",
        opset=17,
    )


def sound(length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {"x": rng.standard_normal((1, 1, length)).astype(np.float32)}


def test_a_window_larger_than_the_input_is_an_error_that_names_the_op() -> None:
    session = get_engine("openvino").load(windows().SerializeToString())
    with pytest.raises(EngineError, match=r"larger than the data shape.* 'window'"):
        session.run(sound(16))
    assert session.run(sound(48))["y"].shape == (1, 2, 2)
    with pytest.raises(EngineError, match="larger than the data shape"):
        session.run(sound(39))


def test_a_model_of_openvino_is_checked_too(tmp_path: Path) -> None:
    import openvino

    (tmp_path / "m.onnx").write_bytes(windows().SerializeToString())
    openvino.save_model(openvino.Core().read_model(tmp_path / "m.onnx"), tmp_path / "m.xml")
    session = get_engine("openvino").load(tmp_path / "m.xml")
    with pytest.raises(EngineError, match="larger than the data shape"):
        session.run(sound(16))


def test_a_branch_that_is_not_taken_refuses_no_size() -> None:
    session = get_engine("openvino").load(branches().SerializeToString())
    short = sound(16)
    np.testing.assert_array_equal(session.run(short)["y"], -short["x"])
    assert session.run(sound(64))["y"].shape == (1, 1, 25)


def test_random_inputs_are_larger_where_small_ones_do_not_fit() -> None:
    verified = api.convert(windows(), policy="all:bf16").verified
    assert verified.sizes == {"n": 1, "t": 64}
    assert verified.relative_error


def test_a_body_is_not_run_in_openvino_on_sizes_that_it_does_not_take() -> None:
    net = branches()
    net.graph.node[-1].attribute[1].CopyFrom(
        helper.make_attribute("else_branch", net.graph.node[-1].attribute[0].g)
    )
    verified = api.convert(net, policy="all:bf16").verified
    assert verified.sizes == {"n": 1, "t": 64}


def test_axes_without_a_name_have_a_size_too() -> None:
    net = windows()
    for dim in (net.graph.input[0].type.tensor_type.shape.dim[i] for i in (0, 2)):
        dim.ClearField("dim_param")
    assert api.convert(net, policy="all:bf16").verified.relative_error


def test_negative_sizes_are_free(tmp_path: Path) -> None:
    net = windows()
    net.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    assert api.convert(net, policy="all:bf16").verified.relative_error
    path = tmp_path / "m.onnx"
    path.write_bytes(net.SerializeToString())
    session = get_engine("openvino").load(path)
    assert session.inputs[0].shape == (None, 1, "t")

    api.convert(path, tmp_path / "low.onnx", policy="all:bf16")
    written = onnx.load(tmp_path / "low.onnx").graph.input[0].type.tensor_type.shape
    assert not written.dim[0].HasField("dim_value")


def test_empty_outputs_are_not_compared() -> None:
    net = parse(
        """g (float[n, t] x) => (float[n, s] y)
          <int64[1] start = {50}, int64[1] end = {2000}, int64[1] axis = {1}> {
          y = Slice(x, start, end, axis)
        }""",
        opset=17,
    )
    assert api.convert(net, policy="all:bf16").verified.sizes == {"n": 1, "t": 64}


def test_inspect_counts_at_sizes_that_fit_and_says_which() -> None:
    found = api.inspect(windows())
    sizes = "n=1, which --batch changes; t=64, which --dim changes"
    assert found.notes["figures are for"] == sizes
    assert found.notes["dynamic dimensions"] == "n (x.0), t (x.2)"
    assert all(row.bytes >= 0 and row.flops >= 0 for row in found.classes)
    assert sum(row.flops for row in found.classes) > 0
    given = api.inspect(windows(), dims={"t": 80}, batch=4)
    assert given.notes["figures are for"] == "n=4, which --batch changes"


@pytest.mark.parametrize("unread_first", [False, True])
def test_an_input_that_no_op_reads_is_taken(unread_first: bool) -> None:
    """Compiled for int8, OpenVINO drops it; a caller gives it all the same."""
    ports = ["float[n, 64] x", "float[n, 3] unread"][:: -1 if unread_first else 1]
    rng = np.random.default_rng(0)
    model = parse(
        f"g ({', '.join(ports)}) => (float[n, 8] y) {{"
        " h = MatMul(x, w)\n r = Relu(h)\n y = MatMul(r, v) }",
        opset=17,
    )
    for name, sizes in (("w", (64, 64)), ("v", (64, 8))):
        weights = rng.normal(size=sizes).astype(np.float32) / 8
        model.graph.initializer.append(numpy_helper.from_array(weights, name))
    data = {
        "x": rng.normal(size=(64, 64)).astype(np.float32),
        "unread": np.zeros((64, 3), np.float32),
    }
    done = api.convert(model, policy="all:int8", data=data, engine="openvino")
    assert done.verified.engine == "openvino"
    assert {d.format.label for d in done.plan.decisions} >= {"int8"}
    assert {port.name for port in done.model.graph.input} == {*data}
