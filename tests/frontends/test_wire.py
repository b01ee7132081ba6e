"""A file that is read in pieces gives the message that it holds, or the same errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper, numpy_helper

from finecast.errors import ModelError
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import stream
from finecast.frontends.onnx.stream import parse_model


def net() -> onnx.ModelProto:
    """Large and small weights in turns."""
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.standard_normal((8, n), dtype=np.float32), f"w{i}")
        for i, n in enumerate((64, 1, 1, 64, 64, 1))
    ]
    nodes = [helper.make_node("MatMul", ["x", f"w{i}"], [f"y{i}"]) for i in range(6)]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 8])
    outputs = [
        helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None) for i in range(6)
    ]
    graph = helper.make_graph(nodes, "g", [x], outputs, weights)
    graph.metadata_props.add(key="k", value="v")
    imports = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=imports, producer_name="p", ir_version=10)


@pytest.mark.parametrize("whole_below", [0, 100, 1000, 1 << 20])
def test_the_message_is_the_same(tmp_path: Path, whole_below: int) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(net().SerializeToString())
    assert parse_model(path, whole_below=whole_below) == net()


@pytest.mark.parametrize("cut", [1, 40, 1000, 5000])
def test_what_is_cut_off_is_an_error(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(net().SerializeToString()[:-cut])
    with pytest.raises((DecodeError, ValueError)):
        parse_model(path, whole_below=100)
    with pytest.raises(ModelError, match="not a readable ONNX model"):
        frontend.load(path)


def test_a_value_of_two_nodes_is_named(tmp_path: Path) -> None:
    """onnxconverter-common writes such files."""
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 20]> net (float[2] x) => (float[2] y)'
        " { t = Abs(x) t = Neg(x) y = Exp(t) }"
    )
    onnx.save(model, tmp_path / "net.onnx")
    with pytest.raises(
        ModelError, match="not a readable ONNX model: Output 't' is redeclared"
    ):
        frontend.load(tmp_path / "net.onnx")


def test_no_large_tensor_is_read_with_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is merged at once are the fields around it."""
    path = tmp_path / "net.onnx"
    path.write_bytes(net().SerializeToString())
    kept = bytes
    sizes: list[int] = []

    def counted(view: memoryview) -> bytes:
        sizes.append(len(view))
        return kept(view)

    monkeypatch.setattr(stream, "bytes", counted, raising=False)
    assert parse_model(path, whole_below=1000) == net()
    large = sum(t.ByteSize() for t in net().graph.initializer if t.ByteSize() > 1000)
    assert sum(sizes) <= net().ByteSize() - large


def test_a_field_without_a_number_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(net().SerializeToString() + b"\x02\x00")
    with pytest.raises(ValueError, match="field 0"):
        parse_model(path, whole_below=100)
