"""Casts between float types that the model came with: each states its result's type.

In another format such a cast would round what its readers, or an output, get in fp32. What
reads its result in a low format is given a cast of its own; the frontend merges the two. What
an earlier conversion rounds a value by stays in its type as well.
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
