"""What the emulation of a device is told to be compared with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import finecast
from tests.frontends.tools import parse, tensor

X = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
def test_a_converted_model_is_not_called_fp32(suffix: str, tmp_path: Path) -> None:
    net, low = tmp_path / "net.onnx", tmp_path / f"low{suffix}"
    model = parse("net (float[n,16] x) => (float[n,4] y) { y = MatMul(x, w) }")
    model.graph.initializer.append(tensor("w", np.ones((16, 4), np.float32)))
    onnx.save(model, net)
    if suffix == ".xml":
        openvino = pytest.importorskip("openvino")
        read = openvino.convert_model(net)
        net = net.with_suffix(suffix)
        openvino.save_model(read, net, compress_to_fp16=False)
    finecast.convert(net, low, "all:bf16", verify=False)
    data = {"x": X}
    assert finecast.emulate(net, "trn1", data=data, metric="cosine").reference == "fp32"
    found = finecast.emulate(low, "trn1", data=data, metric="cosine")
    assert found.to_dict()["reference"] == "the model given"
    assert "the numbers are those of the model given" in str(found)
    assert "fp32" not in str(found)
