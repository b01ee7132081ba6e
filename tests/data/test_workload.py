"""What a workload is identified by, what it runs, and which feeds are probed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.data.datasets import Dataset
from finecast.data.metrics import METRICS
from finecast.data.workload import DataWorkload, probed, spread, thinned
from finecast.engines.base import Array, Feeds, Session, TensorSpec, calls_of
from finecast.errors import EngineError


class Taking(Session):
    """Takes inputs x, y ... of these shapes; ``only`` calls of so many samples, if given."""

    def __init__(self, *shapes: tuple[Any, ...] | None, only: int | None = None) -> None:
        named = zip("xy", shapes, strict=False)
        self.inputs = tuple(TensorSpec(name=n, dtype="fp32", shape=s) for n, s in named)
        self.outputs = ()
        self.only = only

    def run(self, feeds: Feeds) -> dict[str, Any]:
        (call,) = calls_of(feeds)
        if self.only not in (None, len(call["x"])):
            raise EngineError("another batch was compiled in")
        return {}


class Counting(Session):
    """Gives back what it is fed, and counts."""

    inputs = outputs = ()

    def __init__(self) -> None:
        self.runs = 0

    def run(self, feeds: Feeds) -> dict[str, Array]:
        self.runs += 1
        return dict(feeds)


def one(rows: int, value: float = 1.0) -> Feeds:
    return {"x": np.full((rows, 2), value, np.float32)}


def comparing(images: Array) -> DataWorkload:
    """Decisions held against those of fp32, in batches of two."""
    return DataWorkload(
        data=Dataset(
            inputs=(TensorSpec(name="x", dtype="fp32", shape=("n", 3)),),
            arrays={"x": images},
            axes={"x": 0},
            labels=None,
            size=len(images),
        ),
        metric=METRICS["agreement"],
        batch=2,
        data_digest="data",
        calibrate=list,
    )


def test_a_metric_that_compares_with_fp32_runs_it_once_on_each_batch() -> None:
    workload = comparing(np.eye(5, 3, dtype=np.float32))
    sessions: list[Any] = [Counting(), Counting(), Counting()]
    exact, *others = sessions
    assert workload.evaluate(exact, None) == 1.0
    assert [workload.evaluate(other, exact) for other in others] == [1.0, 1.0]
    assert [session.runs for session in sessions] == [3, 3, 3]


def test_another_fp32_model_is_run_anew() -> None:
    workload = comparing(np.eye(5, 3, dtype=np.float32))
    sessions: list[Any] = [Counting(), Counting(), Counting()]
    one_model, another, low = sessions
    workload.evaluate(one_model, None)
    workload.evaluate(low, another)
    workload.evaluate(low, one_model)
    assert [session.runs for session in sessions] == [6, 3, 6]


def shapes(feeds: Sequence[Feeds]) -> list[int]:
    return [f["x"].shape[0] for f in feeds]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 5))
def test_a_spread_has_the_largest_and_falls(sizes: list[int], count: int) -> None:
    found = shapes(spread([one(n) for n in sizes], count))
    assert 1 <= len(found) <= count
    assert found[0] == max(sizes)
    assert found == sorted(found, reverse=True)


@given(st.integers(2, 40), st.integers(2, 8))
def test_a_spread_is_even_and_as_close_as_the_count_allows(given: int, count: int) -> None:
    found = shapes(spread([one(n) for n in range(1, given + 1)], count))
    (gap,) = {larger - smaller for larger, smaller in pairwise(found)}
    assert found[-1] <= gap  # what is left after the last is less than a gap
    assert gap == 1 or len(range(0, given, gap - 1)) > count


@pytest.mark.parametrize(
    ("shape", "other", "rows"),
    [
        (("n", 2), ("n", 2), 8),
        # Rows of unlike inputs, and of fixed ones, belong together: none is left out.
        (("n", 2), ("m", 2), 20),
        ((20, 2), (20, 2), 20),
        # Free dimensions that the model's library does not name.
        (("x.0", 2), ("y.0", 2), 8),
        (("x.0", 2), ("n", 2), 20),
    ],
)
def test_samples_are_left_out_where_all_inputs_share_a_free_dimension(
    shape: tuple[Any, ...], other: tuple[Any, ...], rows: int
) -> None:
    specs = [
        TensorSpec(name="x", dtype="fp32", shape=shape),
        TensorSpec(name="y", dtype="fp32", shape=other),
    ]
    feeds = {"x": np.zeros((20, 2), np.float32), "y": np.zeros((20, 2), np.float32)}
    assert {a.shape[0] for a in thinned(feeds, specs).values()} == {rows}


def test_free_dimensions_without_a_name_and_of_unlike_sizes_are_left_whole() -> None:
    specs = [TensorSpec(name=n, dtype="fp32", shape=(f"{n}.0", 2)) for n in "xy"]
    feeds = {"x": np.zeros((20, 2), np.float32), "y": np.zeros((30, 2), np.float32)}
    assert thinned(feeds, specs) is feeds


@pytest.mark.parametrize(("rows", "calls"), [(1, 8), (3, 3), (8, 1), (20, 1)])
def test_calls_are_probed_until_they_have_the_samples(rows: int, calls: int) -> None:
    session = Taking(("n", 2))
    feeds = [{"x": np.zeros((rows, 2), np.float32)}] * 12
    found = probed(feeds, session)
    assert len(found) == calls
    assert all(len(f["x"]) <= 8 for f in found)


def test_calls_are_left_whole_where_the_model_runs_on_whole_calls_alone() -> None:
    feeds = [{"x": np.zeros((20, 2), np.float32)}] * 12
    found = probed(feeds, Taking(("n", 2), only=20))
    assert [len(f["x"]) for f in found] == [20]


def test_calls_whose_inputs_share_no_dimension_are_a_sample_each() -> None:
    session = Taking(None, None)
    feeds = {"x": np.zeros((1, 64), np.float32), "y": np.zeros((2, 1), np.float32)}
    assert len(probed([feeds] * 12, session)) == 8
    assert len(probed([feeds] * 3, session)) == 3


@pytest.mark.parametrize(
    "change", [{"metric": METRICS["agreement"]}, {"batch": 2}, {"data_digest": "other"}]
)
def test_data_metric_and_batch_identify_a_workload(change: dict[str, Any]) -> None:
    data: Any = Dataset
    workload = DataWorkload(
        data=data,
        metric=METRICS["top1"],
        batch=1,
        data_digest="data",
        calibrate=list,
    )
    assert replace(workload).digest == workload.digest
    assert replace(workload, **change).digest != workload.digest
