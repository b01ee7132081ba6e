"""Ops that OpenVINO computes wrongly in every type: models with them go to another engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import finecast
from finecast.devices.faults import known_faults
from finecast.engines import get_engine, installed
from finecast.errors import EngineError, ModelError
from tests.frontends.tools import parse

pytestmark = pytest.mark.skipif(not installed("openvino"), reason="OpenVINO is not installed")

SAME = "float[1,2,5,4] x) => (float[1,2,5,4] y)"
NETS = {
    "window": (
        "openvino-attention-windows",
        25,
        f"{SAME} {{ y = Attention<left_window_size = 1>(x, x, x)",
    ),
    "right window": (
        "openvino-attention-windows",
        25,
        f"{SAME} {{ y = Attention<right_window_size = 0>(x, x, x)",
    ),
    "rfft": (
        "openvino-dft-onesided",
        17,
        "float[2,8,1] x) => (float[2,5,2] y) { y = DFT<axis = 1, onesided = 1>(x)",
    ),
    "irfft": (
        "openvino-dft-onesided",
        17,
        "float[2,5,2] x) => (float[2,8,1] y) { y = DFT<axis = 1, onesided = 1, inverse=1>(x)",
    ),
}


def net(kind: str) -> tuple[str, onnx.ModelProto, dict[str, Any]]:
    fault, opset, text = NETS[kind]
    model = parse(f"net ({text} }}", opset=opset)
    model.ir_version = min(model.ir_version, 13)
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return fault, model, {"x": x}


@pytest.mark.parametrize("kind", NETS)
def test_openvino_still_computes_it_wrongly(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it does not, the release is right: it is the row's ``mended``."""
    fault, model, feeds = net(kind)
    monkeypatch.setitem(known_faults(), fault, replace(known_faults()[fault], mended="0"))
    (y,) = get_engine("openvino").load(model.SerializeToString()).run(feeds).values()
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    wanted = np.asarray(wanted)
    assert y.shape != wanted.shape or np.abs(y - wanted).max() > 0.1


@pytest.mark.parametrize("kind", NETS)
def test_openvino_is_not_asked(kind: str) -> None:
    fault, model, _ = net(kind)
    with pytest.raises(EngineError, match=fault) as caught:
        get_engine("openvino").load(model.SerializeToString())
    assert "--engine onnxruntime" in caught.value.fix


def test_the_next_engine_is_tried(tmp_path: Path) -> None:
    onnx.save(net("rfft")[1], tmp_path / "net.onnx")
    done = finecast.convert(tmp_path / "net.onnx", tmp_path / "low.onnx", "none")
    assert done.verified.engine == "onnxruntime"
    with pytest.raises(ModelError, match="openvino-dft-onesided"):
        finecast.convert(tmp_path / "net.onnx", tmp_path / "low.xml", "none")


@pytest.mark.parametrize(
    "op",
    ["Attention<left_window_size = -1>(x, x, x)", "Attention<is_causal = 1>(x, x, x)"],
)
def test_ops_that_it_computes_rightly_are_given_to_it(op: str) -> None:
    model = parse(f"net (float[1,2,5,4] x) => (float[1,2,5,4] y) {{ y = {op} }}", opset=25)
    model.ir_version = min(model.ir_version, 13)
    assert get_engine("openvino").load(model.SerializeToString()).outputs
