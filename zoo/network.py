"""One architecture: how to build it, and what to call it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

Inputs = dict[str, torch.Tensor]
_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """An architecture with random weights, in a small configuration.

    ``inputs`` are keyword arguments in the order of ``forward``'s parameters. ``dynamic``
    has the axes that exports leave open, by input. ``settings`` are for
    ``torch.onnx.export``: an opset, say.
    """

    name: str
    library: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict[str, Any])

    def make(self) -> tuple[nn.Module, Inputs]:
        """The network in evaluation mode and its inputs, the same in every process."""
        torch.manual_seed(0)
        inputs = self.inputs()
        net = without_dropout(self.build())
        vary(net)
        return settled(net, inputs), inputs


def vary(net: nn.Module) -> None:
    """Add noise to parameters that are the same everywhere, as they are before training only.

    Biases of 0 and scales of 1 would hide what is done to them; layers that begin as 0, as
    those of a ControlNet do, hide everything before them.
    """
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.numel() > 1 and parameter.min() == parameter.max():
                parameter += 0.05 * torch.randn_like(parameter)


def without_dropout(net: nn.Module) -> nn.Module:
    """``net`` with every rate of dropout 0, so that training is the same in each precision."""
    for module in net.modules():
        is_dropout = any(word in type(module).__name__ for word in ("Drop", "Stochastic"))
        # Layers of transformers ask their configuration, as of layers to be left out.
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                rate = isinstance(value, float) and (
                    "drop" in name or (is_dropout and name == "p")
                )
                if rate:
                    setattr(holder, name, 0.0)
    return net


def settled(net: nn.Module, inputs: Inputs) -> nn.Module:
    """``net`` in evaluation mode, its batch norms with the statistics of ``inputs``.

    A random deep network with the statistics that it was born with gives numbers that vanish.
    """
    norms = [m for m in net.modules() if isinstance(m, _NORMS)]
    net.eval()
    for norm in norms:
        norm.train()
        norm.momentum = None
    if norms:
        with torch.no_grad():
            net(**inputs)
    for norm in norms:
        norm.momentum = 0.1
    return net.eval()


def float_outputs(result: Any) -> list[torch.Tensor]:
    """The float tensors of what a network returns, in order."""
    return list(_floats(result))


def _floats(result: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            yield leaf


def relative_error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """The norm of the difference over the norm of ``want``; the largest of all outputs.

    An output that is 0 throughout counts by its largest difference.

    Raises:
        ValueError: If number or shapes of outputs differ.
    """
    if [tuple(x.shape) for x in got] != [tuple(x.shape) for x in want]:
        raise ValueError(
            f"outputs have shapes {[list(x.shape) for x in got]}, "
            f"not {[list(x.shape) for x in want]}"
        )
    errors = [0.0]
    for mine, true in zip(got, want, strict=True):
        both = true.isinf() & (mine.double() == true.double())  # masks of attention
        difference = (mine.double() - true.double()).masked_fill(both, 0.0)
        norm = true.double().masked_fill(both, 0.0).norm()
        errors.append(float(difference.norm() / norm) if norm else float(difference.norm()))
    # NaN wins, which max() would not let it.
    return float(torch.tensor(errors).max())
