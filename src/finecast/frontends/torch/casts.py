"""Removes casts that a plan's and the module's own together make superfluous.

Laws: a value has at most one cast to a type, and none to the type that it has; a cast of a
widened value reads the value before it was widened. No number changes, as widening is exact.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from finecast.frontends.torch.aten import DTYPES, native_name
from finecast.numbers.formats import Format

_FORMATS = {dtype: fmt for fmt, dtype in DTYPES.items()}
_INPUTS = frozenset({"placeholder", "get_attr"})


def simplify_casts(module: GraphModule) -> None:
    """Merge and drop conversions in place; ``meta["val"]`` of every node has its type."""
    known: dict[tuple[FxNode, torch.dtype], FxNode] = {}
    for node in list(module.graph.nodes):
        dtype = conversion(node)
        if dtype is None:
            continue
        source = _narrowest(node.all_input_nodes[0])
        if source is not node.all_input_nodes[0]:
            node.replace_input_with(node.all_input_nodes[0], source)
        same = source if _dtype(source) is dtype else known.setdefault((source, dtype), node)
        if same is not node and not _leaks(same, node):
            node.replace_all_uses_with(same)
    module.graph.eliminate_dead_code()


def conversion(node: FxNode) -> torch.dtype | None:
    """The float type that a plain conversion gives; None for any other node."""
    native = native_name(node)
    if native == "prims::convert_element_type":
        found = node.args[1]
    elif native == "aten::_to_copy" and {k for k, v in node.kwargs.items() if v} == {"dtype"}:
        found = node.kwargs["dtype"]
    else:
        return None
    return found if isinstance(found, torch.dtype) and _dtype(node) in _FORMATS else None


def _narrowest(source: FxNode) -> FxNode:
    """The value that ``source`` was widened from, through all casts; or ``source`` itself."""
    while (dtype := conversion(source)) is not None:
        before = source.all_input_nodes[0]
        if not _holds(dtype, _dtype(before)):
            break
        source = before
    return source


def _holds(wide: torch.dtype, narrow: torch.dtype | None) -> bool:
    """Whether ``wide`` holds every number of ``narrow`` exactly."""
    if narrow is None or narrow not in _FORMATS or wide not in _FORMATS:
        return False
    a: Format = _FORMATS[wide]
    b: Format = _FORMATS[narrow]
    return b.mantissa_bits <= a.mantissa_bits and b.exponent_bits <= a.exponent_bits


def _leaks(source: FxNode, cast: FxNode) -> bool:
    """Whether the model would give out the caller's memory without ``cast``, which copies.

    It also is kept if the graph writes to ``source``, an input or attribute.
    """
    if source.op not in _INPUTS:
        return False
    written = any(native_name(u) == "aten::copy_" for u in source.users)
    return written or any(u.op == "output" for u in cast.users)


def _dtype(node: FxNode) -> torch.dtype | None:
    val = node.meta.get("val")
    return val.dtype if isinstance(val, torch.Tensor) else None
