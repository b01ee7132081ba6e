"""Casts between float types in the model itself keep the type that they give.

In another format such a cast would round what its fp32 readers, or an output, get. Readers in
a low format get a cast of their own, and the frontend merges the two. Nodes by which an
earlier conversion rounds a value keep their type as well.
"""

from __future__ import annotations

from typing import Final

from finecast.graph import ROUNDS, Node
from finecast.rules.base import KEEP, Context, Rule, Ruling


def _judge(node: Node, context: Context) -> Ruling | None:
    if ROUNDS in node.attributes:
        return Ruling(permits=KEEP, text="an earlier conversion rounds a value by it")
    source = node.inputs[0] if node.op == "cast" and node.inputs else None
    if source is None or context.graph.values[source].format is None:
        return None
    return Ruling(permits=KEEP, text="a cast of the model's own states the type it gives")


OWN_CASTS: Final = Rule(name="own_casts", judge=_judge)
