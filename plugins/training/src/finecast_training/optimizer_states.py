"""What is held in a lower format between optimizer steps: their states, and gradients.

An optimizer computes in fp32 as before: what it holds low is widened before its step, and
rounded after it, by the hooks that PyTorch's optimizers have. Memory is less from one
optimizer step to the next: in the forward and the backward pass, where most is needed.
Gradients that several backward passes add up are rounded in each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

import torch
from torch import nn
from torch.optim import Optimizer

GRADIENTS: Final = "gradients"
"""What is held, among the names of states, if gradients are added up in the format."""


class HeldStates:
    """Holds states of optimizers in a format, until ``release``.

    Law: after each optimizer step these states are what fp32 gave, rounded to nearest. A
    gradient is the sum of the backward passes' since then, each sum rounded so.

    Args:
        optimizers: Their owners.
        names: What the optimizers call these states, as ``exp_avg``; or ``GRADIENTS``.
        dtype: The format.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], names: Collection[str], dtype: torch.dtype
    ) -> None:
        self.optimizers = optimizers
        self.names = names
        self.dtype = dtype
        self._hooks = [
            hook
            for optimizer in optimizers
            for hook in (
                optimizer.register_step_pre_hook(lambda own, *_: self._cast(own, wide=True)),
                optimizer.register_step_post_hook(lambda own, *_: self._cast(own)),
            )
        ]
        self.round()

    def round(self) -> None:
        """Round the states, as after a step: others may have put states in fp32 there."""
        for optimizer in self.optimizers:
            self._cast(optimizer)

    def release(self) -> None:
        """Leave the states to their optimizers, in fp32."""
        for hook in self._hooks:
            hook.remove()
        for optimizer in self.optimizers:
            self._cast(optimizer, wide=True)

    def _cast(self, optimizer: Optimizer, *, wide: bool = False) -> None:
        was, to = torch.float32, self.dtype
        if wide:
            was, to = to, was
        for state in optimizer.state.values():
            for name in self.names:
                tensor = state.get(name)
                if isinstance(tensor, torch.Tensor) and tensor.dtype is was:
                    state[name] = tensor.to(to)
        if GRADIENTS in self.names:
            for p in trained_by(optimizer):
                gradient, p.grad = p.grad, None  # a type that differs from its own is refused
                p.grad_dtype = p.dtype if wide else self.dtype
                p.grad = gradient if gradient is None else gradient.to(p.grad_dtype)


def trained_by(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """The parameters in fp32 that an optimizer trains."""
    for group in optimizer.param_groups:
        yield from (p for p in group["params"] if p.dtype is torch.float32)


def wide_states(optimizers: Sequence[Optimizer]) -> dict[str, int]:
    """Bytes by name of the states in fp32 that have an element for each of a parameter's."""
    sizes: dict[str, int] = {}
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            for name, tensor in state.items():
                if (
                    isinstance(tensor, torch.Tensor)
                    and tensor.dtype is torch.float32
                    and tensor.shape == p.shape
                ):
                    sizes[name] = sizes.get(name, 0) + tensor.nbytes
    return sizes
