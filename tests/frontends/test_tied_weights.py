"""Square weights that are read both as they are and transposed: OpenVINO confuses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import finecast
from finecast.devices.faults import known_faults
from finecast.engines import get_engine, installed
from finecast.errors import EngineError
from finecast.frontends.openvino.refused import TIED as FAULT
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


def test_openvino_still_confuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not, the release is right: it is the row's ``mended``."""
    model = net(SECOND["gemm"])
    monkeypatch.setitem(known_faults(), FAULT, replace(known_faults()[FAULT], mended="0"))
    (y,) = get_engine("openvino").load(model.SerializeToString()).run({"x": X}).values()
    assert np.abs(y - wanted(model)).max() > 1


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("second", SECOND)
def test_products_by_weights_and_their_transpose_go_to_another_engine(
    second: str, kind: type[np.generic], tmp_path: Path
) -> None:
    model = net(SECOND[second], kind)
    onnx.save(model, tmp_path / "net.onnx")
    done = finecast.convert(tmp_path / "net.onnx", tmp_path / "out.onnx", "all:fp16")
    assert done.verified.engine == "onnxruntime"
    (y,) = get_engine("onnxruntime").load(tmp_path / "out.onnx").run({"x": X}).values()
    exact = wanted(model)
    assert np.linalg.norm(y - exact) < 8 * Format.FP16.unit_roundoff * np.linalg.norm(exact)


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("policy", ["none", "all:bf16"])
@pytest.mark.parametrize("given", ["net.onnx", "net.xml"])
def test_openvinos_own_format_is_refused_by_the_names_of_both(
    given: str, policy: str, second: str, tmp_path: Path
) -> None:
    import openvino

    onnx.save(net(SECOND[second]), tmp_path / "net.onnx")
    read = openvino.Core().read_model(tmp_path / "net.onnx")
    openvino.save_model(read, tmp_path / "net.xml", compress_to_fp16=False)
    with pytest.raises(EngineError, match="by the same ones transposed") as caught:
        finecast.convert(tmp_path / given, tmp_path / "out.xml", policy)
    assert FAULT in str(caught.value)
    assert "store a transposed copy" in str(caught.value)
    assert not (tmp_path / "out.xml").exists()


@pytest.mark.parametrize(
    "text",
    ["y = MatMul(h, w)", "k = Relu(h)\n y = MatMul(k, w)", "t = Neg(w)\n y = MatMul(h, t)"],
)
def test_other_square_weights_are_given_to_openvino(text: str) -> None:
    model = net(text)
    y: Any
    (y,) = get_engine("openvino").load(model.SerializeToString()).run({"x": X}).values()
    np.testing.assert_allclose(y, wanted(model), rtol=1e-3, atol=1e-3)
