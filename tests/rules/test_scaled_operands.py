"""Which operands and results are encoded, and which value they are moved from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from finecast.graph import ConstantStats, Graph, Value
from finecast.numbers.formats import Format
from finecast.rules.scaled_operands import (
    coded_result,
    factors,
    moved_by,
    origin,
    scaled_operands,
)
from tests.graph.text import from_text

NET = """\
input %0 x fp32[1, 4, 8, 8]
constant %1 w fp32[4, 4, 1, 1] size=16
constant %2 b fp32[4] size=4
constant %3 m fp32[4, 8] size=32
constant %4 zero fp32[] size=1
constant %5 one fp32[] size=1
constant %21 at int64[2] size=2
constant %27 wg fp32[4, 2, 1, 1, 1] size=8
node act relu onnx::Relu fp32 (%0) -> (%6 r fp32[1, 4, 8, 8])
node pool max_pool onnx::MaxPool fp32 (%6) -> (%7 p fp32[1, 4, 8, 8])
node turn transpose onnx::Transpose fp32 (%7) -> (%8 t fp32[1, 8, 8, 4])
node pad pad onnx::Pad fp32 (%7, ~_, %4) -> (%9 padded fp32[1, 4, 10, 10])
node fill pad onnx::Pad fp32 (%7, ~_, %5) -> (%10 filled fp32[1, 4, 10, 10])
node conv conv onnx::Conv fp32 (%7, %1, %2) -> (%11 c fp32[1, 4, 8, 8])
node groups group_conv openvino::GroupConvolution fp32 (%7, %27) -> (%26 gc fp32[1, 8, 8, 8])
node join add onnx::Add fp32 (%11, %7) -> (%12 j fp32[1, 4, 8, 8])
node bias add onnx::Add fp32 (%11, %2) -> (%13 k fp32[1, 4, 8, 8])
node sums add onnx::Add fp32 (%12, %7) -> (%14 l fp32[1, 4, 8, 8])
node mm matmul onnx::MatMul fp32 (%8, %3) -> (%15 y fp32[1, 8, 8, 8])
node both matmul onnx::MatMul fp32 (%8, %8) -> (%16 z fp32[1, 8, 8, 8])
node left matmul onnx::MatMul fp32 (%3, %8) -> (%17 v fp32[1, 8, 8, 8])
node computed gemm onnx::Gemm fp32 (%0, %25, %2) -> (%33 cg fp32[4, 4])
node soft softmax onnx::Softmax fp32 (%15) -> (%18 s fp32[1, 8, 8, 8])
node gemm gemm onnx::Gemm fp32 (%0, %3, %2) -> (%19 g fp32[4, 8])
node rows gather onnx::Gather fp32 (%3, ~%21) -> (%22 rows fp32[2, 8])
node columns gather onnx::Gather fp32 (%3, ~%21) -> (%23 cols fp32[4, 2]) {"axis": 1}
node behind gather onnx::Gather fp32 (%3, ~%21) -> (%28 behind fp32[4, 2]) {"axis": -1}
node seen gather onnx::Gather fp32 (%0, ~%21) -> (%24 seen fp32[2, 4, 8, 8])
node turned_mm matmul openvino::MatMul fp32 (%0, %3) -> (%25 w2 fp32[4, 4]) {"transB": 1}
node turned gemm onnx::Gemm fp32 (%0, %3, %2) -> (%20 h fp32[4, 4]) {"transB": 1}
node shape reshape onnx::Reshape fp32 (%2, ~%21) -> (%29 shaped fp32[4, 1, 1])
node shaped_bias add onnx::Add fp32 (%7, %29) -> (%30 sb fp32[1, 4, 8, 8])
node weights identity onnx::Identity fp32 (%3) -> (%31 same fp32[4, 8])
node kept_mm matmul onnx::MatMul fp32 (%8, %31) -> (%32 km fp32[1, 8, 8, 8])
output %14
output %18
"""


def net() -> Graph:
    found = from_text(NET.replace("~_", "_"))
    numbers = {"zero": 0.0, "one": 1.0}

    def filled(value: Value) -> Value:
        if value.name not in numbers:
            return value
        stats = ConstantStats(size=1, read=lambda: np.array(numbers[value.name], np.float32))
        return replace(value, constant=stats)

    return replace(found, values=tuple(map(filled, found.values)))


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("conv", {0: (), 1: (0,)}),  # the bias stays fp32
        ("mm", {0: (), 1: (1,)}),
        ("gemm", {0: (), 1: (1,)}),
        ("turned", {0: (), 1: (0,)}),
        ("groups", {0: (), 1: (0, 1)}),  # of four groups, each with two channels
        ("both", {0: (), 1: ()}),  # the second is a value, too
    ],
)
def test_products_store_a_value_and_weights_by_channel(
    name: str, axes: dict[int, tuple[int, ...]]
) -> None:
    graph = net()
    assert scaled_operands(graph, graph.find(name), Format.INT8) == axes


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("computed", "weights are not constant"),
        ("left", "first operand is a constant"),
        ("bias", "adds a constant"),
        ("shaped_bias", "adds a constant"),  # which the engine reshapes once
        ("kept_mm", "computed from constants, by weights: store the result"),
        ("sums", "not run in the kernel of a convolution"),
        ("soft", "no engine here runs softmax on integers"),
        ("join", "not run in the kernel of a convolution"),  # conv has two readers
    ],
)
def test_other_ops_do_not_run_on_integers(name: str, says: str) -> None:
    graph = net()
    with pytest.raises(ValueError, match=says):
        scaled_operands(graph, graph.find(name), Format.INT8)


def test_an_addition_to_a_convolution_of_its_own_stores_both_values() -> None:
    text = NET.replace(
        "node bias add onnx::Add fp32 (%11,", "node bias add onnx::Add fp32 (%7,"
    )
    graph = from_text(text.replace("~_", "_"))
    assert scaled_operands(graph, graph.find("join"), Format.INT8) == {0: (), 1: ()}


FACTORS = """\
input %0 x fp32[1, 4, 8]
constant %1 w fp32[8, 8] size=64
constant %2 m fp32[4, 4] size=16
node act relu onnx::Relu fp32 (%0) -> (%3 r fp32[1, 4, 8])
node turn transpose onnx::Transpose fp32 (%3) -> (%4 t fp32[1, 8, 4])
node other tanh onnx::Tanh fp32 (%3) -> (%5 h fp32[1, 4, 8])
node both matmul onnx::MatMul fp32 (%5, %4) -> (%6 z fp32[1, 4, 4])
node masked add onnx::Add fp32 (%6, %2) -> (%7 k fp32[1, 4, 4])
node soft softmax onnx::Softmax fp32 (%7) -> (%8 s fp32[1, 4, 4])
output %8
"""


def test_factors_are_what_products_of_two_values_alone_read() -> None:
    """Of a value that is moved on its way it is the origin; softmax is no product."""
    graph = from_text(FACTORS)
    found = [[graph.values[v].name for v in factors(graph, index)] for index in (0, 1)]
    assert found == [["h"], ["r"]]
    assert coded_result(graph, graph.find("both")) is None, "a mask is no bias"
    linear = "node mm matmul onnx::MatMul fp32 (%3, %1) -> (%9 y fp32[1, 4, 8])\noutput %9\n"
    shared = from_text(FACTORS.replace("output %8\n", linear))
    assert not factors(shared, 1)


def test_moved_values_have_the_origin_that_their_numbers_come_from() -> None:
    graph = net()
    by_name = {v.name: v for v in graph.values}
    origins = {name: origin(graph, by_name[name]).name for name in ("t", "p", "padded")}
    assert origins == dict.fromkeys(origins, "r"), "a relu changes the range"
    assert origin(graph, by_name["filled"]) is by_name["filled"], "it holds a 1 besides"
    assert moved_by(graph, graph.find("act")) is None


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("mm", {1: (1,)}),
        ("gemm", {1: (1,)}),
        ("turned", {1: (0,)}),
        ("turned_mm", {1: (0,)}),
        ("rows", {0: (0,)}),  # a scale for each row of the table
    ],
)
def test_weights_alone_are_those_of_products_and_rows(
    name: str, axes: dict[int, tuple[int, ...]]
) -> None:
    graph = net()
    assert scaled_operands(graph, graph.find(name), Format.INT8_WEIGHTS) == axes


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("conv", "no engine here computes conv from weights in int8_weights"),
        ("soft", "no engine here computes softmax from weights in int8_weights"),
        ("both", "weights are not constant"),
        ("columns", "does not look up rows"),
        ("behind", "does not look up rows"),
        ("seen", "the table is no constant"),
    ],
)
def test_other_ops_have_no_weights_of_codes(name: str, says: str) -> None:
    graph = net()
    with pytest.raises(ValueError, match=says):
        scaled_operands(graph, graph.find(name), Format.INT8_WEIGHTS)


RESULTS = """\
input %0 x fp32[1, 4, 8, 8]
constant %1 w fp32[4, 4, 1, 1] size=16
constant %2 b fp32[8] size=8
constant %3 m fp32[4, 8] size=32
node conv conv onnx::Conv fp32 (%0, %1) -> (%4 c fp32[1, 4, 8, 8])
node relu relu onnx::Relu fp32 (%4) -> (%5 r fp32[1, 4, 8, 8])
node twice conv onnx::Conv fp32 (%5, %1) -> (%6 t fp32[1, 4, 8, 8])
node one relu onnx::Relu fp32 (%6) -> (%7 o fp32[1, 4, 8, 8])
node join add onnx::Add fp32 (%6, %5) -> (%8 j fp32[1, 4, 8, 8])
node turn reshape onnx::Reshape fp32 (%8) -> (%9 k fp32[64, 4])
node mm matmul onnx::MatMul fp32 (%9, %3) -> (%10 p fp32[64, 8])
node bias add onnx::Add fp32 (%10, %2) -> (%11 q fp32[64, 8])
node soft softmax onnx::Softmax fp32 (%11) -> (%12 s fp32[64, 8])
node other matmul onnx::MatMul fp32 (%9, %3) -> (%22 ot fp32[64, 8])
node same identity onnx::Identity fp32 (%2) -> (%23 sb fp32[8])
node kept add onnx::Add fp32 (%22, %23) -> (%24 kb fp32[64, 8])
node then softmax onnx::Softmax fp32 (%24) -> (%25 th fp32[64, 8])
node bare matmul onnx::MatMul fp32 (%9, %3) -> (%13 u fp32[64, 8])
node gemm gemm onnx::Gemm fp32 (%9, %3) -> (%14 g fp32[64, 8])
node biased gemm onnx::Gemm fp32 (%9, %3, %2) -> (%15 h fp32[64, 8])
node without gemm onnx::Gemm fp32 (%9, %3, _) -> (%19 i fp32[64, 8])
node given conv onnx::Conv fp32 (%5, %1) -> (%20 v fp32[1, 4, 8, 8])
node last relu onnx::Relu fp32 (%20) -> (%21 l fp32[1, 4, 8, 8])
node six conv onnx::Conv fp32 (%5, %1) -> (%16 d fp32[1, 4, 8, 8])
node cut clip onnx::Clip fp32 (%16) -> (%17 e fp32[1, 4, 8, 8])
node after conv onnx::Conv fp32 (%17, %1) -> (%18 f fp32[1, 4, 8, 8])
output %18
output %7
output %12
output %13
output %14
output %15
output %19
output %20
"""


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("conv", "r"),  # behind its relu
        ("six", "e"),  # behind its clip
        ("twice", "t"),  # two ops read it, one of them a relu
        ("join", "j"),
        ("mm", "q"),  # behind its bias
        ("other", "kb"),  # a bias that the engine moves once
        ("bare", None),
        ("gemm", None),
        ("without", None),  # its bias is omitted
    ],
)
def test_kernels_with_a_bias_give_codes(name: str, result: str | None) -> None:
    graph = from_text(RESULTS)
    found = coded_result(graph, graph.find(name))
    assert (found.name if found is not None else None) == result


@pytest.mark.parametrize("name", ["biased", "given"])
def test_an_output_of_the_model_is_no_codes(name: str) -> None:
    """Also not if a relu reads it, too: the output is the value in front of the relu."""
    graph = from_text(RESULTS)
    with pytest.raises(ValueError, match="its result is an output of the model"):
        coded_result(graph, graph.find(name))
