"""What surrounds a module as it is converted: autocast, the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import finecast.torch as ft
from finecast.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def converted(module: nn.Module, x: torch.Tensor) -> object:
    return ft.convert(module, (x,), "all:bf16")


def tuned(module: nn.Module, x: torch.Tensor) -> object:
    return ft.tune(module, (x,), evaluate=lambda m: float(m(x).detach().float().mean()))


VERBS = pytest.mark.parametrize("verb", [converted, tuned])


@VERBS
def test_a_module_without_numbers_is_one_error(verb: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="'weight' is on the meta device"):
        verb(nn.Linear(4, 4, device="meta"), torch.ones(2, 4, device="meta"))


@VERBS
def test_weights_that_stand_for_others_are_one_error(verb: Callable[..., Any]) -> None:
    """Tools that quantize (torchao) or shard a module make its weights such tensors."""
    module, x = nn.Linear(4, 4), torch.ones(2, 4)
    parts = (module.weight.detach(), module.weight.detach().clone())
    module.weight = nn.Parameter(TwoTensor(*parts))
    with pytest.raises(UsageError, match="'weight' is a TwoTensor"):
        verb(module, x)


@VERBS
def test_nothing_is_converted_inside_of_autocast(verb: Callable[..., Any]) -> None:
    """The module captured there would give bf16, and its casts would be no plan's."""
    module, x = nn.Linear(4, 4), torch.ones(2, 4)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(UsageError, match=r"torch\.autocast\('cpu'\) is on"),
    ):
        verb(module, x)
    verb(module, x)


def test_a_converted_module_is_not_cast_once_more_by_autocast() -> None:
    """Ops that the plan keeps in fp32 were in bf16, without a word."""
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
    low = ft.convert(module, (x,), "none")
    wanted = low(x)
    for called in (low, torch.compile(low, backend="eager")):
        with torch.autocast("cpu", torch.bfloat16):
            with pytest.raises(UsageError, match=r"torch\.autocast\('cpu'\) is on"):
                called(x)
            with torch.autocast("cpu", enabled=False):
                assert torch.equal(called(x), wanted)
        with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
            assert torch.equal(called(x), wanted)
