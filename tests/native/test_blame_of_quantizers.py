"""blame on files of ONNX Runtime's quantizers: codes, folded activations, ops on codes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import finecast

pytest.importorskip("onnxruntime.quantization")

from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

onnxruntime: Any = pytest.importorskip("onnxruntime")
COUNT = 32
NOISE = 0.01
"""Of the squared error: calibration without an op changes other codes by as much."""
QDQ, QOPERATOR = QuantFormat.QDQ, QuantFormat.QOperator
SIGNED = {"activation_type": QuantType.QInt8, "weight_type": QuantType.QInt8}
WAYS: dict[str, dict[str, Any]] = {
    "qdq": {"quant_format": QDQ},
    "qdq by channel, signed": {"quant_format": QDQ, "per_channel": True, **SIGNED},
    "qdq by percentile": {
        "quant_format": QDQ,
        "calibrate_method": CalibrationMethod.Percentile,
    },
    "qoperator": {"quant_format": QOPERATOR},
    "qoperator by channel": {"quant_format": QOPERATOR, "per_channel": True},
}


class Reader(CalibrationDataReader):
    """Gives all data in one call."""

    def __init__(self, data: dict[str, NDArray[np.float32]]) -> None:
        self.left: Iterator[dict[str, NDArray[np.float32]]] = iter([data])

    def get_next(self) -> Any:
        return next(self.left, None)


def saved(
    path: Path, nodes: list[onnx.NodeProto], sizes: list[Any], weights: dict[str, Any]
) -> Path:
    x, y = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
        for n, s in zip(("x", "y"), sizes, strict=True)
    )
    stored = [
        numpy_helper.from_array(np.asarray(w, np.float32), n) for n, w in weights.items()
    ]
    graph = helper.make_graph(nodes, "net", [x], [y], stored)
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def convnet(path: Path) -> tuple[Path, dict[str, NDArray[np.float32]]]:
    """Three convolutions whose Relu and Clip the quantizers fold into codes, and a product."""
    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {"low": 0.0, "high": 6.0}
    nodes: list[onnx.NodeProto] = []
    read, channels = "x", 3
    for k, (width, folded) in enumerate(((16, "Relu"), (16, "Clip"), (32, "Relu"))):
        spread = np.sqrt(2 / (9 * channels))
        weights[f"w{k}"] = rng.normal(size=(width, channels, 3, 3)) * spread
        weights[f"b{k}"] = rng.normal(size=width) / 5
        bounds = ["low", "high"] if folded == "Clip" else []
        nodes += [
            helper.make_node(
                "Conv",
                [read, f"w{k}", f"b{k}"],
                [f"c{k}"],
                name=f"conv{k}",
                kernel_shape=[3, 3],
                pads=[1, 1, 1, 1],
            ),
            helper.make_node(folded, [f"c{k}", *bounds], [f"r{k}"], name=f"folded{k}"),
        ]
        read, channels = f"r{k}", width
    weights["v"] = rng.normal(size=(32, 10)) / np.sqrt(32)
    weights["b"] = np.zeros(10)
    nodes += [
        helper.make_node("GlobalAveragePool", [read], ["mean"], name="mean"),
        helper.make_node("Flatten", ["mean"], ["flat"], name="flat"),
        helper.make_node("Gemm", ["flat", "v", "b"], ["y"], name="head"),
    ]
    saved(path, nodes, [["n", 3, 12, 12], ["n", 10]], weights)
    return path, {"x": rng.normal(size=(COUNT, 3, 12, 12)).astype(np.float32)}


def attention(path: Path) -> tuple[Path, dict[str, NDArray[np.float32]]]:
    """One head of attention with a residual, and an MLP."""
    rng, width = np.random.default_rng(1), 32
    weights = {n: rng.normal(size=(width, width)) / np.sqrt(width) for n in "qkvfg"}
    weights["k"] /= np.sqrt(width)
    stated = [
        ("MatMul", "x q", "query"),
        ("MatMul", "x k", "key"),
        ("MatMul", "x v", "value"),
        ("Transpose", "key", "turned"),
        ("MatMul", "query turned", "scores"),
        ("Softmax", "scores", "shares"),
        ("MatMul", "shares value", "read"),
        ("Add", "x read", "residual"),
        ("MatMul", "residual f", "inner"),
        ("Relu", "inner", "positive"),
        ("MatMul", "positive g", "outer"),
        ("Add", "residual outer", "y"),
    ]
    nodes = [
        helper.make_node(op, read.split(), [made], name=f"node_{made}")
        for op, read, made in stated
    ]
    nodes[3].attribute.append(helper.make_attribute("perm", [0, 2, 1]))
    saved(path, nodes, [["n", 8, width]] * 2, weights)
    return path, {"x": rng.normal(size=(COUNT, 8, width)).astype(np.float32)}


NETS = {"convnet": convnet, "attention": attention}


# Further optimizations fuse nodes that quantize into kernels on integers, whose sums overflow
# 16 bits on CPUs that have AVX2 and no VNNI.
BASIC = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC


def outputs(path: Path, data: dict[str, Any], level: Any = BASIC) -> NDArray[np.float64]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    found: Any = session.run(None, data)
    return np.asarray(found[0], np.float64)


def error(path: Path, low: Path, data: dict[str, Any], level: Any = BASIC) -> float:
    """The relative error that the engine gives."""
    right = outputs(path, data, level)
    return float(np.linalg.norm(outputs(low, data, level) - right) / np.linalg.norm(right))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("net", NETS)
def test_the_error_is_the_engine_s_and_the_first_op_named_gains_most(
    net: str, way: str, tmp_path: Path
) -> None:
    path, data = NETS[net](tmp_path / "net.onnx")
    low, other = tmp_path / "low.onnx", tmp_path / "other.onnx"
    quantize_static(path, low, Reader(data), **WAYS[way])
    whole = error(path, low, data)
    found = finecast.blame(path, low, data=data, max_error=whole / 100)
    assert found.value == pytest.approx(whole, rel=0.02)
    assert found.first is None
    assert not found.warnings
    gains: dict[str, float] = {}
    for node in onnx.load(path).graph.node:
        quantize_static(path, other, Reader(data), nodes_to_exclude=[node.name], **WAYS[way])
        gains[node.name] = 1 - (error(path, other, data) / whole) ** 2
    best = max(gains, key=lambda n: gains[n])
    # In one way nothing gains alone: a quantizer keeps the codes that other ops read.
    if gains[best] > NOISE:
        assert next(iter(found.largest_shares)) == best
    else:
        assert (net, way) == ("convnet", "qdq by channel, signed")


@pytest.mark.parametrize("net", NETS)
def test_products_of_dynamic_codes_are_named_as_int8(net: str, tmp_path: Path) -> None:
    path, data = NETS[net](tmp_path / "net.onnx")
    low = tmp_path / "low.onnx"
    quantize_dynamic(path, low)
    whole = error(path, low, data)
    found = finecast.blame(path, low, data=data, max_error=whole / 100)
    assert found.value == pytest.approx(whole, rel=0.02)
    assert found.first is None
    kinds = {c.format for c in found.culprits if "Conv" in c.op or "Gemm" in c.op}
    assert kinds <= {"int8"}
    assert found.largest_shares


FOLDED = {
    "Relu then Clip": [("Relu", "c r"), ("Clip", "r low high z")],
    "turned": [("Transpose", "c t"), ("Relu", "t r"), ("Transpose", "r z")],
    "Relu6": [("Clip", "c low six z")],
}


@pytest.mark.parametrize("way", ["qdq", "qdq by channel, signed"])
@pytest.mark.parametrize("chain", FOLDED)
def test_no_value_before_a_folded_clip_is_called_wrong(
    chain: str, way: str, tmp_path: Path
) -> None:
    """It was compared with what the clip gives: "first wrong: an error of 1.4"."""
    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {"low": 0.0, "high": 1.0, "six": 6.0}
    nodes: list[onnx.NodeProto] = []
    for k in range(2):
        weights[f"w{k}"] = rng.normal(size=(8, 8, 1, 1)) / np.sqrt(8)
        stated = [("Conv", f"{'x' if k == 0 else 'z0'} w{k} c"), *FOLDED[chain]]
        for op, values in stated:
            names = [v + str(k) if v in "crtz" else v for v in values.split()]
            turned: dict[str, Any] = {"perm": [0, 3, 2, 1]} if op == "Transpose" else {}
            nodes.append(
                helper.make_node(
                    op, names[:-1], names[-1:], name=f"{op}_{names[-1]}", **turned
                )
            )
    weights["v"] = rng.normal(size=(8, 5))
    nodes += [
        helper.make_node("GlobalAveragePool", ["z1"], ["mean"], name="mean"),
        helper.make_node("Flatten", ["mean"], ["flat"], name="flat"),
        helper.make_node("MatMul", ["flat", "v"], ["y"], name="head"),
    ]
    net = saved(tmp_path / "net.onnx", nodes, [["n", 8, 6, 6], ["n", 5]], weights)
    data = {"x": rng.normal(size=(COUNT, 8, 6, 6)).astype(np.float32)}
    low = tmp_path / "low.onnx"
    quantize_static(net, low, Reader(data), **WAYS[way])
    found = finecast.blame(net, low, data=data, max_error=1e-4)
    assert found.first is None
    # The engine takes turns in front of codes and behind them out, and rounds less.
    level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert found.value == pytest.approx(error(net, low, data, level), rel=0.02)
    assert "Conv_c1" in {*found.largest_shares} or "Conv_c0" in {*found.largest_shares}


def test_scales_by_channel_of_an_old_opset_are_read(tmp_path: Path) -> None:
    """Before opset 13 only ops on codes have them, not DequantizeLinear."""
    path, low = tmp_path / "net.onnx", tmp_path / "low.onnx"
    text = """
    <ir_version: 7, opset_import: ["" : 11]>
    net (float[n, 2, 4, 4] x) => (float[n, 2, 4, 4] y)
    <float[2,2,1,1] w = {1, 0.5, 0.02, -0.01}> {
      a = Conv(x, w)
      y = Relu(a)
    }"""
    onnx.save(onnx.parser.parse_model(text), path)
    data = {"x": np.random.default_rng(0).normal(size=(32, 2, 4, 4)).astype(np.float32)}
    quantize_static(path, low, Reader(data), **WAYS["qoperator by channel"])
    assert onnx.load(low).opset_import[0].version == 11
    assert finecast.blame(path, low, data=data).passed
