"""Kernels that are missing or wrong here, found by running the module once.

A kernel can be wrong because it overflows inside, or computes coordinates in the low format.
So each op that a plan made low is run in fp32 as well, on the same rounded operands; the two
results may differ by a few roundings and not by more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.utils._pytree import tree_leaves, tree_map

from finecast import ops
from finecast.frontends import torch as frontend
from finecast.frontends.torch.runnable import Isolated
from finecast.ops import OpKind

_NO_KERNEL: Final = re.compile(r"not implemented for|not support|expected scalar type|dtype")
_LOW: Final = frozenset({torch.bfloat16, torch.float16})
# Allowed error as a multiple of eps, relative in the norm. A fused kernel rounds once for each
# of its ops, by up to eps / 2: this allows for sixteen roundings in a row.
_UNITS: Final = 8


def missing_kernels(module: GraphModule, leaves: Sequence[Any]) -> frozenset[str]:
    """Native names of ops without a working kernel in the format that the plan gave them."""
    finder = _Finder(module)
    try:
        with torch.no_grad():
            finder.leaves(leaves)
    except (RuntimeError, NotImplementedError):
        if not finder.failed:
            raise
    return finder.failed


class _Finder(Isolated):
    failed: frozenset[str] = frozenset()

    def run_node(self, n: FxNode) -> Any:
        """Run one node, and record its op if the kernel is missing or wrong."""
        try:
            result = super().run_node(n)
        except (RuntimeError, NotImplementedError) as error:
            if not _NO_KERNEL.search(str(error)):
                raise
            self.failed |= {frontend.native_name(n)}
            raise
        if _is_checked(n, result):
            wide = self._in_fp32(n)
            if any(is_wrong(a, b) for a, b in zip(tree_leaves(result), wide, strict=True)):
                self.failed |= {frontend.native_name(n)}
        return result

    def _in_fp32(self, node: FxNode) -> list[Any]:
        args, kwargs = tree_map(_widened, self.fetch_args_kwargs_from_env(node))
        assert isinstance(node.target, OpOverload)
        return tree_leaves(node.target(*args, **kwargs))


def _is_checked(node: FxNode, result: Any) -> bool:
    """Whether the op computes in a low format and is deterministic."""
    target = node.target
    if not isinstance(target, OpOverload) or target._schema.is_mutable:  # pyright: ignore[reportPrivateUsage]
        return False
    info = ops.lookup(frontend.native_name(node))
    if info.exact or info.kind in (OpKind.CAST, OpKind.RANDOM, OpKind.CONSTANT):
        return False
    lows = (x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.dtype in _LOW)
    random = torch.Tag.nondeterministic_seeded in target.tags
    return not random and next(lows, None) is not None


def _widened(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return arg.float() if arg.dtype in _LOW else arg
    return torch.float32 if isinstance(arg, torch.dtype) and arg in _LOW else arg


def is_wrong(low: Any, wide: Any) -> bool:
    """Whether ``low`` is off from ``wide`` by more than roundings, but for overflow."""
    if not isinstance(low, torch.Tensor) or low.dtype not in _LOW or low.numel() == 0:
        return False
    rounded = wide.to(low.dtype)
    fits = rounded.isfinite()
    if bool((fits & ~low.isfinite()).any()):
        return True
    error = (low.float() - wide).where(fits, 0.0).norm()
    return bool(error > _UNITS * torch.finfo(low.dtype).eps * wide.where(fits, 0.0).norm())
