"""How values lie in memory, which is not the same after casts, steps and decompositions."""

from __future__ import annotations

from typing import Final

import torch
from torch.fx import GraphModule

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
