"""The policy's scope: ``none``, ``matmult``, ``all``, ``auto``."""

from __future__ import annotations

from finecast.graph import Node
from finecast.ops import by_name
from finecast.rules.base import KEEP, Context, Rule, Ruling
from finecast.rules.policy import Scope


def _judge(node: Node, context: Context) -> Ruling | None:
    scope = context.policy.scope
    if scope is Scope.NONE:
        return Ruling(permits=KEEP, text="scope none changes nothing")
    if scope is Scope.MATMULT and not by_name(node.op).matmul_engine:
        return Ruling(
            permits=KEEP, text=f"scope matmult: {node.op} does not run on the matmul engine"
        )
    return None


SCOPE = Rule(name="scope", judge=_judge)
