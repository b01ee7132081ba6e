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

RNG = np.random.default_rng(4)
SAME = "float[1,2,5,4] x) => (float[1,2,5,4] y)"
RECURRENT = (
    "float[3,4,2] x) => (float[a,b,c,d] y) <float[1,12,2] w = {W}, float[1,12,3] r = {R}"
)
WINDOW, DFT = "openvino-attention-windows", "openvino-dft-onesided"
IMAGE = "float[1,1,4,6] x) => (float[a,b,c,d] y)"
NETS = {
    "window": (WINDOW, 25, f"{SAME} {{ y = Attention<left_window_size = 1>(x, x, x)"),
    "right window": (WINDOW, 25, f"{SAME} {{ y = Attention<right_window_size = 0>(x, x, x)"),
    "rfft": (
        DFT,
        17,
        "float[2,8,1] x) => (float[2,5,2] y) { y = DFT<axis = 1, onesided = 1>(x)",
    ),
    "irfft": (
        DFT,
        17,
        "float[2,5,2] x) => (float[2,8,1] y) { y = DFT<axis = 1, onesided = 1, inverse=1>(x)",
    ),
    "layout": (
        "openvino-recurrent-layout",
        14,
        f"{RECURRENT}> {{ y = LSTM<hidden_size = 3, layout = 1>(x, w, r)",
    ),
    "lengths": (
        "openvino-sequence-lengths",
        14,
        (
            "float[3,N,2] x, int32[N] n) => (float[a,b,c,d] y)"
            " <float[1,12,2] w = {W}, float[1,12,3] r = {R}>"
            " { y = LSTM<hidden_size = 3>(x, w, r, , n)"
        ),
    ),
    "peepholes": (
        "openvino-lstm-peepholes",
        14,
        f"{RECURRENT}, float[1,9] p = {{P}}> {{ y = LSTM<hidden_size = 3>(x, w, r, , , , , p)",
    ),
    "input_forget": (
        "openvino-lstm-input-forget",
        14,
        f"{RECURRENT}> {{ y = LSTM<hidden_size = 3, input_forget = 1>(x, w, r)",
    ),
    "antialias": (
        "openvino-resize-antialias",
        18,
        (
            f"{IMAGE} <float[4] s = {{1, 1, 0.5, 0.5}}>"
            ' { y = Resize<mode = "linear", antialias = 1>(x, , s)'
        ),
    ),
    "exclude_outside": (
        "openvino-resize-exclude-outside",
        13,
        (
            f"{IMAGE} <float[4] s = {{1, 1, 2, 2}}>"
            ' { y = Resize<mode = "cubic", exclude_outside = 1>(x, , s)'
        ),
    ),
    "aspect ratio": (
        "openvino-resize-aspect-ratio",
        18,
        (
            f"{IMAGE} <int64[4] s = {{1, 1, 4, 4}}>"
            ' { y = Resize<mode="nearest", keep_aspect_ratio_policy="not_larger">(x, , , s)'
        ),
    ),
    "small kernel": (
        "openvino-max-pool-ceil",
        19,
        f"{IMAGE} {{ y = MaxPool<kernel_shape=[1, 1], strides = [2, 2], ceil_mode = 1>(x)",
    ),
    "reduced": (
        "openvino-reduce-axes",
        13,
        "float[2,3,4] x) => (float[2,1,4] y) { y = ReduceL1<axes = [1]>(x)",
    ),
    "softmax": (
        "openvino-softmax-11",
        11,
        "float[2,3,4] x) => (float[2,3,4] y) { y = Softmax<axis = 1>(x)",
    ),
    "padded": (
        "openvino-max-pool-ceil",
        19,
        (
            "float[1,1,5,5] x) => (float[a,b,c,d] y) { y = MaxPool<kernel_shape = [2, 2],"
            " strides = [2, 2], pads = [1, 1, 1, 1], ceil_mode = 1>(x)"
        ),
    ),
}


