"""Batches from lists, dicts, tuples and DataLoaders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from finecast.data.streams import Stream, re_iterable
from finecast.engines.base import TensorSpec
from finecast.errors import UsageError

X = np.arange(24, dtype=np.float64).reshape(8, 3)
Y = np.arange(8)
SPECS = (
    TensorSpec(name="x", dtype="fp32", shape=("N", 3)),
    TensorSpec(name="mask", dtype="int64", shape=("N",)),
)


def stream(items: Any, specs: tuple[TensorSpec, ...] = SPECS[:1]) -> Stream:
    return Stream(inputs=specs, source=re_iterable(items))


@pytest.mark.parametrize(
    "item",
    [
        {"x": X, "label": Y},
        {"x": X, "labels": Y.tolist()},
        (X, Y),
        [X, Y],
        ({"x": X}, Y),
        ((X,), Y),
    ],
)
def test_a_batch_has_inputs_and_labels_in_many_forms(item: Any) -> None:
    for _ in range(2):  # every pass starts anew
        (batch,) = stream([item]).batches(99)
        assert batch.feeds["x"].dtype == np.float32
        np.testing.assert_array_equal(batch.feeds["x"], X)
        assert batch.labels is not None
        assert batch.labels.tolist() == Y.tolist()
        assert (batch.count, batch.rows) == (8, 8)


@pytest.mark.parametrize("item", [{"x": X, "mask": Y}, (X, Y)])
def test_without_labels_all_arrays_are_inputs(item: Any) -> None:
    (batch,) = stream([item], SPECS).batches(1)
    assert batch.labels is None
    assert set(batch.feeds) == {"x", "mask"}


def test_a_last_batch_fills_the_batch_size_of_the_model() -> None:
    """As a DataLoader's, for a model that was exported with a fixed batch size."""
    specs = (TensorSpec(name="x", dtype="fp32", shape=(5, 3)),)
    whole, last = stream([(X[:5], Y[:5]), (X[5:], Y[5:])], specs).batches(1)
    assert (whole.count, whole.rows) == (5, 5)
    assert (last.count, last.rows) == (3, 5)
    assert last.labels is not None
    np.testing.assert_array_equal(last.labels, Y[5:])
    np.testing.assert_array_equal(last.feeds["x"], X[[5, 6, 7, 7, 7]])
    np.testing.assert_array_equal(last.trim({"y": last.feeds["x"]})["y"], X[5:])


def test_limit_counts_samples() -> None:
    assert len(list(stream([X[:3]] * 5).batches(1, limit=6))) == 2


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([], "yields no batch"),
        ([{"y": X}], r"unknown input 'y' .*use one of x"),
        ([{}], r"input 'x' is missing"),
        ([(X, Y, Y)], "a batch has 3 parts, the model 1 inputs"),
        ([X[:, :2]], r"array 'x' has shape \[8, 2\], expected \[N, 3\]"),
        ([X.astype(int)], "array 'x' has type int64, expected fp32"),
        ([X * np.nan], "array 'x' holds NaN"),
    ],
)
def test_batches_that_do_not_fit(items: list[Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        list(stream(items).batches(1))


def test_what_can_be_read_only_once_is_refused() -> None:
    with pytest.raises(UsageError, match="can be read only once"):
        re_iterable(iter([X]))
    with pytest.raises(UsageError, match="of type int is not iterable"):
        re_iterable(3)  # pyright: ignore[reportArgumentType]


def test_torchs_loader() -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    batches = list(stream(torch.utils.data.DataLoader(data, batch_size=3)).batches(1))
    assert [b.count for b in batches] == [3, 3, 2]
    np.testing.assert_array_equal(np.concatenate([b.feeds["x"] for b in batches]), X)


def test_batches_larger_than_the_models_are_cut() -> None:
    """A DataLoader's batch size need not be that of the example inputs."""
    specs = (TensorSpec(name="x", dtype="fp32", shape=(3, 3)),)
    batches = list(stream([(X, Y)], specs).batches(1))
    assert [(b.count, b.rows) for b in batches] == [(3, 3), (3, 3), (2, 3)]
    np.testing.assert_array_equal(
        np.concatenate([b.feeds["x"][: b.count] for b in batches]), X
    )
    assert [n for b in batches if b.labels is not None for n in b.labels] == Y.tolist()


def test_single_samples_are_told_how_to_become_batches() -> None:
    """As of a Dataset of torch's without a DataLoader."""
    with pytest.raises(UsageError, match="yields single samples: array 'x' has shape") as told:
        list(stream([(row, 0) for row in X]).batches(1))
    assert "DataLoader" in str(told.value.fix)


def test_samples_that_come_several_times_are_counted() -> None:
    assert stream([X, X[:2]]).copies == 2  # in another batch
    assert stream([X[[0, 1, 0]]]).copies == 1  # in the same one
    assert stream([X, X + 1]).copies == 0


def test_a_sampler_with_replacement_gives_copies() -> None:
    rows: Any = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.arange(8))
    drawn = torch.utils.data.RandomSampler(rows, replacement=True, num_samples=20)
    loader = torch.utils.data.DataLoader(rows, batch_size=3, sampler=drawn)
    assert stream(loader).copies >= 12


def test_an_input_that_all_samples_share_tells_no_samples_apart() -> None:
    shared = TensorSpec(name="table", dtype="fp32", shape=(2, 3))
    item = {"x": X[[0, 1, 1]], "table": X[:2]}
    assert stream([item], (SPECS[0], shared)).copies == 1
