"""What graphs say of their inputs' numbers, in each library in which they can say it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

import finecast
from finecast.data.feeds import synthetic_feeds
from finecast.data.input_ranges import Mask, Normal, Range, Whole, input_ranges, rows_read
from finecast.engines import installed
from finecast.engines.base import TensorSpec
from finecast.errors import UsageError
from finecast.native.opening import opened
from finecast.native.source import NativeSource
from tests.frontends.tools import parse, tensor
from tests.graph.text import from_text


def spec(name: str, dtype: str, *shape: int | str | None) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


TABLES = """\
input %0 ids int64[n, t]
input %1 mask int64[n, t]
input %2 positions int32[n, t]
constant %3 words fp32[1000, 8] size=8000
constant %4 places fp32[8, 64] size=512
node is equal onnx::Equal - (~%0, ~%0) -> (~%5 pad bool[n, t])
node turn transpose onnx::Transpose - (~%2) -> (~%6 turned int32[t, n])
node wide cast onnx::Cast - (~%6) -> (~%7 wide int64[t, n])
node word gather onnx::Gather fp32 (%3, ~%0) -> (%8 a fp32[n, t, 8]) {"axis": 0}
node place gather onnx::Gather fp32 (%4, ~%7) -> (%9 b fp32[8, t, n]) {"axis": 1}
node scale mul onnx::Mul - (~%1, ~%1) -> (~%10 c int64[n, t])
node masked gather onnx::Gather fp32 (%3, ~%1) -> (%11 d fp32[n, t, 8]) {"axis": 0}
output %8
output %9
"""


def test_indices_reach_the_last_row_of_their_tables() -> None:
    ranges = input_ranges(from_text(TABLES))
    assert ranges == {
        "ids": Whole(last=999),
        "positions": Whole(last=63),
    }  # what else is done with the mask is unknown
    inputs = [
        spec("ids", "int64", 4, 8),
        spec("mask", "int64", 4, 8),
        spec("positions", "int32", 1),
    ]
    feeds = synthetic_feeds(inputs, ranges=ranges)
    assert feeds["ids"].max() == 999
    assert feeds["positions"].tolist() == [63]
    assert set(np.unique(feeds["mask"])) <= {0, 1}


def test_rows_that_are_read_bound_the_numbers_of_an_input() -> None:
    both = range(-1000, 1000)
    rows = {"ids": both, "mask": both, "positions": range(-64, 64)}
    assert rows_read(from_text(TABLES)) == rows
    other = TABLES.replace("gather onnx::Gather", "gather aten::embedding")
    assert rows_read(from_text(other)) == {n: range(r.stop) for n, r in rows.items()}
    narrow = TABLES.replace("wide int64", "wide uint8")
    assert rows_read(from_text(narrow)) == {"ids": both, "mask": both}
    made = TABLES.replace("constant %3 words fp32[1000, 8] size=8000", "input %3 w fp32[9, 8]")
    assert rows_read(from_text(made)) == {"positions": range(-64, 64)}


IMAGES = """\
input %0 image uint8[n, 4, 4, 3]
input %1 choice uint8[n]
input %2 sum uint8[n, 4]
node turn transpose onnx::Transpose - (~%0) -> (~%3 turned uint8[n, 3, 4, 4])
node pixels cast onnx::Cast fp32 (~%3) -> (%4 p fp32[n, 3, 4, 4])
node index cast onnx::Cast - (~%1) -> (~%5 i int64[n])
node float cast onnx::Cast fp32 (~%2) -> (%6 f fp32[n, 4])
node double add onnx::Add - (~%2, ~%2) -> (~%7 d uint8[n, 4])
output %4
output %5
output %6
output %7
"""


def test_images_of_bytes_have_all_of_their_values() -> None:
    ranges = input_ranges(from_text(IMAGES))
    assert ranges == {
        "image": Whole(last=255)
    }  # not what becomes an index, or is computed with as bytes
    inputs = [spec("image", "uint8", 8, 4, 4, 3), spec("choice", "uint8", 99)]
    feeds = synthetic_feeds(inputs, ranges=ranges)
    assert feeds["image"].dtype == np.uint8
    assert feeds["image"].min() < 32
    assert 112 < feeds["image"].mean() < 144
    assert feeds["image"].max() == 255
    assert set(feeds["choice"].tolist()) == {0, 1}


RNG = np.random.default_rng(0)
MEAN, DEVIATION = np.array([10.0, 50.0, 90.0]), np.array([20.0, 30.0, 40.0])
KERNEL = RNG.normal(size=(16, 3, 3, 3))
WEIGHT = RNG.normal(size=(12, 24))
BIAS = RNG.normal(size=16)
WHITE = 40.0
"""Numbers of this deviation, independent of one another, gave the statistics of products."""

ARRAYS: Mapping[str, NDArray[Any]] = {
    "kernel": KERNEL,
    "bias": BIAS,
    "weight": WEIGHT,
    "mean": MEAN,
    "variance": DEVIATION**2,
    "ones": np.ones(3),
    "conv_mean": np.einsum("ochw,c->o", KERNEL, MEAN) + BIAS,
    "conv_variance": WHITE**2 * np.square(KERNEL).sum(axis=(1, 2, 3)),
    "conv_ones": np.ones(16),
    "product_mean": 7 * WEIGHT.sum(axis=0),
    "product_variance": WHITE**2 * np.square(WEIGHT).sum(axis=0),
    "product_ones": np.ones(24),
    "means": MEAN.reshape(3, 1, 1),
    "deviations": DEVIATION.reshape(3, 1, 1),
    "last_means": MEAN,
}
IMAGE = "net (float[n,3,8,8] x) => (float[n,k,h,w] y)"
CONV = "y = Conv(z, kernel, bias)"
KNOWN: Mapping[str, tuple[str, float | NDArray[Any], float | NDArray[Any]]] = {
    "a norm of the input": (
        f"{IMAGE} {{ z = BatchNormalization(x, ones, ones, mean, variance)\n {CONV} }}",
        MEAN,
        DEVIATION,
    ),
    "a norm behind a convolution": (
        (
            f"{IMAGE} {{ c = Conv(x, kernel, bias)\n"
            " y = BatchNormalization(c, conv_ones, conv_ones, conv_mean, conv_variance)}"
        ),
        MEAN,
        WHITE,
    ),
    "a norm behind a product, of bytes": (
        (
            "net (float[n,12] x) => (float[n,24] y) <float all = {0.5}>"
            " { h = Mul(x, all)\n p = MatMul(h, weight)\n"
            " y = BatchNormalization("
            "p, product_ones, product_ones, product_mean, product_variance)}"
        ),
        14.0,
        2 * WHITE,
    ),
    "constants": (
        f"{IMAGE} {{ s = Sub(x, means)\n z = Div(s, deviations)\n {CONV} }}",
        MEAN,
        DEVIATION,
    ),
    "constants by channels that come last": (
        (
            "net (float[n,8,8,3] x) => (float[n,k,h,w] y) { s = Sub(x, last_means)\n"
            f" t = Transpose<perm = [0, 3, 1, 2]>(s)\n z = Div(t, deviations)\n {CONV} }}"
        ),
        MEAN,
        DEVIATION,
    ),
    "a mean that is subtracted": (
        f"{IMAGE} <float m = {{110}}> {{ z = Sub(x, m)\n {CONV} }}",
        110.0,
        55.0,
    ),
}
BYTES = {
    "to 1": f"{IMAGE} <float m = {{255}}> {{ z = Div(x, m)\n {CONV} }}",
    "to -1 and 1": f"{IMAGE} <float m = {{127.5}}, float one = {{1}}>"
    f" {{ s = Div(x, m)\n z = Sub(s, one)\n {CONV} }}",
}
UNKNOWN = {
    "a product": f"{IMAGE} {{ z = Relu(x)\n {CONV} }}",
    "the scale of attention": f"{IMAGE} <float m = {{0.125}}> {{ z = Mul(x, m)\n {CONV} }}",
    "positions that are added": f"{IMAGE} <float m = {{0.7}}> {{ z = Add(x, m)\n {CONV} }}",
    "degrees": f"{IMAGE} <float m = {{273}}> {{ z = Add(x, m)\n {CONV} }}",
    "a variance of 0": f"{IMAGE} <float[3] none = {{0, 0, 0}}>"
    f" {{ z = BatchNormalization(x, ones, ones, mean, none)\n {CONV} }}",
}


def saved(text: str, folder: Path, suffix: str = "onnx") -> Path:
    """The model of the text, as a file of the suffix."""
    parsed = parse(text)
    used = {name for node in parsed.graph.node for name in node.input}
    weights = [tensor(name, array) for name, array in ARRAYS.items() if name in used]
    parsed.graph.initializer.extend(weights)
    path = folder / "net.onnx"
    onnx.save(parsed, path)
    if suffix == "xml":
        if not installed("openvino"):
            pytest.skip("needs OpenVINO")
        import openvino

        path = folder / "net.xml"
        read = openvino.convert_model(folder / "net.onnx")
        openvino.save_model(read, path, compress_to_fp16=False)
    return path


def ranges_of(text: str, folder: Path, suffix: str = "onnx") -> Mapping[str, Range]:
    """What the model of the text, as a file of the suffix, says of its inputs."""
    model = opened(saved(text, folder, suffix))
    assert isinstance(model, NativeSource)
    return input_ranges(model.prepare_once(own=True).graph)


@pytest.mark.parametrize("kind", KNOWN)
def test_normal_numbers_are_those_of_training(kind: str, tmp_path: Path) -> None:
    text, mean, deviation = KNOWN[kind]
    found = ranges_of(text, tmp_path)["x"]
    assert isinstance(found, Normal)
    for had, wanted in ((found.mean, mean), (found.deviation, deviation)):
        np.testing.assert_allclose(
            np.broadcast_to(had.ravel(), 3), np.broadcast_to(wanted, 3), rtol=1e-4
        )
    last = "last" in kind
    shape = (64, 8, 8, 3) if last else (64, 12) if "product" in kind else (64, 3, 8, 8)
    drawn = synthetic_feeds([spec("x", "fp32", *shape)], ranges={"x": found})["x"]
    means = (
        drawn.mean(axis=(0, 1, 2) if last else (0, 2, 3)) if len(shape) > 2 else drawn.mean()
    )
    np.testing.assert_allclose(
        means, np.broadcast_to(mean, np.shape(means)), atol=0.1 * np.max(deviation)
    )


@pytest.mark.parametrize("kind", BYTES)
def test_what_is_scaled_as_bytes_is_drawn_as_bytes(kind: str, tmp_path: Path) -> None:
    ranges = ranges_of(BYTES[kind], tmp_path)
    assert ranges == {"x": Whole(last=255)}
    drawn = synthetic_feeds([spec("x", "fp32", 4, 3, 8, 8)], ranges=ranges)["x"]
    assert drawn.dtype == np.float32
    assert (drawn.min(), drawn.max()) >= (0, 255)
    assert 112 < drawn.mean() < 144


@pytest.mark.parametrize("kind", UNKNOWN)
def test_inputs_of_which_nothing_is_said_are_standard_normal(
    kind: str, tmp_path: Path
) -> None:
    assert ranges_of(UNKNOWN[kind], tmp_path) == {}


def test_openvino_keeps_what_it_does_not_fold_into_products(tmp_path: Path) -> None:
    text, _, _ = KNOWN["a norm of the input"]
    found = ranges_of(text.replace("ones, ones", "ones, mean"), tmp_path, "xml")["x"]
    assert isinstance(found, Normal)
    text, mean, _ = KNOWN["a mean that is subtracted"]
    found = ranges_of(text, tmp_path, "xml")["x"]
    assert isinstance(found, Normal)
    assert found.mean.ravel() == pytest.approx(mean)


def test_tokens_reach_the_last_row_in_openvino(tmp_path: Path) -> None:
    text = "net (int64[n,t] ids) => (float[n,t,k] y) { y = Gather<axis = 0>(weight, ids) }"
    for suffix in ("onnx", "xml"):
        assert ranges_of(text, tmp_path, suffix) == {"ids": Whole(last=11)}


@pytest.mark.parametrize("suffix", ["onnx", "xml"])
@pytest.mark.parametrize("wrong", [12, 10**12, -13])
def test_data_that_index_no_row_are_refused(wrong: int, suffix: str, tmp_path: Path) -> None:
    """Where engines do not check, they read what lies beyond the table."""
    path = saved(
        "net (int64[n,t] ids) => (float[n,t,k] y)"
        " { i = Transpose<perm = [1, 0]>(ids)\n y = Gather<axis = 0>(weight, i) }",
        tmp_path,
        suffix,
    )
    ids = np.zeros((4, 3), np.int64)
    ids[2, 1], ids[0] = wrong, -1
    told = rf"'ids' has {wrong} at \[2, 1\], and the model's table has 12 rows.*from 0 to 11"
    np.savez(tmp_path / "data.npz", ids=ids)
    given: Any
    for given in (tmp_path / "data.npz", {"ids": ids}, [{"ids": ids}]):
        with pytest.raises(UsageError, match=told):
            finecast.tune(path, data=given, metric="cosine", progress=False)
        with pytest.raises(UsageError, match=told):
            finecast.convert(path, policy="all:bf16", data=given, progress=False)


def test_numbers_that_are_added_to_an_index_leave_fewer_rows(tmp_path: Path) -> None:
    text = (
        "net (int64[n,t] ids) => (float[n,t,k] y) <int64 two = {2}>"
        " { i = Add(ids, two)\n y = Gather<axis = 0>(weight, i) }"
    )
    assert ranges_of(text, tmp_path) == {"ids": Whole(last=9)}


def test_one_row_of_a_mask_leaves_out_all() -> None:
    for shape, masked in (((5, 4), 1), ((2, 1, 3, 8), 1), ((1, 4), 0), ((3, 0), 0)):
        mask = synthetic_feeds([spec("m", "bool", *shape)], ranges={"m": Mask()})["m"]
        assert (~mask.any(axis=-1)).sum() >= masked
        assert mask.any() or not mask.size
