"""blame says which scale of another tool's file is wrong: too coarse, or clipping."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper

import finecast
from finecast.frontends.torch.codes import coded_ops
from finecast.native.model import ReadOptions
from finecast.native.opening import opened
from finecast.native.scales import stored_range

pytest.importorskip("onnxruntime.quantization")

from onnxruntime.quantization import quantize_static

from tests.native.test_blame_of_quantizers import WAYS, Reader, convnet

onnxruntime: Any = pytest.importorskip("onnxruntime")

Edit = Callable[[NDArray[Any]], NDArray[Any]]


def changed(path: Path, **edits: Edit) -> Path:
    """The file with other numbers in these initializers."""
    model = onnx.load(path)
    for stored in model.graph.initializer:
        if stored.name in edits:
            array = numpy_helper.to_array(stored)
            new = edits[stored.name](array).astype(array.dtype)
            stored.CopyFrom(numpy_helper.from_array(new, stored.name))
    edited = path.with_name("edited.onnx")
    onnx.save(model, edited)
    return edited


def by(factor: float) -> Edit:
    return lambda array: array * factor


def integers(factor: float) -> Edit:
    """Weights quantized anew, with a scale so many times as large."""
    return lambda array: np.clip(np.round(array / factor), -128, 127)


def inner(path: Path, name: str, data: dict[str, Any]) -> NDArray[Any]:
    """What the net gives for an inner value."""
    model = onnx.load(path)
    model.graph.output.append(onnx.ValueInfoProto(name=name))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    values: Any = session.run([name], data)
    return values[0]


@pytest.mark.parametrize("way", ["qdq", "qdq by channel, signed", "qoperator"])
@pytest.mark.parametrize(("factor", "clips"), [(30.0, False), (0.2, True)])
def test_the_scale_of_an_activation_is_named(
    way: str, factor: float, clips: bool, tmp_path: Path
) -> None:
    """It named the op alone, and that it sums 144 terms."""
    path, data = convnet(tmp_path / "net.onnx")
    low = tmp_path / "low.onnx"
    quantize_static(path, low, Reader(data), **WAYS[way])
    # The quantizer calls what the Relu gives by the name of the convolution in this form.
    name = "c1_scale" if way == "qoperator" else "r1_scale"
    blamed = finecast.blame(
        path, changed(low, **{name: by(factor)}), data=data, max_error=0.02
    )
    (culprit, *_), ((node, scale), *_) = blamed.culprits, blamed.wrong_scales
    assert culprit.node == node == "conv2"
    assert culprit.reasons[0] == scale.text
    assert scale.value == "r1"
    assert scale.reaches == pytest.approx((0, 6), abs=0.01)
    assert scale.covers[1] == pytest.approx(6 * factor, rel=0.02)
    assert not scale.constant
    if clips:
        values = inner(path, "r1", data)
        share = float(np.mean(values > 6 * factor))
        assert scale.clipped == pytest.approx(share, rel=0.1)
        assert scale.text.endswith("of them are clipped")
        assert scale.too_coarse == 1
        assert not any("by a scale that fits" in line for line in blamed.lines)
    else:
        assert scale.text.endswith("30 times too coarse")
        assert scale.too_coarse == pytest.approx(factor, rel=0.02)
        assert scale.clipped == 0
        fits = f"by a scale that fits the values: {scale.fitting}"
        assert f"or keep the reduced format, {fits}" in blamed.lines
        assert scale.fitting.startswith("0 to ")
        assert scale.fitting.endswith(" for r1")


@pytest.mark.parametrize("way", ["qdq", "qdq by channel, signed"])
def test_the_scale_of_weights_is_named(way: str, tmp_path: Path) -> None:
    path, data = convnet(tmp_path / "net.onnx")
    low = tmp_path / "low.onnx"
    quantize_static(path, low, Reader(data), **WAYS[way])
    for factor, said in ((30.0, "times too coarse"), (0.3, "of them are clipped")):
        edits = {"w1_scale": by(factor), "w1_quantized": integers(factor)}
        blamed = finecast.blame(path, changed(low, **edits), data=data, max_error=0.02)
        _, scale = blamed.wrong_scales[0]
        assert blamed.culprits[0].reasons[0] == scale.text
        assert (scale.value, scale.constant) == ("w1", True)
        assert said in scale.text
        channels = 16 if "by channel" in way else 1
        assert scale.channels == channels
        assert (f"so for {channels} channels" in scale.text) == (channels > 1)
        assert {w.value for _, w in blamed.wrong_scales} == {"w1"}


def test_one_channel_is_named_of_a_file_that_passes(tmp_path: Path) -> None:
    path, data = convnet(tmp_path / "net.onnx")
    low = tmp_path / "low.onnx"
    quantize_static(path, low, Reader(data), **WAYS["qdq by channel, signed"])

    def third(change: Edit) -> Edit:
        return lambda a: np.concatenate([a[:3], change(a[3:4]), a[4:]])

    edits = {"w1_scale": third(by(30)), "w1_quantized": third(integers(30))}
    blamed = finecast.blame(path, changed(low, **edits), data=data, max_error=0.05)
    assert blamed.passed
    ((node, scale),) = blamed.wrong_scales
    assert (node, scale.value, scale.channel, scale.channels) == ("conv1", "w1", 3, 1)
    assert scale.too_coarse == pytest.approx(30, rel=0.02)
    assert scale.text in blamed.lines
    (stated,) = blamed.to_dict()["wrong_scales"]
    assert stated["times_too_coarse"] == scale.too_coarse


@pytest.mark.parametrize("way", WAYS)
def test_scales_that_a_quantizer_fits_are_right(way: str, tmp_path: Path) -> None:
    path, data = convnet(tmp_path / "net.onnx")
    low = tmp_path / "low.onnx"
    quantize_static(path, low, Reader(data), **WAYS[way])
    assert not finecast.blame(path, low, data=data, max_error=1e-4).wrong_scales


def test_scales_of_an_openvino_model_are_read(tmp_path: Path) -> None:
    """Its activations have bounds and levels, its weights a cast and a product."""
    openvino: Any = pytest.importorskip("openvino")
    path, data = convnet(tmp_path / "net.onnx")
    low = tmp_path / "low.onnx"
    quantize_static(path, low, Reader(data), **WAYS["qdq by channel, signed"])
    edits = {
        "r1_scale": by(30),
        "w1_scale": by(30),
        "w1_quantized": integers(30),
    }
    models = [openvino.convert_model(f) for f in (path, changed(low, **edits))]
    blamed = finecast.blame(*models, data=data, max_error=0.02)
    assert {(w.constant, round(w.too_coarse)) for _, w in blamed.wrong_scales} == {
        (True, 30),
        (False, 30),
    }


def test_long_chains_and_images_in_integers_have_no_scale(tmp_path: Path) -> None:
    """A chain took a call of Python's for each op; an image's range is no scale."""
    links = "\n".join(f"v{k + 1} = Mul(v{k}, half)" for k in range(2000))
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
    net (uint8[n, 4] x) => (float[n, 4] v2000) <float half = {{0.5}}> {{
      v0 = Cast<to = 1>(x)
      {links}
    }}"""
    path = tmp_path / "chain.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    graph = opened(path, ReadOptions()).read_graph()
    assert all(stored_range(graph, value) is None for value in graph.values)