def net(kind: str) -> tuple[str, onnx.ModelProto, dict[str, Any]]:
    fault, opset, text = NETS[kind]
    for name, size in {"W": 24, "R": 36, "P": 9}.items():
        numbers = ", ".join(f"{number:.3f}" for number in RNG.normal(size=size))
        text = text.replace(f"{{{name}}}", f"{{{numbers}}}")
    model = parse(f"net ({text} }}", opset=opset)
    model.ir_version = min(model.ir_version, 13)
    # A free size is that of two sequences, of which the first ends early.
    shape = [d.dim_value or 2 for d in model.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    lengths = {"n": np.array([1, 3], np.int32)} if len(model.graph.input) > 1 else {}
    return fault, model, {"x": x} | lengths


def right(model: onnx.ModelProto, feeds: dict[str, Any]) -> Any:
    """By ONNX Runtime, which knows ``input_forget``; onnx's reference has the newer ops."""
    try:
        found = get_engine("onnxruntime").load(model.SerializeToString()).run(feeds)
        return found["y"]
    except EngineError:
        outputs: Any = ReferenceEvaluator(model).run(None, feeds)
        return np.asarray(outputs[0])


@pytest.mark.parametrize("kind", NETS)
def test_openvino_still_computes_it_wrongly(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it does not, the release is right: it is the row's ``mended``."""
    fault, model, feeds = net(kind)
    monkeypatch.setitem(known_faults(), fault, replace(known_faults()[fault], mended="0"))
    (y,) = get_engine("openvino").load(model.SerializeToString()).run(feeds).values()
    wanted = right(model, feeds)
    assert y.shape != wanted.shape or np.abs(y - wanted).max() > 0.01


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


@pytest.mark.parametrize("kind", ["reduced", "softmax"])
def test_a_model_of_an_old_opset_is_not_rewritten_for_another_engine(
    kind: str, tmp_path: Path
) -> None:
    """It was taken at a later opset, whichever engine ran it."""
    _, model, feeds = net(kind)
    onnx.save(model, tmp_path / "net.onnx")
    opened = finecast.load(tmp_path / "net.onnx")
    assert opened.path == tmp_path / "net.onnx"
    done = finecast.convert(opened, tmp_path / "low.onnx", "none", data=feeds)
    assert done.verified.engine == "onnxruntime"
    assert not [text for text in done.warnings if "opset" in text]
    opsets = [onnx.load(tmp_path / name).opset_import for name in ("net.onnx", "low.onnx")]
    assert opsets[0] == opsets[1]


@pytest.mark.parametrize(
    ("opset", "op"),
    [(18, "y = ReduceL1(x, axes)"), (13, "y = ReduceL2<axes = [1]>(x)"),
     (11, "y = Softmax<axis = 3>(x)"), (11, "y = Softmax<axis = -1>(x)"),
     (11, "h = MatMul(x, w)\n y = Softmax<axis = 3>(h)")],
)  # fmt: skip
@pytest.mark.parametrize("in_file", [False, True])
def test_opsets_that_it_reads_right_are_given_to_it(
    opset: int, op: str, in_file: bool, tmp_path: Path
) -> None:
    """The axis of a Softmax is told from weights, too, which engines read last."""
    constants = "<int64[1] axes = {1}>" if "axes)" in op else ""
    constants = "<float[4,2] w = {1, 2, 3, 4, 5, 6, 7, 8}>" if "w)" in op else constants
    text = f"net (float[1,2,5,4] x) => (float[a,b,c,d] y) {constants} {{ {op} }}"
    model = parse(text, opset=opset)
    model.ir_version = min(model.ir_version, 13)
    onnx.save(model, tmp_path / "net.onnx")
    stated = tmp_path / "net.onnx" if in_file else model.SerializeToString()
    assert get_engine("openvino").load(stated).outputs


@pytest.mark.parametrize(
    "op",
    [
        "Attention<left_window_size = -1>(x, x, x)",
        "Attention<is_causal = 1>(x, x, x)",
        "MaxPool<kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], ceil_mode = 1>(x)",
        "MaxPool<kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1>(x)",
        "MaxPool<kernel_shape = [1, 1], strides = [2, 2]>(x)",
        "AveragePool<kernel_shape = [1, 1], strides = [2, 2], ceil_mode = 1>(x)",
    ],
)
def test_ops_that_it_computes_rightly_are_given_to_it(op: str) -> None:
    model = parse(f"net (float[1,2,5,4] x) => (float[a,b,c,d] y) {{ y = {op} }}", opset=25)
    model.ir_version = min(model.ir_version, 13)
    assert get_engine("openvino").load(model.SerializeToString()).outputs


@pytest.mark.parametrize(
    ("ports", "lengths"),
    [
        ("float[3,2,2] x, int32[2] n", ""),
        ("float[3,N,2] x", "s = Shape<start = 1, end = 2>(x)\n m = Expand(three, s)\n"),
        ("float[S,2,2] x", ""),
    ],
    ids=["of fixed sizes", "whole ones by sizes", "whole ones stated"],
)
def test_sequences_of_one_length_are_given_to_it(ports: str, lengths: str) -> None:
    """Exporters write out the length of the whole tensor."""
    used = "m" if lengths else "n" if "n" in ports.split() else "same"
    text = (
        f"net ({ports}) => (float[a,b,c,d] y)"
        f" <float[1,12,2] w = {{{'0.5, ' * 23}1}}, float[1,12,3] r"
        f" = {{{'0.5, ' * 35}1}}, int32 three = {{3}}, int32[2] same = {{3, 3}}>"
        f" {{ {lengths} y = LSTM<hidden_size = 3>(x, w, r, , {used}) }}"
    )
    model = parse(text, opset=17)
    model.ir_version = min(model.ir_version, 13)
    assert get_engine("openvino").load(model.SerializeToString()).outputs
