from __future__ import annotations

import numpy as np
import pytest

from finecast.data.feeds import synthetic_feeds
from finecast.engines.base import TensorSpec
from finecast.errors import UsageError


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
    free = r"unknown free dimension 'L' \(dims\): use one of N, T, ids.0, ids.1"
    with pytest.raises(UsageError, match=free):
        synthetic_feeds(inputs, dims={"T": 2, "L": 3})
    with pytest.raises(UsageError, match=r"give dims x\.1=SIZE"):
        synthetic_feeds([spec("x", "fp32", None, None)])
    with pytest.raises(UsageError, match="no declared shape"):
        synthetic_feeds([TensorSpec(name="x", dtype="fp32", shape=None)])
    with pytest.raises(UsageError, match="of type string"):
        synthetic_feeds([spec("x", "string", 1)])
