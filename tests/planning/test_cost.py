"""Cost models: the roofline's two sides, measured times, casts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.devices.targets import (
    EngineRole,
    EngineSpec,
    Relayout,
    Target,
    list_targets,
    load_target,
)
from finecast.graph import ConstantStats, Graph, Node, Value
from finecast.numbers.formats import FLOATS, Format
from finecast.ops import OpKind, lookup
from finecast.planning.cost import CostModel, MeasuredCost, RooflineCost

# Round figures: 1 TFLOPS in fp32 and 4 in bf16, 100 GB/s, 1 us an op, 2 us a cast.
MATMUL = EngineSpec(rates_tflops={Format.FP32: 1.0, Format.BF16: 4.0})
VECTOR = EngineSpec(rates_tflops={Format.FP32: 0.5}, runs_as={Format.BF16: Format.FP32})
TARGET = Target(
    name="toy",
    description="round figures",
    unit="one",
    engines={EngineRole.MATMUL: MATMUL, EngineRole.VECTOR: VECTOR},
    bandwidth_gb_s=100.0,
    op_overhead_s=1e-6,
    cast_overhead_s=2e-6,
    free_casts=False,
    relayouts=(Relayout.BYTE_MOVE,),
    saturate_infinity=False,
    saturating_fp8=False,
    stochastic_rounding=False,
)


def value(
    index: int, shape: tuple[int | str, ...] | None, constant: ConstantStats | None = None
) -> Value:
    return Value(id=index, name=f"v{index}", dtype="fp32", shape=shape, constant=constant)


def graph_of(native: str, *shapes: tuple[int | str, ...] | None) -> Graph:
    """One node; the last shape is its output's."""
    last = len(shapes) - 1
    node = Node(
        id=0,
        name="n",
        op=lookup(native).name,
        native=native,
        inputs=tuple(range(last)),
        outputs=(last,),
        follows_in=(True,) * last,
        follows_out=(True,),
        format=Format.FP32,
    )
    return Graph(nodes=(node,), values=tuple(value(i, s) for i, s in enumerate(shapes)))


def node_s(model: CostModel, graph: Graph, fmt: Format) -> float:
    return model.node_time_s(graph, graph.nodes[0], fmt)


def test_compute_bound() -> None:
    graph = graph_of("onnx::MatMul", (1000, 1000), (1000, 1000), (1000, 1000))
    model = RooflineCost(target=TARGET)
    assert node_s(model, graph, Format.FP32) == pytest.approx(2e9 / 1e12 + 1e-6)
    assert node_s(model, graph, Format.BF16) == pytest.approx(2e9 / 4e12 + 1e-6)


def test_memory_bound() -> None:
    graph = graph_of("onnx::Add", (1000, 1000), (1000, 1000), (1000, 1000))
    model = RooflineCost(target=TARGET)
    assert node_s(model, graph, Format.FP32) == pytest.approx(12e6 / 100e9 + 1e-6)
    assert node_s(model, graph, Format.BF16) == pytest.approx(6e6 / 100e9 + 1e-6)


def test_the_vector_engine_stands_in_for_the_scalar_one() -> None:
    assert TARGET.engine_for(OpKind.SOFTMAX) is VECTOR


def test_a_view_is_free_and_an_impossible_format_is_infinite() -> None:
    model = RooflineCost(target=TARGET)
    assert node_s(model, graph_of("onnx::Reshape", (6,), (2, 3)), Format.FP32) == 0
    graph = graph_of("onnx::Add", (6,), (6,), (6,))
    assert node_s(model, graph, Format.FP16) == math.inf


@pytest.mark.parametrize(
    ("fmt", "same"),
    [(Format.MXFP4, Format.FP32), (Format.MXFP4_WEIGHTS_BF16, Format.BF16)],
)
def test_an_addition_beside_a_product_in_blocks_takes_the_time_of_its_result(
    fmt: Format, same: Format
) -> None:
    model = RooflineCost(target=load_target("gfx950"))
    graph = graph_of("onnx::Add", (64, 512), (64, 512), (64, 512))
    assert node_s(model, graph, fmt) == node_s(model, graph, same) < math.inf


