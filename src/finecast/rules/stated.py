"""Ops whose type the model itself states: those that autocast leaves, and its casts."""

from __future__ import annotations

from typing import Final

from finecast.graph import ROUNDS, STATED, Node
from finecast.rules.base import KEEP, Context, Rule, Ruling


def _judge_stated(node: Node, context: Context) -> Ruling | None:
    """Ops that the model itself states to stay as they are keep fp32.

    PyTorch's modules do so by ``torch.autocast(enabled=False)`` around them.
    """
    if STATED not in node.attributes:
        return None
    return Ruling(permits=KEEP, text="the model turns autocast off around it")


STATED_FP32: Final = Rule(name="stated", judge=_judge_stated)


def _judge_own_casts(node: Node, context: Context) -> Ruling | None:
    """Casts between float types in the model itself keep the type that they give.

    In another format such a cast would round what its fp32 readers, or an output, get. Readers
    in a low format get a cast of their own, and the frontend merges the two. Nodes by which an
    earlier conversion rounds a value keep their type as well.
    """
    if ROUNDS in node.attributes:
        return Ruling(permits=KEEP, text="an earlier conversion rounds a value by it")
    source = node.inputs[0] if node.op == "cast" and node.inputs else None
    if source is None or context.graph.values[source].format is None:
        return None
    return Ruling(permits=KEEP, text="a cast of the model's own keeps the type it gives")


OWN_CASTS: Final = Rule(name="own_casts", judge=_judge_own_casts)
