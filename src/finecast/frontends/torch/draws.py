"""PyTorch programs whose random ops draw the same in each run, and in each format."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_LOW: Final = (torch.float16, torch.bfloat16)
_NUMBER: Final = "finecast_draw"
"""The key of a node's ``meta`` under which its number among the random ops is."""


def draws(program: torch.export.ExportedProgram) -> bool:
    """Whether a program has a random op, in bodies of control flow, too."""
    modules = (m for m in program.graph_module.modules() if isinstance(m, GraphModule))
    return any(_draws(node) for m in modules for node in m.graph.nodes)


def number_draws(graph: Graph) -> None:
    """Note the number of each random op, which copies of the graph and parts of it keep.

    Without it a copy that lacks some of the ops, or has those of another model, would draw
    other numbers than the whole model.
    """
    for number, node in enumerate(filter(_draws, graph.nodes)):
        node.meta[_NUMBER] = number


def draw_numbers(graph: Graph) -> tuple[int, ...]:
    """The numbers of the random ops, in order; those that were not noted have their place."""
    nodes = filter(_draws, graph.nodes)
    return tuple(node.meta.get(_NUMBER, place) for place, node in enumerate(nodes))


def _draws(node: Node) -> bool:
    return _call_draws(node.target, node.args, node.kwargs)


def _call_draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws: dropout does in training alone, attention if it drops out."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    names = [argument.name for argument in target._schema.arguments]
    stated = dict(zip(names, args, strict=False)) | dict(kwargs)
    switches = [name for name in ("train", "training", "dropout_p") if name in names]
    return all(stated.get(name) for name in switches)


@contextmanager
def fixed_draws(numbers: Sequence[int] | None) -> Generator[None]:
    """Inside, each random op draws in fp32 what its number among them stands for.

    The generator's state is as before afterwards.

    Args:
        numbers: The numbers of the calls that draw, in order; a call beyond them has its
            place. None to leave draws as they are.
    """
    if numbers is None:
        yield
        return
    with torch.random.fork_rng(devices=[]), _FixedDraws(numbers):
        yield


class _FixedDraws(TorchDispatchMode):
    """A seed of its own for each random op; what is low is drawn in fp32, and then cast."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self._numbers = numbers
        self._place = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _call_draws(func, args, kwargs):
            return func(*args, **kwargs)
        known = self._place < len(self._numbers)
        torch.manual_seed(self._numbers[self._place] if known else self._place)
        self._place += 1
        wide = tree_map_only(torch.Tensor, _widened, (args, kwargs))
        if kwargs.get("dtype") in _LOW:
            wide[1]["dtype"] = torch.float32
        result = func(*wide[0], **wide[1])
        if func._schema.is_mutable:  # by its first argument, as ``bernoulli_``
            return args[0].copy_(wide[0][0])
        low = kwargs.get("dtype") or next(
            (a.dtype for a in args if isinstance(a, torch.Tensor)), torch.float32
        )
        if low not in _LOW:
            return result
        return tree_map_only(
            torch.Tensor, lambda x: x.to(low) if x.dtype is torch.float32 else x, result
        )


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _LOW else tensor
