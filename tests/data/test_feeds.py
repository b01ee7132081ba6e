from __future__ import annotations

import numpy as np
import pytest

from finecast.data.feeds import last_indices, synthetic_feeds
from finecast.engines.base import TensorSpec
from finecast.errors import UsageError
from finecast.graph.text import from_text


def spec(name: str, dtype: str, *shape: int | str | None) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def test_shapes_follow_batch_and_dims() -> None:
    inputs = [
        spec("ids", "int64", "N", "T"),
        spec("state", "bf16", 2, "N", 8),
        spec("rate", "int64"),
        spec("loose", "fp32", None, None),
    ]
    feeds = synthetic_feeds(inputs, batch=4, dims={"T": 6, "loose.1": 3})
    shapes = {name: array.shape for name, array in feeds.items()}
    assert shapes == {"ids": (4, 6), "state": (2, 4, 8), "rate": (), "loose": (4, 3)}
    assert feeds["state"].dtype.name == "bfloat16"


def test_integers_stay_in_every_table() -> None:
    ids = synthetic_feeds([spec("ids", "int64", 1000)])["ids"]
    assert set(ids.tolist()) == {0, 1}


def test_feeds_are_seeded() -> None:
    inputs = [spec("x", "fp32", "N", 5)]
    a, b, c = (synthetic_feeds(inputs, seed=seed)["x"] for seed in (0, 0, 1))
    np.testing.assert_array_equal(a, b)
    assert (a != c).any()


@pytest.mark.parametrize(
    ("inputs", "dims", "said"),
    [
        ([spec("x", "fp32", 2935973616)], {}, r"23\.5 GB to draw.*'x' of 2935973616"),
        (
            [spec("i", "int8", "N", "T")],
            {"T": 1 << 28, "N": 2},
            r"4\.3 GB.*'i' of 2x268435456",
        ),
        ([spec(n, "fp32", 1 << 27) for n in "abc"], {}, r"3\.2 GB to draw"),
    ],
)
def test_sizes_beyond_memory(
    inputs: list[TensorSpec], dims: dict[str, int], said: str
) -> None:
    with pytest.raises(UsageError, match=said + ".*dims.*data"):
        synthetic_feeds(inputs, dims=dims)


def test_sizes_that_are_missing_or_unknown() -> None:
    inputs = [spec("ids", "int64", "N", "T")]
    with pytest.raises(UsageError, match="give dims T=SIZE"):
        synthetic_feeds(inputs)
    free = r"unknown free dimension 'L' \(dims\): use one of N, ids.0, T, ids.1"
    with pytest.raises(UsageError, match=free):
        synthetic_feeds(inputs, dims={"T": 2, "L": 3})
    with pytest.raises(UsageError, match=r"give dims x\.1=SIZE"):
        synthetic_feeds([spec("x", "fp32", None, None)])
    with pytest.raises(UsageError, match="no declared shape"):
        synthetic_feeds([TensorSpec(name="x", dtype="fp32", shape=None)])
    with pytest.raises(UsageError, match="of type string"):
        synthetic_feeds([spec("x", "string", 1)])


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
    last = last_indices(from_text(TABLES))
    assert last == {"ids": 999, "positions": 63}  # what else is done with the mask is unknown
    inputs = [
        spec("ids", "int64", 4, 8),
        spec("mask", "int64", 4, 8),
        spec("positions", "int32", 1),
    ]
    feeds = synthetic_feeds(inputs, last=last)
    assert feeds["ids"].max() == 999
    assert feeds["positions"].tolist() == [63]
    assert set(np.unique(feeds["mask"])) <= {0, 1}


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
    last = last_indices(from_text(IMAGES))
    assert last == {"image": 255}  # not what becomes an index, or is computed with as bytes
    inputs = [spec("image", "uint8", 8, 4, 4, 3), spec("choice", "uint8", 99)]
    feeds = synthetic_feeds(inputs, last=last)
    assert feeds["image"].dtype == np.uint8
    assert feeds["image"].min() < 32
    assert 112 < feeds["image"].mean() < 144
    assert feeds["image"].max() == 255
    assert set(feeds["choice"].tolist()) == {0, 1}
