"""Emulated layers whose sums are added up in an order, against loops of numpy's."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper, parser

from finecast.devices.emulation import Emulation, explicit_casts
from finecast.engines.emulator import (
    EmulatorEngine,
    EmulatorSession,
    exact_session,
    prepare,
    setting_of,
)
from finecast.frontends import onnx as frontend
from finecast.numbers.summation import Order, Scheme, orders
from finecast.rules.policy import Scope

Floats = NDArray[np.float32]
F32 = np.float32

# A convolution in groups, two products and a mean, with ops of the engine's in between.
NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[N, 4, 7, 6] x) => (float[N, 3] y, float[N, 6] m)
<int64[2] axes = {2, 3}>
{
    c = Conv<group = 2, strides = [2, 1], pads = [1, 0, 1, 2], dilations = [1, 2]>(x, w, b)
    r = Relu(c)
    m = ReduceMean<axes = [2, 3], keepdims = 0>(r)
    s = ReduceSum<keepdims = 0>(r, axes)
    h = Gemm<transB = 1, alpha = 0.5>(s, v, d)
    t = Tanh(h)
    k = MatMul(t, u)
    y = Add(k, e)
}"""
SHAPES = {"w": (6, 2, 3, 4), "b": (6,), "v": (5, 6), "d": (5,), "u": (5, 3), "e": (3,)}


def low(x: Floats, to: type = ml_dtypes.bfloat16) -> Floats:
    return x.astype(to).astype(F32)


@pytest.fixture
def weights() -> dict[str, Floats]:
    rng = np.random.default_rng(0)
    return {n: rng.standard_normal(s).astype(F32) for n, s in SHAPES.items()}


@pytest.fixture
def net(tmp_path: Path, weights: dict[str, Floats]) -> Path:
    model = parser.parse_model(NET)
    model.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    path = tmp_path / "net.onnx"
    onnx.save(model, path)
    return path


def session(model: Path, how: Emulation) -> EmulatorSession:
    prepared = prepare(frontend.load(model), how)
    fixed = setting_of(prepared.graph, how)
    return EmulatorEngine(emulation=how).session(prepared, fixed=fixed)


def total(terms: list[np.float32], order: Order) -> np.float32:
    """The sum in fp32, in blocks of 16 as sm80's spec states for bf16."""
    if order.scheme is Scheme.REVERSED:
        terms = terms[::-1]
    if order.scheme is Scheme.SHUFFLED:
        places = np.random.default_rng(order.seed).permutation(len(terms))
        terms = [terms[i] for i in places]
    if order.scheme is Scheme.BLOCKED:
        parts = [terms[i : i + 16] for i in range(0, len(terms), 16)]
        terms = [total(part, Order(scheme=Scheme.SEQUENTIAL)) for part in parts]
    if order.scheme is Scheme.PAIRWISE and len(terms) > 2:
        half = max(2**k for k in range(9) if 2**k < len(terms))
        terms = [total(terms[:half], order), total(terms[half:], order)]
    found = terms[0]
    for term in terms[1:]:
        found = F32(found + term)
    return found


def convolved(x: Floats, w: Floats, order: Order) -> Floats:
    x = np.pad(x, [(0, 0), (0, 0), (1, 1), (0, 2)])
    out = np.empty((len(x), 6, 4, 2), F32)
    for n, o, i, j in np.ndindex(out.shape):
        first = 0 if o < 3 else 2
        terms = [
            F32(x[n, first + c, 2 * i + p, j + 2 * q] * w[o, c, p, q])
            for c, p, q in product(range(2), range(3), range(4))
        ]
        out[n, o, i, j] = total(terms, order)
    return out


def multiplied(a: Floats, b: Floats, order: Order) -> Floats:
    out = np.empty((len(a), b.shape[1]), F32)
    for i, j in np.ndindex(out.shape):
        out[i, j] = total([F32(p * q) for p, q in zip(a[i], b[:, j], strict=True)], order)
    return out


def summed(r: Floats, order: Order) -> Floats:
    """Sums of a vector engine, whose blocks the spec does not state."""
    if order.scheme is Scheme.BLOCKED:
        order = Order(scheme=Scheme.SEQUENTIAL)
    flat = r.reshape(*r.shape[:2], -1)
    rows = [total([*flat[i, j]], order) for i, j in np.ndindex(flat.shape[:2])]
    return np.array(rows, F32).reshape(flat.shape[:2])


@pytest.mark.parametrize("order", orders(5, blocked=True), ids=lambda o: o.label)
def test_a_net_is_that_of_loops(net: Path, weights: dict[str, Floats], order: Order) -> None:
    x = np.random.default_rng(1).standard_normal((2, 4, 7, 6)).astype(F32)
    how = replace(explicit_casts("sm80"), scope=Scope.MATMULT, order=order)
    got = session(net, how).run({"x": x})
    r = np.maximum(
        convolved(low(x), low(weights["w"]), order) + weights["b"][:, None, None], 0
    )
    s = summed(r, order)
    assert np.array_equal(got["m"], s / F32(8))
    h = F32(0.5) * multiplied(low(s), low(weights["v"]).T, order) + weights["d"]
    # The engine's own Tanh, of the same numbers.
    tanh = helper.make_model(
        parser.parse_graph("g (float[N, 5] h) => (float[N, 5] t) { t = Tanh(h) }"),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    path = net.with_name("tanh.onnx")
    onnx.save(tanh, path)
    (t,) = exact_session(path).run({"h": h}).values()
    assert np.array_equal(
        got["y"], multiplied(low(np.asarray(t, F32)), low(weights["u"]), order) + weights["e"]
    )
