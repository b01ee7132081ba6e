"""Products on integers in compiled modules: which ops can be, and how many were."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from finecast.frontends.torch.capture import quiet
from finecast.graph import Node

_FUSED: Final = frozenset({"aten::linear", "aten::conv2d"})
"""Ops whose codes Inductor's passes for x86 take into one kernel."""
_CALL: Final = re.compile(r"torch\.ops\.onednn\.q(?:linear|conv)\w*\.\w+\(")


def takes_codes(node: Node) -> bool:
    """Whether a compiled module may run ``node`` on integers."""
    return node.native in _FUSED


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProducts:
    """Products on integers, by the code that was generated.

    ``error`` is that of the outputs, relative to what the module's own ops compute: sums of
    8-bit products saturate on CPUs without VNNI.
    """

    count: int
    error: float


def products_on_integers(
    module: GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> CompiledProducts:
    """What the compiled module runs on integers.

    Raises:
        RuntimeError: If it cannot be compiled.
    """
    torch.compiler.reset()
    with (
        quiet(),
        torch.no_grad(),
        config.patch({"freezing": True, "fx_graph_cache": False}),
    ):
        want = tree_leaves(module(*args, **kwargs))
        got, code = run_and_get_code(torch.compile(module), *args, **kwargs)
    outputs = zip(tree_leaves(got), want, strict=True)
    pairs = [(a.double(), b.double()) for a, b in outputs if isinstance(b, torch.Tensor)]
    off = sum(float((a - b).square().sum()) for a, b in pairs)
    size = sum(float(b.square().sum()) for _, b in pairs)
    return CompiledProducts(
        count=sum(len(_CALL.findall(source)) for source in code),
        error=math.sqrt(off / size) if size else math.sqrt(off),
    )
