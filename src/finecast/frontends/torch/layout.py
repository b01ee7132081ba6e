"""How values lie in memory, which is not the same after casts, steps and decompositions."""

from __future__ import annotations

from typing import Final

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from finecast.frontends.torch.aten import VIEWS, native_name

_VIEWS: Final = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def free_of_strides(module: GraphModule) -> None:
    """Have views copy where memory does not lie as it did when the graph was captured.

    A cast packs what had gaps, a cast that is dropped no longer does, and a decomposition may
    lay out its result otherwise than the op's kernel. Where memory lies as it did, nothing
    is copied.
    """
    for view in _VIEWS:
        for node in module.graph.find_nodes(op="call_function", target=view):
            node.target = torch.ops.aten.reshape.default
    module.recompile()


def read_whole_memory(module: GraphModule) -> None:
    """Have ``as_strided`` read what its argument is a view of.

    Where that has gaps, a cast between the two would pack it.
    """
    strided = torch.ops.aten.as_strided.default
    for node in module.graph.find_nodes(op="call_function", target=strided):
        view, size, stride, *offset = node.args
        start = offset[0] if offset else view.meta["val"].storage_offset()
        if isinstance(start, int):
            node.args = (_viewed(view), size, stride, start)
    module.recompile()


def _viewed(node: FxNode) -> FxNode:
    while node.op == "call_function" and native_name(node) in VIEWS:
        source = node.args[0]
        if not isinstance(source, FxNode):
            break
        node = source
    return node
