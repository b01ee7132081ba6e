"""Counts of operations and bytes, against counts by hand or by loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import pytest

from finecast.graph import Attribute, Dim, Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.ops import FlopRule, lookup
from finecast.ops.flops import (
    COUNTS,
    NORM_FLOPS,
    SOFTMAX_FLOPS,
    TRANSCENDENTAL_FLOPS,
    bytes_moved,
    flops,
    port_formats,
    resolve_shape,
)

Shape = tuple[Dim, ...] | None


def one_node(
    native: str,
    inputs: Sequence[Shape | str],
    outputs: Sequence[Shape],
    attributes: Mapping[str, Attribute] | None = None,
    dtypes: Mapping[int, str] | None = None,
) -> Graph:
    """A graph of one node; an input that is a string is absent."""
    shapes = [s for s in inputs if not isinstance(s, str)] + list(outputs)
    dtypes = dtypes or {}
    values = tuple(
        Value(id=i, name=f"v{i}", dtype=dtypes.get(i, "fp32"), shape=s)
        for i, s in enumerate(shapes)
    )
    free = iter(range(len(values)))
    ids_in = tuple(None if isinstance(s, str) else next(free) for s in inputs)
    ids_out = tuple(next(free) for _ in outputs)

    def follows(index: int | None) -> bool:
        return index is not None and values[index].dtype == "fp32"

    node = Node(
        id=0,
        name="n",
        op=lookup(native).name,
        native=native,
        inputs=ids_in,
        outputs=ids_out,
        follows_in=tuple(follows(i) for i in ids_in),
        follows_out=tuple(follows(i) for i in ids_out),
        format=Format.FP32,
        attributes=attributes or {},
    )
    return Graph(nodes=(node,), values=values)


def count(
    native: str,
    inputs: Sequence[Shape | str],
    outputs: Sequence[Shape],
    attributes: Mapping[str, Attribute] | None = None,
) -> float | None:
    graph = one_node(native, inputs, outputs, attributes)
    return flops(graph, graph.nodes[0])


def moved(graph: Graph, formats: Mapping[int, Format] | None = None) -> float | None:
    return bytes_moved(graph, graph.nodes[0], formats)


def test_every_rule_has_a_count() -> None:
    assert set(COUNTS) == set(FlopRule)


@pytest.mark.parametrize(
    ("a", "b", "out", "expected"),
    [
        ((3, 4), (4, 5), (3, 5), 2 * 3 * 4 * 5),
        ((7, 3, 4), (4, 5), (7, 3, 5), 2 * 7 * 3 * 4 * 5),
        ((2, 1, 3, 4), (6, 4, 5), (2, 6, 3, 5), 2 * 12 * 3 * 4 * 5),
        ((4,), (4, 5), (5,), 2 * 4 * 5),
        ((3, 4), (4,), (3,), 2 * 3 * 4),
        ((4,), (4,), (), 2 * 4),
        ((0, 4), (4, 5), (0, 5), 0),
    ],
)
def test_matmul(a: Shape, b: Shape, out: Shape, expected: int) -> None:
    assert count("onnx::MatMul", [a, b], [out]) == expected


@pytest.mark.parametrize(
    ("a", "attributes"),
    [
        ((7, 3, 4), {}),
        ((7, 4, 3), {"transA": 1}),
        ((3, 7, 4), {"transBatchA": 1}),
        ((4, 7, 3), {"transA": 1, "transBatchA": 1}),
    ],
)
def test_fused_matmul_transposed(a: Shape, attributes: dict[str, Attribute]) -> None:
    got = count("com.microsoft::FusedMatMul", [a, (7, 4, 5)], [(7, 3, 5)], attributes)
    assert got == 2 * 7 * 3 * 4 * 5


@pytest.mark.parametrize(("a", "trans"), [((3, 4), 0), ((4, 3), 1)])
def test_gemm(a: Shape, trans: int) -> None:
    assert count("onnx::Gemm", [a, (4, 5), (5,)], [(3, 5)], {"transA": trans}) == 120


def test_addmm_has_its_bias_first() -> None:
    assert count("aten::addmm", [(5,), (3, 4), (4, 5)], [(3, 5)]) == 120


def test_quantized_weights_count_as_the_product_they_stand_for() -> None:
    got = count("com.microsoft::MatMulNBits", [(2, 3, 64), (5, 2, 16), (10,)], [(2, 3, 5)])
    assert got == 2 * 2 * 3 * 64 * 5


def conv_by_loops(image: int, channels: int, group: int, out: int, kernel: int) -> int:
    """Multiply-adds of an unpadded square convolution, counted one by one."""
    side = image - kernel + 1
    total = 0
    for _ in product(range(out), range(side), range(side)):
        total += (channels // group) * kernel * kernel
    return 2 * total


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("native", ["onnx::Conv", "com.microsoft::FusedConv"])
def test_conv_with_groups(native: str, group: int) -> None:
    weights = (8, 4 // group, 3, 3)
    got = count(native, [(1, 4, 6, 6), weights], [(1, 8, 4, 4)], {"group": group})
    assert got == conv_by_loops(6, 4, group, 8, 3)


def test_conv_transpose_mirrors_conv() -> None:
    # The transpose of a convolution has the same products.
    forward = count("onnx::Conv", [(2, 4, 6, 6), (8, 4, 3, 3)], [(2, 8, 4, 4)])
    back = count("onnx::ConvTranspose", [(2, 8, 4, 4), (8, 4, 3, 3)], [(2, 4, 6, 6)])
    assert forward == back


@pytest.mark.parametrize(("native", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
@pytest.mark.parametrize("directions", [1, 2])
def test_recurrent(native: str, gates: int, directions: int) -> None:
    steps, batch, size, hidden = 5, 2, 3, 7
    got = count(
        f"onnx::{native}",
        [
            (steps, batch, size),
            (directions, gates * hidden, size),
            (directions, gates * hidden, hidden),
        ],
        [(steps, directions, batch, hidden)],
    )
    assert got == 2 * steps * batch * directions * gates * hidden * (size + hidden)


@pytest.mark.parametrize(("native", "gates", "states"), [("lstm", 4, 2), ("gru", 3, 1)])
def test_recurrent_layers_of_aten(native: str, gates: int, states: int) -> None:
    batch, steps, size, hidden = 2, 5, 3, 7
    state, bias = (1, batch, hidden), (gates * hidden,)
    inputs = [(batch, steps, size), *[state] * states]
    inputs += [(gates * hidden, size), (gates * hidden, hidden), bias, bias]
    got = count(f"aten::{native}", inputs, [(batch, steps, hidden)])
    assert got == 2 * steps * batch * gates * hidden * (size + hidden)


def test_attention_in_both_layouts() -> None:
    batch, heads, queries, keys, size = 2, 3, 5, 7, 4
    expected = 2 * (2 * batch * heads * queries * keys * size)
    four = count(
        "onnx::Attention",
        [(batch, heads, queries, size), *[(batch, heads, keys, size)] * 2],
        [(batch, heads, queries, size)],
    )
    three = count(
        "onnx::Attention",
        [(batch, queries, heads * size), *[(batch, keys, heads * size)] * 2],
        [(batch, queries, heads * size)],
    )
    assert four == three == expected


def test_attention_counts_the_cache() -> None:
    step, past = (1, 2, 1, 4), (1, 2, 9, 4)
    got = count("onnx::Attention", [step, step, step, "none", past, past], [step])
    assert got == 2 * 2 * 2 * 10 * 4


def test_contrib_attentions_agree_on_the_same_problem() -> None:
    batch, tokens, width, heads = 2, 5, 12, 3
    flat, cache = (batch, tokens, width), (batch, heads, tokens, width // heads)
    core = 2 * 2 * batch * tokens * tokens * width
    assert count("com.microsoft::MultiHeadAttention", [flat] * 3, [flat]) == core
    packed = (batch, tokens, heads, 3, width // heads)
    assert count("com.microsoft::MultiHeadAttention", [packed], [flat]) == core
    split = [flat, cache, cache]
    assert count("com.microsoft::MultiHeadAttention", split, [flat]) == core
    grouped = count("com.microsoft::GroupQueryAttention", [flat] * 3, [flat, cache, cache])
    assert grouped == core
    fused = count("com.microsoft::Attention", [flat, (width, 3 * width)], [flat])
    assert fused == core + 2 * batch * tokens * width * 3 * width


@pytest.mark.parametrize(
    ("equation", "shapes", "out", "expected"),
    [
        ("ij,jk->ik", [(3, 4), (4, 5)], (3, 5), 2 * 3 * 4 * 5),
        ("b...i, b...i -> b...", [(2, 6, 7, 3), (2, 1, 7, 3)], (2, 6, 7), 2 * 2 * 6 * 7 * 3),
        ("ii->", [(4, 4)], (), 4),
        ("i,j,k", [(2,), (3,), (4,)], (2, 3, 4), 3 * 24),
    ],
)
def test_einsum(equation: str, shapes: list[Shape], out: Shape, expected: int) -> None:
    assert count("onnx::Einsum", shapes, [out], {"equation": equation}) == expected


def test_einsum_that_does_not_fit_its_shapes_is_unknown() -> None:
    assert count("onnx::Einsum", [(2, 3, 4)], [(2,)], {"equation": "ij->i"}) is None


@pytest.mark.parametrize(
    ("native", "inputs", "outputs", "attributes", "expected"),
    [
        ("onnx::Add", [(4, 1), (3,)], [(4, 3)], {}, 12),
        ("onnx::Exp", [(4, 3)], [(4, 3)], {}, 12 * TRANSCENDENTAL_FLOPS),
        ("onnx::Softmax", [(4, 3)], [(4, 3)], {}, 12 * SOFTMAX_FLOPS),
        ("onnx::LayerNormalization", [(4, 3), (3,)], [(4, 3)], {}, 12 * NORM_FLOPS),
        ("onnx::ReduceMean", [(4, 3)], [(4, 1)], {}, 12),
        ("onnx::MaxPool", [(1, 2, 4, 4)], [(1, 2, 2, 2)], {"kernel_shape": (2, 2)}, 32),
        ("onnx::GlobalAveragePool", [(1, 2, 4, 4)], [(1, 2, 1, 1)], {}, 32),
        ("onnx::Transpose", [(4, 3)], [(3, 4)], {}, 0),
        ("onnx::Cast", [(4, 3)], [(4, 3)], {}, 0),
    ],
)
def test_other_ops(
    native: str,
    inputs: list[Shape],
    outputs: list[Shape],
    attributes: dict[str, Attribute],
    expected: float,
) -> None:
    assert count(native, inputs, outputs, attributes) == expected


@pytest.mark.parametrize(
    ("native", "inputs", "outputs"),
    [
        ("onnx::MatMul", [("batch", 4), (4, 5)], [("batch", 5)]),
        ("onnx::MatMul", [None, (4, 5)], [(3, 5)]),
        ("onnx::MatMul", [], [(3, 5)]),
        ("onnx::MaxPool", [(1, 2, 4, 4)], [(1, 2, 2, 2)]),  # without its kernel_shape
        ("com.microsoft::MoE", [(3, 4)], [(3, 4)]),  # a row without a count
        ("no.such::Op", [(3, 4)], [(3, 4)]),
    ],
)
def test_unknown_is_none(native: str, inputs: list[Shape], outputs: list[Shape]) -> None:
    assert count(native, inputs, outputs) is None


def test_observed_shapes_win() -> None:
    graph = one_node("onnx::MatMul", [("batch", 4), (4, 5)], [("batch", 5)])
    node = graph.nodes[0]
    observed = {0: (3, 4), 2: (3, 5)}
    assert flops(graph, node, observed) == 120
    assert bytes_moved(graph, node) is None
    assert bytes_moved(graph, node, shapes=observed) == 4 * (12 + 20 + 15)
    assert resolve_shape(graph.values[0], observed) == (3, 4)
    assert resolve_shape(graph.values[0]) is None


def test_bytes_follow_the_format_only_where_the_port_does() -> None:
    graph = one_node("onnx::Gather", [(10, 8), (3,)], [(3, 8)], dtypes={1: "int64"})
    node = graph.nodes[0]
    assert moved(graph) == 4 * 24 + 8 * 3 + 4 * 24  # picks: reads what it writes
    assert port_formats(graph, node, Format.BF16) == {0: Format.BF16, 2: Format.BF16}
    assert moved(graph, port_formats(graph, node, Format.BF16)) == 2 * 24 + 8 * 3 + 2 * 24


def test_tf32_moves_as_much_as_fp32() -> None:
    graph = one_node("onnx::Relu", [(4, 3)], [(4, 3)])
    assert moved(graph, port_formats(graph, graph.nodes[0], Format.TF32)) == moved(graph) == 96


def test_an_input_used_twice_is_read_once() -> None:
    graph = one_node("onnx::Mul", [(4, 3)], [(4, 3)])
    node = replace(graph.nodes[0], inputs=(0, 0), follows_in=(True, True))
    assert bytes_moved(graph, node) == 96


def test_views_move_nothing_even_if_unknown() -> None:
    assert moved(one_node("onnx::Reshape", [None, (2,)], [None])) == 0


def test_types_without_a_size_are_unknown() -> None:
    assert moved(one_node("onnx::Identity", [(2,)], [(2,)], dtypes={0: "string"})) == 0
    assert moved(one_node("onnx::Concat", [(2,)], [(2,)], dtypes={0: "string"})) is None
    assert moved(one_node("onnx::And", [(2,)], [(2,)], dtypes={0: "bool", 1: "bool"})) == 4
