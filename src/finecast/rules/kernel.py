"""The engine has to have a kernel for the op in the format, and one not known to be wrong."""

from __future__ import annotations

from finecast.graph import Node
from finecast.rules.base import KEEP, Context, Rule, Ruling


def _judge(node: Node, context: Context) -> Ruling | None:
    fault = context.faults.get(context.low, {}).get(node.id)
    if fault:
        return Ruling(permits=KEEP, text=fault)
    if fault is None and context.kernels(node, context.low) is not False:
        return None
    return Ruling(
        permits=KEEP,
        text=f"{context.engine} has no working {context.low.label} kernel for {node.native}",
    )


KERNEL = Rule(name="kernel", judge=_judge, hard=True)
