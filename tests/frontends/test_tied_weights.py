"""Square weights that are read both as they are and transposed: OpenVINO confuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import finecast
from finecast.engines import get_engine, installed
from finecast.frontends.onnx import from_model
from finecast.frontends.onnx.opset import stated_for_engines
from finecast.numbers.formats import Format
from tests.frontends.tools import parse

pytestmark = pytest.mark.skipif(not installed("openvino"), reason="OpenVINO is not installed")

RNG = np.random.default_rng(3)
SIDE = 16
X = RNG.normal(size=(3, SIDE)).astype(np.float32)
W = RNG.normal(size=(SIDE, SIDE)).astype(np.float32)
SECOND = {
    "transpose": "t = Transpose<perm = [1, 0]>(w)\n y = MatMul(h, t)",
    "gemm": "y = Gemm<transB = 1>(h, w)",
    "einsum": 'y = Einsum<equation = "ij,kj->ik">(h, w)',
    "both": "t = Transpose(w)\n y = Gemm(h, t)",
}


def net(second: str, kind: type[np.generic] = np.float32) -> onnx.ModelProto:
    """``x @ w @ w.T``; weights of another type are cast to fp32 first."""
    cast = "" if kind is np.float32 else "w = Cast<to = 1>(stored)\n"
    model = parse(
        f"net (float[n,{SIDE}] x) => (float[n,{SIDE}] y)"
        f" {{ {cast} h = MatMul(x, w)\n {second} }}",
        opset=17,
    )
    name = "stored" if cast else "w"
    model.graph.initializer.append(numpy_helper.from_array(W.astype(kind), name))
    return model


def wanted(model: onnx.ModelProto) -> Any:
    (y,) = get_engine("onnxruntime").load(model.SerializeToString()).run({"x": X}).values()
    return y


def test_openvino_still_confuses_them() -> None:
    """Where it does not, the release is right: it is the row's ``mended``."""
    model = net(SECOND["gemm"])
    (y,) = get_engine("openvino").load(model.SerializeToString()).run({"x": X}).values()
    assert np.abs(y - wanted(model)).max() > 1


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
@pytest.mark.parametrize("policy", ["none", "all:bf16"])
def test_products_by_weights_and_their_transpose(
    second: str, kind: type[np.generic], suffix: str, policy: str, tmp_path: Path
) -> None:
    model = net(SECOND[second], kind)
    onnx.save(model, tmp_path / "net.onnx")
    out = tmp_path / f"out{suffix}"
    done = finecast.convert(tmp_path / "net.onnx", out, policy, engine="openvino")
    assert any("with the weights of another product" in w for w in done.warnings)
    (y,) = get_engine("openvino").load(out).run({"x": X}).values()
    exact = wanted(model)
    tolerance = 1e-5 if policy == "none" else 8 * Format.BF16.unit_roundoff
    assert np.linalg.norm(y - exact) < tolerance * np.linalg.norm(exact)


def test_other_square_weights_stay() -> None:
    for text in ("y = MatMul(h, w)", "k = Relu(h)\n y = MatMul(k, w)"):
        file = from_model(net(text))
        assert stated_for_engines(file) is file
