from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import finecast.torch as ft
from finecast.numbers.formats import Format

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler"),
]


def error(y: torch.Tensor, reference: torch.Tensor) -> float:
    return float((y - reference).norm() / reference.norm())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_are_cast_once_and_anew_when_they_change(
    mode: Callable[[], AbstractContextManager[None]], request: pytest.FixtureRequest
) -> None:
    if mode is torch.no_grad:  # the kernels are the same
        request.getfixturevalue("op_by_op")
    torch.manual_seed(0)
    first_layer = nn.Linear(16, 64)
    net = nn.Sequential(first_layer, nn.ReLU(), nn.Linear(64, 16)).eval()
    first_layer.requires_grad_(requires_grad=False)
    x = torch.randn(4, 16)
    compiled = ft.compile(net, "all:bf16", accumulation=True)
    ahead = compiled.finecast_backend.cache
    assert ahead is not None
    with mode():
        first = compiled(x)
        casts = ahead.casts
        assert torch.equal(compiled(x), first)
        assert 0 < error(first, net(x)) < 10 * Format.BF16.unit_roundoff
    assert casts == 4
    assert ahead.casts == casts
    with torch.no_grad():
        first_layer.weight.mul_(2)
    with mode():
        assert error(compiled(x), net(x)) < 10 * Format.BF16.unit_roundoff
    assert ahead.casts == casts + 1
    # The same object trains, on the copies that it has.
    compiled(x).sum().backward()
    assert net[2].weight.grad is not None
    assert net[2].weight.grad.dtype is torch.float32
    assert ahead.casts == casts + 1


def _in_place(weights: list[nn.Parameter]) -> None:
    for weight in weights:
        weight.data.copy_(torch.randn_like(weight))


def _other_data(weights: list[nn.Parameter]) -> None:
    for weight in weights:
        weight.data = torch.randn_like(weight)


def _by_numpy(weights: list[nn.Parameter]) -> None:
    for weight in weights:
        weight.detach().numpy()[:] = 3.0


def _from_vector(weights: list[nn.Parameter]) -> None:
    count = sum(weight.numel() for weight in weights)
    nn.utils.vector_to_parameters(torch.randn(count), weights)


@pytest.mark.parametrize(
    ("write", "accumulation"),
    [
        *((w, False) for w in (_in_place, _other_data, _by_numpy, _from_vector)),
        *((w, True) for w in (_other_data, _from_vector)),  # nothing tells of the others
    ],
)
def test_weights_that_are_written_past_autograd_count(
    write: Callable[[list[nn.Parameter]], None], op_by_op: None, *, accumulation: bool
) -> None:
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    x = torch.randn(4, 16)
    compiled = ft.compile(net, "all:bf16", accumulation=accumulation)
    with torch.no_grad():
        compiled(x)
        write(list(net.parameters()))
        assert error(compiled(x), net(x)) < 10 * Format.BF16.unit_roundoff