def test_a_scale_of_zeros_is_not_wrong(tmp_path: Path) -> None:
    """Any scale states a constant of zeros, as tables of masks and cleared sums are."""
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    net (float[n, 4] x) => (float[n, 4] y) <float[4] none = {0, 0, 0, 0}> {
      cleared = Mul(x, none)
      y = Add(cleared, x)
    }"""
    path, low = tmp_path / "net.onnx", tmp_path / "low.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    data = {"x": np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)}
    quantize_static(path, low, Reader(data))
    assert not finecast.blame(path, low, data=data, max_error=0.5).wrong_scales


class Mlp(torch.nn.Module):
    """Two layers, in fp32 or as PyTorch's quantizers write them: by PyTorch's own ops."""

    def __init__(self, scales: tuple[float, float] | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = torch.nn.Parameter(torch.randn(16, 8, generator=generator))
        weight = torch.randn(4, 16, generator=generator)
        self.scales = scales
        if scales is None:
            self.second = torch.nn.Parameter(weight)
            return
        steps = weight.abs().amax(dim=1) / 127 * scales[1]
        self.register_buffer("steps", steps)
        self.register_buffer("zeros", torch.zeros(4, dtype=torch.int64))
        integers = torch.round(weight / steps[:, None]).to(torch.int8)
        self.register_buffer("integers", integers)

    def forward(self, x: Any) -> Any:
        linear, ops = torch.nn.functional.linear, coded_ops()
        inner = torch.relu(linear(x, self.first))
        if self.scales is None:
            return linear(inner, self.second)
        step, uint8, int8 = 16 / 255 * self.scales[0], torch.uint8, torch.int8
        inner = ops.quantize_per_tensor(inner, step, 0, 0, 255, uint8)
        inner = ops.dequantize_per_tensor(inner, step, 0, 0, 255, uint8)
        channels = (self.steps, self.zeros, 0, -127, 127, int8)
        return linear(inner, ops.dequantize_per_channel(self.integers, *channels))


def test_scales_of_a_pytorch_file_are_read(tmp_path: Path) -> None:
    """It named the op alone: scales are arguments there, and no operands."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    files = {}
    for name, scales in {"fp32": None, "right": (1.0, 1.0), "wrong": (30.0, 20.0)}.items():
        files[name] = tmp_path / f"{name}.pt2"
        program = torch.export.export(Mlp(scales).eval(), (x,))
        torch.export.save(program, files[name])
    data = {"x": x.numpy()}
    right, wrong = (
        finecast.blame(files["fp32"], files[n], data=data) for n in ("right", "wrong")
    )
    assert not right.wrong_scales
    activations, weights = sorted(
        (scale for _, scale in wrong.wrong_scales), key=lambda scale: scale.constant
    )
    assert activations.covers == pytest.approx((0, 16 * 30), rel=0.01)
    assert activations.too_coarse == pytest.approx(16 * 30 / activations.reaches[1], rel=0.01)
    assert weights.constant
    assert weights.too_coarse == pytest.approx(20, rel=0.05)
    assert weights.channels == 4
    ((node, _), *_) = wrong.wrong_scales
    assert node == wrong.culprits[0].node
    assert wrong.culprits[0].reasons[0] in (activations.text, weights.text)
