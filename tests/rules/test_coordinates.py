"""Positions, coordinates and counts keep fp32, other values do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from finecast.graph import Graph
from finecast.rules import Ruling
from finecast.rules.coordinates import COORDINATES
from tests.frontends import tools

Judged = Callable[..., dict[str, Ruling | None]]


@pytest.fixture
def kept(judged: Judged, tmp_path: Any) -> Callable[..., set[str]]:
    """Names of the nodes that the rule keeps in a model given as text."""

    def of(text: str, policy: str = "all:bf16", **constants: Any) -> set[str]:
        model = tools.parse(text)
        model.graph.initializer.extend(tools.tensor(n, a) for n, a in constants.items())
        graph: Graph = tools.graph_of(model, tmp_path, policy)
        return {n for n, v in judged(COORDINATES, graph, policy=policy).items() if v}

    return of


def test_an_angle_and_all_that_makes_it(kept: Callable[..., set[str]]) -> None:
    text = """g (int64[1,8] ids, float[1,8,4] x) => (float[1,8,4] y) {
      [cast] p = Cast<to=1>(ids)
      axes = Constant<value_ints=[-1]>()
      [column] c = Unsqueeze(p, axes)
      [outer] a = MatMul(c, frequencies)
      [both] e = Concat<axis=-1>(a, a)
      [cos] o = Cos(e)
      [sin] s = Sin(e)
      [turned] t = Mul(x, o)
      [rest] r = Mul(x, s)
      [sum] u = Add(t, r)
      [product] y = MatMul(u, w)
    }"""
    found = kept(text, frequencies=np.full((1, 2), 0.1), w=np.full((4, 4), 0.1))
    assert found == {"cast", "column", "outer", "both", "cos", "sin"}


def test_a_product_that_sums_gives_features(kept: Callable[..., set[str]]) -> None:
    text = """g (float[2,4] x) => (float[2,4] y, int64[2] i) {
      [product] m = MatMul(x, w)
      [scale] s = Mul(m, c)
      [sin] y = Sin(s)
      [second] n = MatMul(y, w)
      [bias] b = Add(n, c)
      [best] i = ArgMax<axis=1, keepdims=0>(b)
    }"""
    found = kept(text, w=np.full((4, 4), 0.1), c=np.full(4, 0.1))
    assert found == {"scale", "sin", "bias", "best"}


def test_probabilities_that_choose_experts_are_not_rounded(
    kept: Callable[..., set[str]],
) -> None:
    text = """g (float[8,4] x) => (float[8,2] weights, int64[8,2] experts, float[8,4] y) {
      [router] m = MatMul(x, w)
      [scale] s = Mul(m, c)
      [softmax] p = Softmax<axis=-1>(s)
      k = Constant<value_ints=[2]>()
      [best] chosen, experts = TopK(p, k)
      [attention] a = Softmax<axis=-1>(x)
      [weights] weights = Mul(chosen, chosen)
      [mixed] y = MatMul(a, w)
    }"""
    found = kept(text, w=np.full((4, 4), 0.1), c=np.full(4, 0.1))
    assert found == {"scale", "softmax", "best"}


def test_what_others_read_as_well_is_a_feature(kept: Callable[..., set[str]]) -> None:
    text = """g (float[2,4] x) => (float[2,4] y) {
      [tanh] h = Tanh(x)
      [large] b = Greater(h, c)
      [chosen] y = Where(b, h, x)
    }"""
    assert kept(text, c=np.float32(0.5)) == {"large"}


def test_signs_survive_rounding(kept: Callable[..., set[str]]) -> None:
    text = """g (float[2,4] x) => (float[2,4] y) {
      [tanh] h = Tanh(x)
      [positive] b = Greater(h, zero)
      [chosen] y = Where(b, x, x)
    }"""
    assert kept(text, zero=np.float32(0)) == set()


def test_what_decides_a_branch_is_compared_in_fp32(kept: Callable[..., set[str]]) -> None:
    """The sum is the comparison's alone; the product goes elsewhere, too."""
    text = """g (float[2,4] x) => (float[2,4] y) {
      [product] h = MatMul(x, w)
      axes = Constant<value_ints=[0, 1]>()
      [sum] t = ReduceSum<keepdims=0>(h, axes)
      [positive] b = Greater(t, zero)
      [other] n = Not(b)
      [branch] y = If(n) <
        then_branch = few () => (float[2,4] a) { [relu] a = Relu(h) },
        else_branch = many () => (float[2,4] c) { [tanh] c = Tanh(h) }
      >
    }"""
    numbers = {"zero": np.float32(0), "w": np.ones((4, 4), np.float32)}
    assert kept(text, **numbers) == {"positive", "sum"}


