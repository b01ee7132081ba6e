"""What the engine has kernels for."""

from __future__ import annotations

from finecast.graph import Node
from finecast.rules.base import KEEP, Context, Rule, Verdict


def _judge(node: Node, context: Context) -> Verdict | None:
    if context.kernels(node, context.low) is not False:
        return None
    return Verdict(
        permits=KEEP,
        text=f"{context.engine} has no {context.low.label} kernel for {node.native}",
    )


KERNEL = Rule(name="kernel", judge=_judge, hard=True)
