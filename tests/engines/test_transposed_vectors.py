"""Products of transposed matrices by vectors, which ONNX Runtime fuses wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import finecast
from finecast.errors import EngineError

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


@pytest.mark.parametrize("turned", [True, False])
def test_it_is_said_of_the_deployed_model(tmp_path: Path, turned: bool) -> None:
    """Whatever engine verifies it: an ONNX file is run in ONNX Runtime, too."""
    text = MODEL if turned else MODEL.replace("[0, 2, 1]", "[0, 1, 2]")
    x = X if turned else X.transpose(0, 2, 1).copy()
    text = text.replace("float[n,3,2] x", "float[n,3,2] x" if turned else "float[n,2,3] x")
    model = onnx.parser.parse_model(text)
    del model.graph.input[1]
    model.graph.initializer.append(numpy_helper.from_array(V, "v"))
    for engine in ("openvino", "onnxruntime"):
        given: dict[str, Any] = {"engine": engine, "data": {"x": x}}
        done = finecast.convert(model, policy="all:fp16", **given)
        named = [w for w in done.warnings if "onnxruntime-transposed-vectors" in w]
        assert len(named) == turned
    given = {"metric": "max_abs", "tolerance": 9, "data": {"x": x}}
    tuned = finecast.tune(model, policy="all:fp16", **given)
    assert any("onnxruntime-transposed-vectors" in w for w in tuned.warnings) == turned


def test_another_engine_is_advised_than_the_one_that_is_wrong() -> None:
    model = onnx.parser.parse_model(MODEL)
    feeds = {"x": np.abs(X), "v": np.array([1, -40, 2], np.float32)}
    with pytest.raises(EngineError, match=r"ONNX Runtime computes .* wrongly") as caught:
        finecast.convert(model, policy="all:fp16", engine="onnxruntime", data=feeds)
    assert "engine openvino" in str(caught.value)