def test_positions_that_are_added_to_scores_are_read_in_fp32(
    kept: Callable[..., set[str]],
) -> None:
    text = """g (float[1,8,8] scores) => (float[1,8,8] y) {
      start = Constant<value_int=0>()
      end = Constant<value_int=8>()
      step = Constant<value_int=1>()
      i = Range(start, end, step)
      [cast] p = Cast<to=1>(i)
      [slope] a = Mul(p, slopes)
      [biased] s = Add(scores, a)
      [softmax] y = Softmax(s)
      }"""
    found = kept(text, slopes=np.float32(0.5))
    assert found == {"cast", "slope", "biased", "softmax"}


def test_a_mask_is_no_position(kept: Callable[..., set[str]]) -> None:
    """Integer inputs that are scaled to a mask's filler, or multiply features."""
    text = """g (float[1,8,8] scores, int64[1,8] mask) => (float[1,8,8] y) {
      [cast] m = Cast<to=1>(mask)
      [inverted] n = Sub(one, m)
      [filled] f = Mul(n, lowest)
      [biased] s = Add(scores, f)
      [softmax] p = Softmax(s)
      [masked] y = Mul(p, m)
    }"""
    found = kept(text, one=np.float32(1), lowest=np.finfo(np.float32).min)
    assert found == {"cast", "inverted"}


@pytest.mark.parametrize(
    ("kind", "exact"), [("uint8", True), ("bool", True), ("int32", False)]
)
def test_pixels_are_exact_in_any_format(
    kept: Callable[..., set[str]], kind: str, exact: bool
) -> None:
    text = f"g ({kind}[2,4] x) => (float[2,4] y) {{ [cast] y = Cast<to=1>(x) }}"
    assert kept(text) == (set() if exact else {"cast"})


@pytest.mark.parametrize(
    ("table", "policy", "positions"),
    [
        (np.arange(2048), "all:bf16", True),
        (np.arange(256), "all:bf16", False),  # each is a number of bf16
        (np.arange(2048), "all:fp16", False),
        (np.arange(4096), "all:fp16", True),
        (np.arange(2048) + 0.5, "all:bf16", False),
        (np.float32(2047), "all:bf16", False),  # one number is a scale
    ],
)
def test_positions_that_an_export_folded(
    kept: Callable[..., set[str]], table: Any, policy: str, positions: bool
) -> None:
    text = "g (float[1] x) => (float[n] y) { [add] y = Add(x, table) }"
    assert kept(text, policy, table=table) == ({"add"} if positions else set())


def test_a_length_scales_and_is_no_coordinate(kept: Callable[..., set[str]]) -> None:
    text = """g (float[n,4] x) => (float[n,4] y) {
      i = Shape(x)
      first = Constant<value_ints=[0]>()
      [one] n = Gather(i, first)
      [cast] f = Cast<to=1>(n)
      [mean] m = Div(x, f)
      [next] y = Tanh(m)
    }"""
    assert kept(text) == {"cast"}


def test_what_a_grid_is_made_of(kept: Callable[..., set[str]]) -> None:
    text = """g (float[1,3,4,4] image, float[1,4,4,2] flow) => (float[1,3,4,4] y) {
      [scaled] f = Mul(flow, c)
      [moved] g = Add(base, f)
      [sampled] s = GridSample(image, g)
      [after] y = Tanh(s)
    }"""
    assert kept(text, c=np.float32(0.1), base=np.full((1, 4, 4, 2), 0.3)) == {
        *("scaled", "moved", "sampled")
    }


GRID = """g (float[1,2,2,2] d, float[1,1,4,4] image) => (float[1,1,2,2] y, float[1,2,2,2] f) {
  [moved] m = Add(grid, d)
  [turned] t = Transpose<perm=[0,2,3,1]>(m)
  [sampled] y = GridSample(image, t)
  [difference] f = Sub(m, grid)
}"""


def test_what_is_added_to_a_grid_is_positions_whoever_reads_it(
    kept: Callable[..., set[str]],
) -> None:
    """As in optical flow: a difference of two positions needs the digits that bf16 drops."""
    found = kept(GRID, grid=np.arange(8).reshape(1, 2, 2, 2))
    assert found == {"moved", "turned", "sampled", "difference"}


@pytest.mark.parametrize("constant", [np.eye(2), np.full((2, 2), 0.5), np.float32(3)])
def test_what_is_added_to_other_constants_and_read_besides_is_a_feature(
    kept: Callable[..., set[str]], constant: Any
) -> None:
    assert kept(GRID, grid=constant) == {"turned", "sampled"}


def test_a_constant_that_fills_a_mask_counts_nothing(kept: Callable[..., set[str]]) -> None:
    text = """g (float[2,4] x) => (float[2,4] y) {
      [masked] y = Add(x, m)
    }"""
    lowest = np.finfo(np.float32).min
    assert not kept(text, m=np.array([0, 0, lowest, lowest], np.float32))
    assert not kept(text, m=np.array([0, 0, -1e9, 0], np.float32))
    assert kept(text, m=np.array([0, 1, 2, 2047], np.float32)) == {"masked"}
