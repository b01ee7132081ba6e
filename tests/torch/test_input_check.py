"""Converted modules refuse inputs that they were not captured for."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.export import Dim

import finecast.torch as ft
from finecast.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Scaled(nn.Module):
    """A product, scaled by a number, and masked where a mask is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = self.linear(x) * scale
        return y if mask is None else y * mask


class Branches(nn.Module):
    """Another function for more than four rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y.relu() if x.shape[0] > 4 else y.tanh()


def test_another_number_is_an_error() -> None:
    x = torch.randn(3, 4)
    low = ft.convert(Scaled(), (x, 2.0), "matmult:bf16")
    assert low(x, 2.0).shape == (3, 4)
    with pytest.raises(UsageError, match=r"'scale' was captured with 2\.0, got 3\.0"):
        low(x, 3.0)


def test_a_graph_that_does_not_run_for_another_size_says_so() -> None:
    class Rows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu().reshape(x.shape[0] * 2, -1)

    low = ft.convert(Rows(), (torch.randn(3, 4),), "all:bf16")
    with (
        pytest.warns(UserWarning, match="captured with 3 in axis 0, got 5"),
        pytest.raises(UsageError, match="got 5, and the module does not run with it: shape"),
    ):
        low(torch.randn(5, 4))


def test_a_lack_of_memory_is_no_fault_of_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    low = ft.convert(nn.ReLU(), (torch.randn(3, 4),), "all:bf16")

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(low, "forward", full)
    with (
        pytest.warns(UserWarning, match="captured with 3"),
        pytest.raises(torch.OutOfMemoryError),
    ):
        low(torch.randn(5, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64])
def test_another_type_is_an_error(dtype: torch.dtype) -> None:
    """The graph's casts would take it, where the module itself raises an error."""
    low = ft.convert(Scaled(), (torch.randn(3, 4), 2.0), "matmult:bf16")
    with pytest.raises(UsageError, match=f"captured with torch.float32, got {dtype}"):
        low(torch.ones(3, 4, dtype=dtype), 2.0)


def test_ids_come_in_any_integers() -> None:
    low = ft.convert(nn.Embedding(4, 4), (torch.tensor([1, 2]),), "none")
    ids = torch.tensor([1, 2], dtype=torch.int32)
    assert torch.equal(low(ids), low(ids.long()))


def test_other_errors_are_those_of_the_module() -> None:
    low = ft.convert(nn.Embedding(4, 4), (torch.tensor([1, 2]),), "none")
    with pytest.raises(IndexError):
        low(torch.tensor([1, 7]))


def test_none_is_no_tensor() -> None:
    x = torch.randn(3, 4)
    without = ft.convert(Scaled(), (x, 1.0, None), "matmult:bf16")
    with pytest.raises(UsageError, match="'mask' was captured with None, got a tensor"):
        without(x, 1.0, x)
    masked = ft.convert(Scaled(), (x, 1.0, x), "matmult:bf16")
    with pytest.raises(UsageError, match="'mask' was captured with a tensor of 2 axes"):
        masked(x, 1.0, None)


def test_a_size_outside_its_bounds_is_an_error() -> None:
    shapes = ({0: Dim("rows", min=5)},)
    low = ft.convert(Branches(), (torch.randn(6, 4),), "matmult:bf16", shapes)
    assert low(torch.randn(9, 4)).shape == (9, 4)
    with pytest.raises(UsageError, match="'x' was captured with at least 5 in axis 0, got 2"):
        low(torch.randn(2, 4))


def test_sizes_of_one_name_are_equal() -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x + y).relu()

    rows = Dim("rows")
    x = torch.randn(6, 4)
    low = ft.convert(Sum(), (x, x), "all:bf16", ({0: rows}, {0: rows}))
    with pytest.raises(UsageError, match="'y' was captured with 6 in axis 0, as other inputs"):
        low(x, x[:1])


def test_another_fixed_size_is_told_once() -> None:
    low = ft.convert(Branches(), (torch.randn(6, 4),), "matmult:bf16")
    with pytest.warns(UserWarning, match="'x' was captured with 6 in axis 0, got 2"):
        low(torch.randn(2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low(torch.randn(2, 4))


class Recurrent(nn.Module):
    """An LSTM, for whose state torch.export writes down the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.lstm(x)[0] * scale


@pytest.mark.parametrize("count", [2, 7])
@pytest.mark.filterwarnings("ignore:.*was captured with:UserWarning")
def test_an_lstm_refuses_another_number_of_samples(count: int) -> None:
    """Its op in ATen would write beyond its memory."""
    low = ft.convert(Recurrent(), (torch.randn(3, 5, 4),), "all:bf16")
    with pytest.raises(UsageError, match=f"LSTM is of 3 samples, its input of {count}"):
        low(x=torch.randn(count, 5, 4))
    with pytest.raises(UsageError, match=f"LSTM is of 3 samples, its input of {count}"):
        torch.compile(low, backend="eager")(torch.randn(count, 5, 4))
    assert low(torch.randn(3, 6, 4)).shape == (3, 6, 4)


def test_copies_check_too() -> None:
    x = torch.randn(3, 4)
    low = ft.convert(Scaled(), (x, 2.0), "matmult:bf16")
    with pytest.raises(UsageError, match="'scale' was captured with 2"):
        copy.deepcopy(copy.deepcopy(low))(x, 3.0)


def test_compiled_modules_check_too() -> None:
    def plain(graph: Any, _: Any) -> Any:
        return graph

    x = torch.randn(3, 4)
    low = torch.compile(ft.convert(Scaled(), (x, 2.0), "matmult:bf16"), backend=plain)
    assert low(x, 2.0).shape == (3, 4)
    with pytest.raises(UsageError, match="'scale' was captured with 2"):
        low(x, 3.0)
