"""ONNX models as OpenVINO's IR: what is int8 in the one form is in the other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from finecast import api
from finecast.frontends import openvino as frontend
from finecast.numbers.formats import Format
from tests.kernels import skip_without_int8

pytest.importorskip("openvino")

TEXT = """<ir_version: 9, opset_import: ["" : 17]>
net (float[n, 16, 8, 8] x) => (float[n, 16, 8, 8] y) {
    a = Conv<pads=[1, 1, 1, 1]>(x, w1, b1)
    r = Relu(a)
    c = Conv<pads=[1, 1, 1, 1]>(r, w2, b2)
    s = Add(c, r)
    y = Relu(s)
}"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """A residual block with biases, for any batch."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(TEXT)
    for name, shape in {
        "w1": (16, 16, 3, 3),
        "b1": 16,
        "w2": (16, 16, 3, 3),
        "b2": 16,
    }.items():
        array = (rng.standard_normal(shape) / 12).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(model, tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def test_convolutions_with_biases_run_in_int8_in_either_form(
    net: Path, tmp_path: Path
) -> None:
    """OpenVINO's reader gives each bias its shape by the convolution's result."""
    skip_without_int8()
    data = {"x": np.random.default_rng(1).standard_normal((8, 16, 8, 8)).astype(np.float32)}
    found = [
        api.convert(net, tmp_path / name, "all:int8", data=data, engine="openvino").plan
        for name in ("low.onnx", "low.xml")
    ]
    coded = [sum(f is Format.INT8 for f in plan.formats.values()) for plan in found]
    assert coded == [3, 3]  # both convolutions, and the residual addition in the kernel


def test_constants_that_are_only_reshaped_are_constants(net: Path) -> None:
    kinds = [op.get_type_name() for op in frontend.load(net).model.get_ordered_ops()]
    assert "Reshape" not in kinds
    assert "ShapeOf" not in kinds