def test_symbolic_dims_count_as_1_or_as_observed() -> None:
    graph = graph_of("onnx::MatMul", ("batch", 1000), (1000, 1000), ("batch", 1000))
    one = RooflineCost(target=TARGET)
    seen = RooflineCost(target=TARGET, shapes={0: (1000, 1000), 2: (1000, 1000)})
    single = graph_of("onnx::MatMul", (1, 1000), (1000, 1000), (1, 1000))
    assert node_s(one, graph, Format.FP32) == node_s(one, single, Format.FP32)
    assert node_s(one, graph, Format.FP32) < node_s(seen, graph, Format.FP32)


def test_unknown_rank_leaves_the_overhead() -> None:
    graph = graph_of("onnx::Exp", None, None)
    assert node_s(RooflineCost(target=TARGET), graph, Format.FP32) == TARGET.op_overhead_s


def test_cast_moves_both_formats() -> None:
    model = RooflineCost(target=TARGET)
    wide = value(0, (1000, 1000))
    expected = 6e6 / 100e9 + 2e-6
    assert model.cast_time_s(wide, Format.FP32, Format.BF16) == pytest.approx(expected)
    assert model.cast_time_s(wide, Format.BF16, Format.FP32) == pytest.approx(expected)
    observed = replace(model, shapes={0: (1000, 1000)})
    symbolic = value(0, ("batch", 1000))
    assert observed.cast_time_s(symbolic, Format.FP32, Format.BF16) == pytest.approx(expected)


@pytest.mark.parametrize("model", [RooflineCost(target=TARGET), MeasuredCost(times_s={})])
def test_casts_that_cost_nothing(model: CostModel) -> None:
    wide = value(0, (1000, 1000))
    stats = ConstantStats(size=4, read=lambda: np.ones(4, dtype=np.float32))
    assert model.cast_time_s(wide, Format.FP32, Format.FP32) == 0
    assert model.cast_time_s(wide, Format.TF32, Format.FP32) == 0  # both stored as fp32
    assert model.cast_time_s(value(0, (2, 2), stats), Format.FP32, Format.BF16) == 0


def test_fp32_of_an_op_on_codes_has_a_price_where_it_was_timed_giving_codes() -> None:
    codes, fp32 = Format.INT8, Format.FP32
    wide = value(0, (1000, 1000))
    read_once, read_twice = replace(wide, uses=(1,)), replace(wide, uses=(1, 2))
    model = MeasuredCost(times_s={})
    assert model.cast_time_s(read_once, codes, fp32) == pytest.approx(3e6 / 10e9)
    # With several readers another kernel makes the codes; an output counts as a reader.
    given = replace(read_once, is_output=True)
    for read in (read_twice, given):
        assert model.cast_time_s(read, codes, fp32) == pytest.approx(12e-6 + 5e6 / 10e9)
    assert RooflineCost(target=TARGET).cast_time_s(read_twice, codes, fp32) == 0


def test_casts_at_ports_are_free() -> None:
    model = RooflineCost(target=replace(TARGET, free_casts=True))
    assert model.cast_time_s(value(0, (1000,)), Format.FP32, Format.BF16) == 0


def test_measured_times_by_node_name() -> None:
    graph = graph_of("onnx::Relu", (6,), (6,))
    model = MeasuredCost(times_s={Format.FP32: {"n": 3e-6}, Format.BF16: {}})
    assert node_s(model, graph, Format.FP32) == 3e-6
    assert node_s(model, graph, Format.BF16) == 0  # fused into another
    assert node_s(model, graph, Format.FP16) == math.inf


def test_a_measured_cast_takes_the_overhead_and_moves_both_formats() -> None:
    model = MeasuredCost(times_s={})
    cast_s = model.cast_time_s(value(0, (1000, 1000)), Format.FP32, Format.BF16)
    assert cast_s == pytest.approx(12e-6 + 6e6 / 10e9)
    seen = replace(model, shapes={0: (1000, 1000)})
    assert seen.cast_time_s(value(0, ("n",)), Format.FP32, Format.BF16) == cast_s


SIZES = st.integers(1, 4096)


@given(st.sampled_from(list_targets()), SIZES, SIZES, SIZES, st.sampled_from(FLOATS))
def test_no_narrower_format_is_slower_on_the_matmul_engine(
    name: str, m: int, k: int, n: int, fmt: Format
) -> None:
    target = load_target(name)
    model = RooflineCost(target=target)
    graph = graph_of("onnx::MatMul", (m, k), (k, n), (m, n))
    high, low = node_s(model, graph, Format.FP32), node_s(model, graph, fmt)
    assert high >= 0
    assert low <= high or low == math.inf
