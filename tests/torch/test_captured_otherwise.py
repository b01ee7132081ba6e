"""Modules that torch.export captures as another function than they are."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import finecast

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")

OTHER = "the module gives other numbers than what torch.export captures of it"


class Padded(nn.Module):
    """An encoder whose fast path, which is not captured, gives zeros for padded inputs."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=mask)


class Draws(nn.Module):
    """Random numbers are equal from equal seeds; NaN is what both give."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + torch.rand_like(x), (x - 9.0).sqrt()


def test_an_error_that_no_format_makes_is_told_with_the_way_out() -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]])
    given: dict[str, Any] = {"policy": "all:bf16", "example_inputs": (x, mask)}
    module = Padded().eval()
    done = finecast.convert(module, **given)
    assert any(text.startswith(OTHER) for text in done.warnings)
    assert "set_fastpath_enabled(False)" in str(done)
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        done = finecast.convert(module, **given)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    assert not any(text.startswith(OTHER) for text in done.warnings)
    assert done.verified.relative_error is not None
    assert done.verified.relative_error < 0.02


def test_draws_and_what_both_do_not_define_are_no_difference() -> None:
    done = finecast.convert(Draws(), policy="all:bf16", example_inputs=(torch.ones(4, 4),))
    assert not any(text.startswith(OTHER) for text in done.warnings)
