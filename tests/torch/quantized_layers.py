"""A net of products by weights in all spellings, and what numpy makes of it in a format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Array = NDArray[np.float32]
Net = tuple[nn.Module, torch.Tensor]
Rounding = Callable[[Array], Array]


class Layers(nn.Module):
    """Two layers read the same value, one result is read twice, and one size is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(32, 48), nn.Linear(32, 48, bias=False)
        self.matrix = nn.Parameter(torch.randn(48, 16))
        self.added = nn.Parameter(torch.randn(32))
        self.last = nn.Parameter(torch.randn(16, 32))
        self.odd = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x)
        hidden = torch.relu(query) + self.key(x) * query.sigmoid()
        rows = (hidden @ self.matrix).flatten(0, 1)
        return self.odd(torch.addmm(self.added, rows, self.last))


def layers() -> Net:
    """The net and inputs, with a row of zeros and a channel that is far larger."""
    torch.manual_seed(0)
    x = torch.randn(5, 3, 32)
    x[0, 1] = 0
    x[2, :, 7] *= 50
    return Layers().eval(), x


def product(x: Array, weights: torch.Tensor, rounded: Rounding) -> Array:
    """By weights of which each row makes an output."""
    return rounded(x) @ rounded(weights.detach().numpy()).T


def expected(net: Any, x: torch.Tensor, rounded: Rounding, *, odd: Rounding) -> Array:
    """The outputs if products round rows and channels; ``odd`` is that of the odd size."""
    query = product(x.numpy(), net.query.weight, rounded) + net.query.bias.detach().numpy()
    key = product(x.numpy(), net.key.weight, rounded)
    hidden = np.maximum(query, 0) + key / (1 + np.exp(-query))
    rows = product(hidden, net.matrix.T, rounded).reshape(-1, 16)
    last = product(rows, net.last.T, rounded) + net.added.detach().numpy()
    return product(last, net.odd.weight, odd) + net.odd.bias.detach().numpy()


def relative(got: Any, want: Any) -> float:
    """The relative error of arrays or tensors."""
    return float(np.linalg.norm(np.asarray(got - want)) / np.linalg.norm(np.asarray(want)))
