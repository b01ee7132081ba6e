"""Ops that engines run on integers in quantized regions keep fp32; others may be low."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from finecast.engines import installed
from finecast.engines.base import cpus
from finecast.rules import Ruling
from finecast.rules.coordinates import COORDINATES
from finecast.rules.quantized import QUANTIZED
from tests.frontends import tools

Judged = Callable[..., dict[str, Ruling | None]]

SCALES = "float s = {0.05}, int8 z = {0}"


def kept(judged: Judged, text: str, folder: Path) -> set[str]:
    model = tools.parse(text.replace("SCALES", SCALES))
    weights = np.random.default_rng(0).integers(-100, 100, (4, 4)).astype(np.int8)
    model.graph.initializer.append(tools.tensor("w", weights, np.int8))
    model.graph.initializer.append(tools.tensor("f", np.full((4, 4), 0.1)))
    graph = tools.graph_of(model, folder)
    return {n for n, v in judged(QUANTIZED, graph, policy="all:bf16").items() if v} - {
        n.name for n in graph.nodes if n.op in ("quantize", "dequantize")
    }


def test_between_dequantize_and_quantize(judged: Judged, tmp_path: Path) -> None:
    text = """g (float[2,4] x) => (float[2,4] y) <SCALES> {
      q = QuantizeLinear(x, s, z)
      a = DequantizeLinear(q, s, z)
      b = DequantizeLinear(w, s, z)
      [product] m = MatMul(a, b)
      [relu] r = Relu(m)
      q2 = QuantizeLinear(r, s, z)
      c = DequantizeLinear(q2, s, z)
      [softmax] p = Softmax(c)
      [float] h = MatMul(p, f)
      [tanh] t = Tanh(h)
      q3 = QuantizeLinear(t, s, z)
      y = DequantizeLinear(q3, s, z)
    }"""
    assert kept(judged, text, tmp_path) == {"product", "relu"}


@pytest.mark.parametrize("after", ["Relu", "Softmax"])
def test_weights_that_rest_in_integers(judged: Judged, tmp_path: Path, after: str) -> None:
    text = f"""g (float[2,4] x) => (float[2,4] y) <SCALES> {{
      [before] h = Tanh(x)
      b = DequantizeLinear(w, s, z)
      [moved] t = Transpose(b)
      [product] m = MatMul(h, t)
      [after] y = {after}(m)
    }}"""
    assert kept(judged, text, tmp_path) == {"product", "moved"}


def test_integers_that_a_product_sums_are_scaled_in_fp32(
    judged: Judged, tmp_path: Path
) -> None:
    text = """g (float[2,4] x) => (float[2,4] y) <SCALES, float[4] bias = {1,2,3,4}> {
      [before] h = Tanh(x)
      [quantize] q, qs, qz = DynamicQuantizeLinear(h)
      [scales] both = Mul(qs, s)
      [product] i = MatMulInteger(q, w, qz, z)
      [cast] c = Cast<to=1>(i)
      [scaled] m = Mul(c, both)
      [biased] a = Add(m, bias)
      [after] r = Add(a, x)
      [last] y = Relu(r)
    }"""
    assert kept(judged, text, tmp_path) - {"quantize"} == {
        *("scales", "cast", "scaled", "biased")
    }
    model = tools.parse(text.replace("SCALES", SCALES))
    model.graph.initializer.append(tools.tensor("w", np.ones((4, 4)), np.int8))
    positions = judged(COORDINATES, tools.graph_of(model, tmp_path), policy="all:bf16")
    assert not any(positions.values())  # sums are no positions: what follows may be low


@pytest.mark.skipif(not installed("openvino"), reason="needs OpenVINO")
@pytest.mark.skipif(cpus() == 1, reason="on one core OpenVINO fuses all into another kernel")
def test_openvino_still_runs_int8_kernels(tmp_path: Path) -> None:
    import openvino

    text = f"""g (float[2,4] x) => (float[2,4] y) <{SCALES}> {{
      q = QuantizeLinear(x, s, z)
      a = DequantizeLinear(q, s, z)
      b = DequantizeLinear(w, s, z)
      [product] m = MatMul(a, b)
      q2 = QuantizeLinear(m, s, z)
      c = DequantizeLinear(q2, s, z)
      [float] h = MatMul(c, f)
      [softmax] y = Softmax(h)
    }}"""
    model = tools.parse(text)
    weights = np.random.default_rng(0).integers(-100, 100, (4, 4)).astype(np.int8)
    model.graph.initializer.append(tools.tensor("w", weights, np.int8))
    model.graph.initializer.append(tools.tensor("f", np.full((4, 4), 0.1)))
    _, plan, _ = tools.convert(model, tmp_path, "all:bf16")
    assert tools.formats(plan)["softmax"] == "bf16"
    runs = [
        openvino.Core()
        .compile_model(tmp_path / name, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        .get_runtime_model()
        for name in ("out_source.onnx", "out.onnx")
    ]
    kernels = [
        [
            op.get_rt_info()["runtimePrecision"].astype(str)
            for op in run.get_ordered_ops()
            if op.get_rt_info()["layerType"].astype(str) in ("FullyConnected", "MatMul")
        ]
        for run in runs
    ]
    assert [k[0] for k in kernels] == ["i8", "i8"]
