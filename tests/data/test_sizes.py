"""Sizes of free dimensions: those of a decoder's caches and masks fit together."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from finecast import api
from finecast.data.feeds import synthetic_feeds
from finecast.data.sizes import computed_size, input_specs, size_guesses
from finecast.frontends import onnx as frontend
from finecast.graph import Graph
from finecast.rules.policy import Policy
from tests.frontends.tools import parse

WIDTH, FRAMES, STRIDE = 8, 50, 2
RNG = np.random.default_rng(3)


def attention(new: str, past: str, whole: str, mask: str = "mask") -> onnx.ModelProto:
    """A decoder's attention: one cache, and a mask over cached and new positions."""
    shape = f"(float[B,{new},{WIDTH}] x, float[B,{past},{WIDTH}] old, int64[B,{whole}] {mask})"
    body = f"""
        k = MatMul(x, w)
        keys = Concat<axis = 1>(old, k)
        turned = Transpose<perm = [0, 2, 1]>(keys)
        scores = MatMul(x, turned)
        m = Cast<to = 1>({mask})
        added = Unsqueeze(m, one)
        kept = Add(scores, added)
        p = Softmax<axis = -1>(kept)
        y = MatMul(p, keys)
    """
    model = parse(
        f"net {shape} => (float[B,{new},{WIDTH}] y, float[B,N,{WIDTH}] keys) {{ {body} }}",
        opset=17,
    )
    w = RNG.normal(size=(WIDTH, WIDTH)).astype(np.float32)
    for name, array in (("w", w), ("one", np.array([1]))):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def graph_of(model: onnx.ModelProto) -> Graph:
    return frontend.prepare(frontend.from_model(model), Policy()).graph


def anonymous(model: onnx.ModelProto) -> onnx.ModelProto:
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_param"):
                dim.ClearField("dim_param")
    return model


MODELS = {
    "a symbol that names the mask": attention("new", "past", "total_length"),
    "an expression": attention("new", "past", '"past + new"'),
    "only the input's name": anonymous(attention("new", "past", "total")),
    "no name at all": attention("a", "b", "c", mask="z"),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_a_decoder_is_verified_on_lengths_that_fit(name: str, tmp_path: Path) -> None:
    done = api.convert(MODELS[name], tmp_path / "o.onnx", "all:bf16")
    assert done.verified is not None
    assert done.verified.relative_error is not None, done.verified.note
    graph = graph_of(MODELS[name])
    lengths = [
        {n: a.shape[1] for n, a in synthetic_feeds(input_specs(graph), dims=sizes).items()}
        for sizes in islice(size_guesses(graph, {}), 8)
    ]
    whole = next(n for n in lengths[0] if n not in ("x", "old"))
    assert any(one[whole] == one["x"] + one["old"] != 2 * one["x"] for one in lengths)


def test_a_size_that_the_user_gives_holds_and_the_others_fit_to_it() -> None:
    graph = graph_of(MODELS["a symbol that names the mask"])
    first = next(size_guesses(graph, {"past": 5}))
    assert first["past"] == 5
    assert first["total_length"] == 5 + first["new"]


def test_a_symbol_may_be_computed_from_others() -> None:
    sizes = {"past": 6, "new": 2}
    assert computed_size("past + new", sizes) == 8
    assert computed_size("(past - 1) // 2*new", sizes) == 4
    for none in ("past", "other + 1", "past-", "__import__('os')", "past**new", "-" * 900):
        assert computed_size(none, sizes) is None


def test_a_weight_says_how_many_channels_there_are_and_a_table_how_many_frames() -> None:
    body = f"""
        c = Conv<strides = [{STRIDE}], pads = [1, 1], kernel_shape = [3]>(x, w)
        t = Transpose<perm = [0, 2, 1]>(c)
        y = Add(t, table)
    """
    model = parse(f"net (float[B,C,T] x) => (float[B,F,{WIDTH}] y) {{ {body} }}", opset=17)
    for name, shape in (("w", (WIDTH, 6, 3)), ("table", (FRAMES, WIDTH))):
        array = RNG.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    guesses = list(size_guesses(graph_of(model), {}))
    assert all(guess["C"] == 6 for guess in guesses)
    done = api.convert(model, None, "all:bf16")
    assert done.verified is not None
    assert done.verified.sizes["T"] == FRAMES * STRIDE
