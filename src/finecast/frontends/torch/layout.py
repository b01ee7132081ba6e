"""Strides of values, which casts and decompositions change, and ops that depend on them."""

from __future__ import annotations

from typing import Final

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from finecast.frontends.torch.aten import VIEWS, native_name

_VIEWS: Final = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def free_of_strides(module: GraphModule) -> None:
    """Replace views by reshapes, which copy where strides no longer allow a view.

    A cast removes gaps from a layout, a cast that is dropped no longer does, and a
    decomposition may lay out its result otherwise than the op's kernel. Where strides are as
    they were when the graph was captured, nothing is copied.
    """
    for view in _VIEWS:
        for node in module.graph.find_nodes(op="call_function", target=view):
            node.target = torch.ops.aten.reshape.default
    module.recompile()


def read_whole_memory(module: GraphModule) -> None:
    """Let ``as_strided`` read the tensor that its argument is a view of, at the same offset.

    Its sizes and strides are positions in memory, gaps of the view among them. A cast between
    the view and ``as_strided`` would remove the gaps.
    """
    strided = torch.ops.aten.as_strided.default
    for node in module.graph.find_nodes(op="call_function", target=strided):
        view, size, stride, *offset = node.args
        start = offset[0] if offset else view.meta["val"].storage_offset()
        if isinstance(start, int):
            node.args = (_viewed(view), size, stride, start)
    module.recompile()


def _viewed(node: FxNode) -> FxNode:
    """What ``node`` is a view of, through any number of views; or ``node`` itself."""
    while node.op == "call_function" and native_name(node) in VIEWS:
        source = node.args[0]
        if not isinstance(source, FxNode):
            break
        node = source
    return node
