"""Nodes that round give what the arrays' functions give, bit for bit in the normal range."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray

from finecast.frontends.onnx.statements import RoundOps
from finecast.numbers.formats import FLOATS, Format
from finecast.numbers.roundmodes import Rounder, Rounding, convert

Floats = NDArray[np.float32]
LOW = [f for f in FLOATS if f is not Format.FP32]
# Beyond it formats of fp32's range may pass unrounded.
LIMIT = 2.0**100


def in_graph(x: Floats, how: Rounder, offset: int = 0) -> Floats:
    value = ir.Value(name="x", shape=ir.Shape([None]), type=ir.TensorType(ir.DataType.FLOAT))
    start = ir.Value(name="o", shape=ir.Shape(()), type=ir.TensorType(ir.DataType.INT64))
    constants: list[ir.Value] = []
    nodes, y = RoundOps(register=constants.append, offset=lambda: start).round(value, how, "v")
    y.name = "y"
    graph = ir.Graph(
        [value, start], [y], nodes=nodes, initializers=constants, opset_imports={"": 17}
    )
    model = ir.to_proto(ir.Model(graph, ir_version=9)).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
    found: Any = session.run(None, {"x": x, "o": np.array(offset)})[0]
    return np.asarray(found, dtype=np.float32)


def numbers() -> Floats:
    rng = np.random.default_rng(0)
    any_bits = rng.integers(0, 1 << 32, 1 << 15, dtype=np.uint64).astype(np.uint32)
    spread = rng.standard_normal(1 << 15) * np.exp2(rng.integers(-30, 20, 1 << 15))
    halves = np.arange(1 << 15, dtype=np.uint16).view(np.float16).astype(np.float64)
    halves = halves[np.isfinite(halves)]
    parts = [
        any_bits.view(np.float32),
        spread,
        halves,
        -(halves[:-1] + halves[1:]) / 2,
        [0.0, -0.0, np.inf, -np.inf, np.nan],
    ]
    return np.concatenate([np.asarray(p, dtype=np.float32) for p in parts])


@pytest.mark.parametrize("fmt", LOW, ids=lambda f: f.label)
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("mode", [m for m in Rounding if m is not Rounding.STOCHASTIC])
def test_equals_the_arrays_function(fmt: Format, mode: Rounding, saturate: bool) -> None:
    x = numbers()
    how = Rounder(format=fmt, rounding=mode, saturate=saturate)
    got, expected = in_graph(x, how), convert(x, how)
    magnitude = np.abs(x)
    inside = (magnitude >= fmt.smallest_normal) & (magnitude < LIMIT)
    inside |= (magnitude == 0) | ~np.isfinite(x)
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    assert np.all(same[inside]), x[inside & ~same][:5]


@pytest.mark.parametrize("fmt", LOW, ids=lambda f: f.label)
def test_stochastic_takes_a_neighbour_and_is_unbiased(fmt: Format) -> None:
    how = Rounder(format=fmt, rounding=Rounding.STOCHASTIC, seed=3)
    down = Rounder(format=fmt, rounding=Rounding.TOWARD_ZERO)
    exact = convert(numbers()[(1 << 15) : (1 << 16)], down)
    exact = exact[np.isfinite(exact) & (np.abs(exact) < fmt.max)]
    assert np.array_equal(in_graph(exact, how), exact)
    x = np.full(40_000, 1 + 0.3 * fmt.epsilon, dtype=np.float32)
    got = in_graph(x, how)
    assert set(np.unique(got)) == {np.float32(1), np.float32(1 + fmt.epsilon)}
    # four standard deviations of a share of 0.3, and a draw's own step of 2^-12
    assert abs(float(np.mean(got > 1)) - 0.3) < 4 * np.sqrt(0.21 / len(x)) + 2.0**-12


def test_stochastic_draws_go_by_the_index_in_the_stream() -> None:
    how = Rounder(format=Format.BF16, rounding=Rounding.STOCHASTIC, seed=3)
    x = np.linspace(1, 2, 1000, dtype=np.float32)
    whole = in_graph(x, how)
    parts = [in_graph(x[:300], how), in_graph(x[300:], how, offset=300)]
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("fmt", [Format.FP16, Format.FP8_E5M2], ids=lambda f: f.label)
def test_flush(fmt: Format) -> None:
    x = np.array([1, -0.5, 0.25, -2], dtype=np.float32) * np.float32(fmt.smallest_normal)
    got = in_graph(x, Rounder(format=fmt, flush_subnormals=True))
    assert got.tolist() == [x[0], 0, 0, x[3]]
