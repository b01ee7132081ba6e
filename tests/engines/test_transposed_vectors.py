"""Products of transposed matrices by vectors, which ONNX Runtime fuses wrongly."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import finecast

onnxruntime = pytest.importorskip("onnxruntime")

MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n,3,2] x, float[3] v) => (float[n,2] y) {
  [turned] t = Transpose <perm = [0, 2, 1]> (x)
  [product] y = MatMul(t, v)
}"""
X = np.random.default_rng(0).standard_normal((4, 3, 2)).astype(np.float32)
V = np.array([1, 10, 100], np.float32)
RIGHT = X.transpose(0, 2, 1) @ V


def test_onnxruntime_still_forgets_the_transpose() -> None:
    model = onnx.parser.parse_model(MODEL).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    outputs: Any = session.run(None, {"x": X, "v": V})
    (got,) = outputs
    assert np.abs(got - RIGHT).max() > 1


def test_finecasts_reference_is_right() -> None:
    model = finecast.load(onnx.parser.parse_model(MODEL))
    (got,) = model.reference().run({"x": X, "v": V}).values()
    assert np.allclose(np.asarray(got, np.float32), RIGHT)


def test_engines_agree() -> None:
    """A second engine is compared with the one that verifies: it was said to be wrong."""
    data = {"x": X, "v": V}
    model = onnx.parser.parse_model(MODEL)
    done = finecast.convert(model, policy="all:bf16", engine="openvino", data=data)
    assert not any("disagree" in text for text in done.warnings)
