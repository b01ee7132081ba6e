"""Ops computed from constants alone keep fp32; an op that only moves a constant does not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import helper

import finecast
from finecast.numbers.formats import Format
from finecast.rules import Ruling
from finecast.rules.folded import FOLDED, stored_bits
from tests.frontends.tools import model, run, tensor
from tests.graph.text import from_text

Judged = Callable[..., dict[str, Ruling | None]]


def kept(judged: Judged, graph: str) -> set[str]:
    found = judged(FOLDED, graph, policy="all:bf16")
    return {name for name, verdict in found.items() if verdict is not None}


def test_a_standardized_weight(judged: Judged) -> None:
    graph = """
    input %0 x fp32[4, 8]
    constant %1 w fp32[8, 8] size=64 largest=1.0 smallest_nonzero=0.1
    node flat reshape onnx::Reshape fp32 (%1) -> (%2 a fp32[64])
    node mean reduce_mean onnx::ReduceMean fp32 (%2) -> (%3 b fp32[1])
    node centred sub onnx::Sub fp32 (%2, %3) -> (%4 c fp32[64])
    node back reshape onnx::Reshape fp32 (%4) -> (%5 d fp32[8, 8])
    node product matmul onnx::MatMul fp32 (%0, %5) -> (%6 e fp32[4, 8])
    output %6
    """
    assert kept(judged, graph) == {"flat", "mean", "centred"}


def test_what_reads_data_may_be_low(judged: Judged) -> None:
    graph = """
    input %0 x fp32[8, 8]
    constant %1 w fp32[8, 8] size=64 largest=1.0 smallest_nonzero=0.1
    node turned transpose onnx::Transpose fp32 (%1) -> (%2 a fp32[8, 8])
    node product matmul onnx::MatMul fp32 (%0, %2) -> (%3 b fp32[8, 8])
    node scaled mul onnx::Mul fp32 (%3, %1) -> (%4 c fp32[8, 8])
    output %4
    """
    assert kept(judged, graph) == set()


def test_integers_made_float_are_not_floats_computed_from_constants(judged: Judged) -> None:
    graph = """
    input %0 x fp32[8, 8]
    constant %1 w int8[8, 8] size=64
    constant %2 scale fp32[1] size=1 largest=0.5 smallest_nonzero=0.5
    node unpacked cast onnx::Cast fp32 (~%1) -> (%3 a fp32[8, 8])
    node scaled mul onnx::Mul fp32 (%3, %2) -> (%4 b fp32[8, 8])
    node product matmul onnx::MatMul fp32 (%0, %4) -> (%5 c fp32[8, 8])
    output %5
    """
    assert kept(judged, graph) == set()


def test_a_standardized_weight_is_rounded_once() -> None:
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("ReduceMean", ["w"], ["mean"]),
        helper.make_node("Sub", ["w", "mean"], ["centred"]),
        helper.make_node("Mul", ["centred", "gain"], ["weight"]),
        helper.make_node("MatMul", ["x", "weight"], ["y"]),
    ]
    constants = [tensor("w", rng.normal(30.0, size=(64, 8))), tensor("gain", np.full(8, 0.3))]
    net = model(nodes, {"x": [4, 64]}, {"y": [4, 8]}, constants)
    low = finecast.convert(net, policy="all:fp16", engine="onnxruntime").model
    assert isinstance(low, onnx.ModelProto)
    x = rng.normal(size=(4, 64)).astype(np.float32)
    want, got = run(net, x=x)[0], run(low, x=x)[0]
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    # Operand, weight and result. A mean of 30 in fp16 gave five times as much.
    assert error < np.sqrt(3) * Format.FP16.unit_roundoff


def test_the_integers_that_weights_are_decoded_from() -> None:
    graph = from_text("""
    input %0 x fp32[8, 8]
    constant %1 w uint4[8, 8] size=64
    constant %2 scale fp32[1] size=1 largest=0.5 smallest_nonzero=0.5
    constant %3 sizes int64[2] size=2
    node unpacked cast onnx::Cast - (~%1) -> (~%4 a fp32[8, 8])
    node scaled mul onnx::Mul - (~%4, ~%2) -> (~%5 b fp32[8, 8])
    node sized reshape onnx::Reshape - (~%5, ~%3) -> (~%6 c fp32[8, 8])
    node wide cast onnx::Cast - (~%3) -> (~%7 d fp32[2])
    node product matmul onnx::MatMul fp32 (%0, ~%6) -> (%8 e fp32[8, 8])
    output %8
    """)
    bits = {v.name: stored_bits(graph, v) for v in graph.values}
    assert {name for name, found in bits.items() if found == 4} == {"w", "a", "b", "c"}
    assert {bits[name] for name in ("x", "scale", "sizes", "d", "e")} == {None}
