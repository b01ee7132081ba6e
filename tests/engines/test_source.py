from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto, numpy_helper, parser

from finecast.engines.source import read_source, without_weights
from finecast.errors import EngineError

NET = """<ir_version: 10, opset_import: ["" : 22]>
net (float[N,4] x, float[4,3] w, bool flag) => (bfloat16[N,3] y, float[N,3] z)
<float[4,3] w = {1,0,0, 0,1,0, 0,0,1, 1,1,1}> {
  [matmul] p = MatMul(x, w)
  y = Cast<to=16>(p)
  [branch] z = If (flag) <
    then_branch = yes () => (float[N,3] t) { t = Add(p, p) },
    else_branch = no () => (float[N,3] e) { q = Neg(p)  e = Neg(q) }
  >
}"""


def net() -> ModelProto:
    return parser.parse_model(NET)


def test_ports_and_names() -> None:
    source = read_source(net().SerializeToString())
    assert [(s.name, s.dtype, s.shape) for s in source.inputs] == [
        ("x", "fp32", ("N", 4)),
        ("flag", "bool", ()),
    ]
    assert [(s.name, s.dtype) for s in source.outputs] == [("y", "bf16"), ("z", "fp32")]
    assert source.producers == {"p": "matmul", "y": "y", "z": "branch"}


def test_an_unknown_element_type_is_refused() -> None:
    model = net()
    model.graph.input[0].type.tensor_type.elem_type = 99
    with pytest.raises(EngineError, match="'x' has the unknown element type 99"):
        read_source(model.SerializeToString())


def test_bodies_count_as_readers_of_what_they_capture() -> None:
    branch = read_source(net().SerializeToString()).steps[-1]
    assert branch.inputs[0] == "flag"
    assert set(branch.inputs[1:]) == {"p"}


def test_weights_are_left_out() -> None:
    model = net()
    weights = np.zeros(1_000_000, np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weights, "large"))
    light, names, data = without_weights(memoryview(model.SerializeToString()))
    assert (names, data) == ({"w", "large"}, set())
    assert len(light) < 2000
    expected = net()
    expected.graph.ClearField("initializer")
    assert ModelProto.FromString(light) == expected


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        read_source(data)
    except EngineError as error:
        assert "not an ONNX model" in str(error)  # noqa: PT017 (both ways are right)


@given(st.data())
def test_a_truncated_model_is_refused_or_still_whole(data: st.DataObject) -> None:
    whole = net().SerializeToString()
    cut = data.draw(st.integers(0, len(whole) - 1))
    try:
        source = read_source(whole[:cut])
    except EngineError:
        return
    assert len(source.steps) == 3  # only what follows the graph was cut


def test_where_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text.onnx"
    path.write_text("hello")
    with pytest.raises(EngineError, match=r"not an ONNX model.*text\.onnx"):
        read_source(path)
