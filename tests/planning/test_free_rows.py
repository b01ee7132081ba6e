"""Outputs whose length depends on numbers: told from the graph, and compared as sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from finecast.planning.free_rows import FreeOutput, Matched, free_outputs, matched
from finecast.planning.sensitivity import Counted, squared_error
from tests.frontends.tools import graph_of, parse

BOXES = tuple(FreeOutput(name=name, axes=(0,), group=0) for name in ("box", "score", "class"))
RNG = np.random.default_rng(0)


def detections(count: int) -> dict[str, NDArray[Any]]:
    drawn = np.random.default_rng(1)
    return {
        "box": drawn.uniform(0, 640, (count, 4)).astype(np.float32),
        "score": drawn.uniform(0.3, 1, count).astype(np.float32),
        "class": drawn.integers(0, 80, count),
    }


def rows(found: dict[str, NDArray[Any]], which: Sequence[int]) -> Matched:
    return matched(BOXES, {n: a[which] for n, a in found.items()}, found)


def test_the_same_rows_in_another_order_are_equal() -> None:
    wanted = detections(50)
    found = rows(wanted, RNG.permutation(50).tolist())
    assert found.unmatched("box") == (0, 0)
    for name in ("box", "score"):
        np.testing.assert_array_equal(found.got[name], wanted[name])


def test_rows_that_are_off_a_little_have_partners() -> None:
    wanted = detections(300)
    order = RNG.permutation(300)[:-4]
    noise = 1 + 0.004 * RNG.standard_normal((296, 4))
    got = {n: a[order] for n, a in wanted.items()} | {"box": wanted["box"][order] * noise}
    found = matched(BOXES, got, wanted)
    assert found.unmatched("box") == (4, 0)
    there = found.numbers["box"][0] >= 0
    box: NDArray[Any] = found.got["box"]
    assert np.abs(box[there] - wanted["box"][there]).max() < 640 * 0.02


def test_partners_are_of_one_class() -> None:
    wanted = detections(10)
    got = wanted | {"class": wanted["class"].copy()}
    got["class"][3] += 1
    assert matched(BOXES, got, wanted).unmatched("score") == (1, 1)


def test_a_lost_row_counts_as_lost_and_a_new_one_as_its_size() -> None:
    r = np.array([[3.0, 0.0], [0.0, 4.0]])
    free = {0: FreeOutput(name="y", axes=(0,), group=0)}
    counted = Counted.of([0], free)
    assert squared_error([r[:1]], [r], counted) == 16 / 25
    assert squared_error([np.vstack([r, [[0.0, 400.0]]])], [r], counted) == 400**2 / 25
    indices = np.array([[0, 0, 5], [1, 7, 2]])
    free = {0: FreeOutput(name="y", axes=(1,), group=0)}
    error = squared_error([indices[:, 1:]], [indices], Counted.of([0], free))
    assert error == pytest.approx(1 / 3)


def test_rows_of_equal_length_are_matched_too() -> None:
    indices = np.array([[0, 0, 5], [1, 7, 2]])
    other = np.array([[0, 5, 9], [7, 2, 9]])
    free = (FreeOutput(name="y", axes=(1,), group=0),)
    assert matched(free, {"y": other}, {"y": indices}).unmatched("y") == (1, 1)


def test_rows_that_occur_several_times_have_as_many_partners() -> None:
    free = BOXES[:1]
    got, wanted = np.full((7, 4), 1.001), np.ones((5, 4))
    assert matched(free, {"box": got}, {"box": wanted}).unmatched("box") == (0, 2)


@pytest.mark.parametrize(("mine", "theirs"), [(0, 0), (0, 3), (3, 0)])
def test_no_rows(mine: int, theirs: int) -> None:
    got, wanted = np.ones((mine, 4)), np.full((theirs, 4), 9.0)
    found = matched(BOXES[:1], {"box": got}, {"box": wanted})
    assert found.unmatched("box") == (theirs, mine)
    assert found.got["box"].shape == found.wanted["box"].shape == (mine + theirs, 4)


def test_nan_has_no_partner_and_is_seen() -> None:
    wanted = np.ones((2, 4))
    got = np.array([[np.nan] * 4, [1.0] * 4])
    found = matched(BOXES[:1], {"box": got}, {"box": wanted})
    assert found.unmatched("box") == (1, 1)
    assert np.isnan(found.got["box"]).any()


def test_nan_is_near_nan() -> None:
    """Rows with NaN in fp32, too, had no partner unless they were equal."""
    wanted = detections(30)
    wanted["box"][::3, 1] = np.nan
    got = wanted | {"box": wanted["box"] * np.float32(1.0001)}
    found = matched(BOXES, {n: a[::-1] for n, a in got.items()}, wanted)
    assert found.unmatched("box") == (0, 0)
    boxes: NDArray[Any] = found.got["box"]
    np.testing.assert_allclose(boxes, wanted["box"], rtol=1e-3)
    spoiled = got | {"box": np.where(np.isnan(got["box"]), np.inf, got["box"])}
    assert matched(BOXES, spoiled, wanted).unmatched("box") == (10, 10)


def test_arrays_of_several_calls_that_were_joined_flat_have_no_rows() -> None:
    free = (FreeOutput(name="y", axes=(1,), group=0, rank=2),)
    assert not matched(free, {"y": np.arange(6)}, {"y": np.arange(8)}).numbers


@pytest.mark.parametrize("kind", ["equal", "near", "cluster"])
def test_a_hundred_thousand_rows_end(kind: str) -> None:
    """A tree of equal points is a list, in which a search never ends."""
    count = 100_000
    spread = {"equal": 0.0, "near": 0.0, "cluster": 1e-3}[kind]
    got, wanted = (1 + spread * RNG.standard_normal((count, 4)) for _ in range(2))
    if kind == "near":
        got *= 1.001
    found = matched(BOXES[:1], {"box": got}, {"box": wanted})
    assert sum(found.unmatched("box")) < 0.2 * count


NET = """
net (float[n,8] x) => ({outputs})
<float[8,4] w = {{{weights}}}, float half = {{0.5}}, int64[1] one = {{1}}>
{{
  a = MatMul(x, w)
  g = Greater(a, half)
  {nodes}
}}
"""


WEIGHTS = ",".join(["0.1"] * 32)


BY_NUMBERS = """
m = ReduceMax <keepdims = 0> (a) z = Cast <to = 7> (m) d = Reshape(z, one) y = Expand(a, d)
"""
WRITTEN = """
i = NonZero(g) t = Transpose(i) u = GatherND(a, t) y = ScatterND(a, t, u)
"""
BY_SHAPES = """
s = Shape(x) f = Cast <to = 1> (s) h = Mul(f, half) d = Cast <to = 7> (h) y = Expand(half, d)
"""


@pytest.mark.parametrize(
    ("outputs", "nodes", "axes"),
    [
        ("int64[2,k] y", "y = NonZero(g)", {"y": (1,)}),
        ("float[k] y", "y = Compress(a, c)", {"y": (0,)}),
        ("float[k,4] y", "i = NonZero(g) t = Transpose(i) y = Gather(a, t)", {"y": (0,)}),
        ("float[k,n] y", BY_NUMBERS, {"y": (0,)}),
        ("float[n,4] y", WRITTEN, {}),
        ("float y", "i = NonZero(g) s = Size(i) y = Cast <to = 1> (s)", {}),
        # Sizes of a resize are often computed in floats, of shapes: no number decides them.
        ("float[p,q] y", BY_SHAPES, {}),
    ],
)
def test_which_outputs_are_free(
    outputs: str, nodes: str, axes: dict[str, object], tmp_path: Path
) -> None:
    if "Compress" in nodes:
        nodes = "m = Neg(one) c = Reshape(g, m) " + nodes
    graph = graph_of(
        parse(NET.format(outputs=outputs, nodes=nodes, weights=WEIGHTS)), tmp_path
    )
    assert {one.name: one.axes for one in free_outputs(graph)} == axes


@pytest.mark.parametrize("select", ["i = NonZero(mask)", "i, j, k, l = Unique(ids)"])
def test_what_is_selected_by_given_integers_has_its_length(
    select: str, tmp_path: Path
) -> None:
    """No rounding changes how many tokens a mask leaves, or which ids are there."""
    net = f"""
