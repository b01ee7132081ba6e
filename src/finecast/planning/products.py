"""Products and reductions: which ops they are, and the axes that they compute along."""

from __future__ import annotations

from typing import Final

from finecast.graph import Graph, Node
from finecast.planning.adjustments import constant_at

CONVOLUTIONS: Final = frozenset({"conv", "group_conv"})
LINEAR: Final = CONVOLUTIONS | {"linear", "matmul", "gemm"}


def channel_axis(convolution: Node, weights: tuple[object, ...]) -> int:
    """The (negative) axis of the channels in a convolution's operand and result.

    Found by the rank of its weights; ``group_conv`` has one axis more there, the groups.
    """
    return 1 - len(weights) + (convolution.op == "group_conv")


def reduced_axes(graph: Graph, node: Node) -> tuple[int, ...] | None:
    """The axes of a reduction; None where they are computed, or not stated: all of them."""
    given = constant_at(graph, node, 1)
    if given is not None and given.constant is not None:
        return tuple(int(i) for i in given.constant.read().reshape(-1))
    axes = node.attributes.get("axes")
    return tuple(map(int, axes)) if isinstance(axes, tuple) else None
