"""The user's formats by op: ``--op Softmax=fp32``."""

from __future__ import annotations

from finecast.graph import Node
from finecast.rules.base import Context, Rule, Ruling, only


def matches(name: str, node: Node) -> bool:
    """Whether ``name`` names the op: canonical, native, or native without its domain."""
    return name in (node.op, node.native, node.native.rpartition("::")[2])


def _judge(node: Node, context: Context) -> Ruling | None:
    for name, fmt in context.policy.op_formats.items():
        if matches(name, node):
            return Ruling(
                permits=only(fmt), text=f"the user chose {name}={fmt.label}", waives=True
            )
    return None


OP_FORMATS = Rule(name="op_formats", judge=_judge)
