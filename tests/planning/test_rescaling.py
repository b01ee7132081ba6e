"""Rescaling by powers of two, and the factors of smoothing."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.rescaling import rescaling, smoothable, smoothed
from finecast.planning.scalable import sites
from finecast.rules.base import Reason
from finecast.rules.facts import ChannelFacts
from tests.planning import nets

CHAIN = """net (float[n, 4, 6, 6] x) => (float[n, 5, 6, 6] y) {
  [a] c = Conv (x, w, b) [ra] r = Relu (c)
  [d] e = Conv <group = 8> (r, k) [rd] s = Relu (e)
  [z] y = Conv (s, v)
}"""
SHAPES = {"w": (8, 4, 1, 1), "b": (8,), "k": (8, 1, 1, 1), "v": (5, 8, 1, 1)}
ROWS = """net (float[n, 16] u) => (float[n, 6] y, float[n, 16] z) {
  [norm] h = LayerNormalization (u, g, o) [q] y = MatMul (h, w) [id] z = Relu (h)
}"""
WHY = Reason(rule="rule", text="text")


def chain(**others: NDArray[np.float32]) -> Graph:
    return nets.prepared(CHAIN, nets.drawn(0, **SHAPES) | others).graph


def test_factors_become_powers_of_two_about_1() -> None:
    graph = chain()
    first = sites(graph)[0]
    factors = 6.0 * np.array([1, 1, 1, 1, 1, 4.2, 0.24, 1])
    assert rescaling(graph, first, factors, WHY).exponents.tolist() == [0] * 5 + [2, -2, 0]


def test_channels_without_a_factor_stay() -> None:
    graph = chain()
    first = sites(graph)[0]
    factors = np.array([1, 1, 1, 8, np.nan, 0, np.inf, 1])
    assert rescaling(graph, first, factors, WHY).exponents.tolist() == [0] * 3 + [3] + [0] * 4


def test_channels_that_would_not_come_back_stay() -> None:
    """Subnormal numbers lose digits when they are divided."""
    weights = nets.drawn(0, **SHAPES)["w"]
    weights[2, 0] = 3e-45
    graph = chain(w=weights)
    first = sites(graph)[0]
    factors = np.array([1, 1, 4, 4, 1, 1, 1, 1.0])
    assert rescaling(graph, first, factors, WHY).exponents.tolist() == [0, 0, 0, 2] + [0] * 4


def facts(array: NDArray[np.float64]) -> ChannelFacts:
    return ChannelFacts.of(array.astype(np.float32), -1)


@pytest.mark.parametrize("factor", [1, 100])
def test_a_channel_of_large_values_is_smoothed(factor: float) -> None:
    graph = nets.prepared(ROWS, nets.drawn(1, g=(16,), o=(16,), w=(16, 6))).graph
    product = next(n for n in graph.nodes if n.name == "q")
    (site,) = smoothable(graph, {product.id})
    assert site.maker is None  # the norm's result is read by another op, too
    rows = np.random.default_rng(0).standard_normal((200, 16))
    rows[:, 3] *= factor
    seen = {site.readers[0].value: facts(rows)}
    found = smoothed(graph, [site], seen, Format.INT8)
    if factor == 1:
        assert found == []
        return
    (one,) = found
    assert one.exponents.argmax() == 3
    assert one.exponents[3] >= 3
    share = one.reason.evidence["share of squared error"]
    assert isinstance(share, float)

    def off(exponents: NDArray[np.int32]) -> float:
        """The squared error of the product if its operands are rounded to int8."""
        (weights,) = (v.constant for v in graph.values if v.name == "w")
        assert weights is not None
        up = np.exp2(exponents.astype(float))
        w = weights.read().astype(float) * up[:, None]
        x = rows / up
        step = np.ptp(x) / 255
        steps = np.abs(w).max(axis=0) / 127
        got = (np.rint(x / step) * step) @ (np.rint(w / steps) * steps)
        return float(np.sum((got - x @ w) ** 2))

    found_share = off(one.exponents) / off(0 * one.exponents)
    assert found_share < 0.5
    assert share == pytest.approx(found_share, rel=0.25)


def test_weights_by_groups_are_smoothed_by_the_values_that_they_meet() -> None:
    """A channel of large values decides the error, and gets more of its group's range."""
    text = ROWS.replace("16", "128")
    graph = nets.prepared(text, nets.drawn(1, g=(128,), o=(128,), w=(128, 6))).graph
    product = next(n for n in graph.nodes if n.name == "q")
    (site,) = smoothable(graph, {product.id})
    rows = np.random.default_rng(0).standard_normal((200, 128))
    rows[:, 3] *= 20
    fmt = Format.INT4_WEIGHTS
    (one,) = smoothed(graph, [site], {site.readers[0].value: facts(rows)}, fmt)
    assert one.exponents[3] == one.exponents.max() > 0
    (constant,) = (v.constant for v in graph.values if v.name == "w")
    assert constant is not None
    weights = constant.read().astype(np.float32)

    def off(exponents: NDArray[np.int32]) -> float:
        up = np.exp2(exponents.astype(np.float32))[:, None]
        w = weights * up
        scales = np.abs(w.reshape(4, 32, 6)).max(axis=1, keepdims=True) / 7
        low = (np.rint(w.reshape(4, 32, 6) / scales) * scales).reshape(w.shape) / up
        return float(np.sum((rows @ low - rows @ weights) ** 2))

    assert off(one.exponents) < 0.5 * off(0 * one.exponents)


def test_values_that_were_not_seen_are_left() -> None:
    graph = nets.prepared(ROWS, nets.drawn(1, g=(16,), o=(16,), w=(16, 6))).graph
    product = next(n for n in graph.nodes if n.name == "q")
    assert smoothed(graph, smoothable(graph, {product.id}), {}, Format.INT8) == []
    assert smoothable(graph, set()) == []
