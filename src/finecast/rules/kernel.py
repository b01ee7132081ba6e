"""What the engine has kernels for, and which of them are known to be wrong."""

from __future__ import annotations

from finecast.graph import Node
from finecast.rules.base import KEEP, Context, Rule, Verdict


def _judge(node: Node, context: Context) -> Verdict | None:
    fault = context.faults.get(context.low, {}).get(node.id)
    if fault is not None:
        return Verdict(permits=KEEP, text=fault)
    if context.kernels(node.native, context.low) is not False:
        return None
    return Verdict(
        permits=KEEP,
        text=f"{context.engine} has no {context.low.label} kernel for {node.native}",
    )


KERNEL = Rule(name="kernel", judge=_judge, hard=True)
