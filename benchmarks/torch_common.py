"""What the PyTorch benchmarks share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.common import skip

if importlib.util.find_spec("torch") is None:
    skip("torch", "PyTorch is not installed: pip install 'finecast[torch]'")
    sys.exit()

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A network and its inputs."""

    net: Callable[[], nn.Module]
    inputs: Callable[[], tuple[torch.Tensor, ...]]


def ids(batch: int, tokens: int) -> tuple[torch.Tensor]:
    """Random tokens."""
    return (torch.randint(0, 1000, (batch, tokens)),)


def images(batch: int) -> tuple[torch.Tensor]:
    """Random images."""
    return (torch.randn(batch, 3, 224, 224),)


def under_autocast(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` inside bf16 autocast on the CPU."""

    def run(*args: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return call(*args)

    return run


def settled(net: nn.Module, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
    """``net`` in evaluation mode, its batch norms with the statistics of ``inputs``.

    Without these the outputs of a random deep net vanish, and their errors mean nothing.
    """
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    net.eval()
    if norms:
        for norm in norms:
            norm.train()
            norm.momentum = None
        with torch.no_grad():
            # At least two samples: over one, a map of a single element has no variance.
            net(*(torch.cat((x, x.flip(-1))) for x in inputs))
    return net.eval()