net (bool[n] mask, int64[n] ids) => (float[k,4] y)
<float[8,4] w = {{{WEIGHTS}}}, int64[1] flat = {{-1}}>
{{ {select} f = Reshape(i, flat) y = Gather(w, f) }}
"""
    assert free_outputs(graph_of(parse(net), tmp_path)) == ()


def test_a_row_of_another_class_is_another_row() -> None:
    """Rows were partners whatever their class: 16 in place of 17 was near."""
    rng = np.random.default_rng(9)
    boxes, score = rng.uniform(0, 640, (60, 4)), rng.random((60, 1))
    number = rng.integers(0, 80, (60, 1))
    wanted = np.concatenate([boxes, score, number], axis=1).astype(np.float32)
    got = wanted.copy()
    got[::10, 5] = np.abs(got[::10, 5] - 1)
    got[:, :4] += 0.5
    free = [FreeOutput(name="y", axes=(0,), group=0)]
    found = matched(free, {"y": got[::-1]}, {"y": wanted}).unmatched("y")
    assert found == (6, 6)
    apart = [replace(free[0], name=name) for name in ("box", "class")]
    pairs = [{"box": one[:, :5], "class": one[:, 5]} for one in (got[::-1], wanted)]
    assert matched(apart, *pairs).unmatched("box") == (6, 6)
    got[:, 5] = wanted[:, 5]
    assert matched(free, {"y": got[::-1]}, {"y": wanted}).unmatched("y") == (0, 0)
