"""PyTorch programs whose random ops draw the same in each run, and in each format."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_LOW: Final = (torch.float16, torch.bfloat16)


def draws(program: torch.export.ExportedProgram) -> bool:
    """Whether a program has a random op, in bodies of control flow, too."""
    modules = (m for m in program.graph_module.modules() if isinstance(m, GraphModule))
    return any(_draws(node) for m in modules for node in m.graph.nodes)


def _draws(node: Node) -> bool:
    """Whether a node draws: dropout does in training alone, attention if it drops out."""
    if not _is_random(node.target):
        return False
    stated: Any = node.target
    names = [argument.name for argument in stated._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    switches = [name for name in ("train", "training", "dropout_p") if name in names]
    return all(given.get(name) for name in switches)


def _is_random(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


@contextmanager
def fixed_draws(*, fixed: bool = True) -> Generator[None]:
    """Inside, each random op draws what its number among them stands for, in fp32.

    The generator's state is as before afterwards. Unless ``fixed`` nothing is changed.
    """
    if not fixed:
        yield
        return
    with torch.random.fork_rng(devices=[]), _FixedDraws():
        yield


class _FixedDraws(TorchDispatchMode):
    """A seed of its own for each random op; what is low is drawn in fp32, and then cast."""

    def __init__(self) -> None:
        super().__init__()
        self._number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_random(func):
            return func(*args, **kwargs)
        torch.manual_seed(self._number)
        self._number += 1
        wide = tree_map_only(torch.Tensor, _widened, (args, kwargs))
        if kwargs.get("dtype") in _LOW:
            wide[1]["dtype"] = torch.float32
        found = func(*wide[0], **wide[1])
        if func._schema.is_mutable:  # by its first argument, as ``bernoulli_``
            return args[0].copy_(wide[0][0])
        low = kwargs.get("dtype") or next(
            (a.dtype for a in args if isinstance(a, torch.Tensor)), torch.float32
        )
        if low not in _LOW:
            return found
        return tree_map_only(
            torch.Tensor, lambda x: x.to(low) if x.dtype is torch.float32 else x, found
        )


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _LOW else tensor
