"""The user's ``--include`` and ``--exclude`` patterns, by node name."""

from __future__ import annotations

from finecast.graph import Node
from finecast.rules.base import KEEP, Context, Rule, Ruling


def _judge(node: Node, context: Context) -> Ruling | None:
    policy = context.policy
    for pattern in policy.exclude:
        if pattern.search(node.name):
            return Ruling(
                permits=KEEP, text=f"name matches --exclude {pattern.pattern!r}", waives=True
            )
    if policy.include and not any(p.search(node.name) for p in policy.include):
        return Ruling(permits=KEEP, text="name matches no --include")
    return None


NAMES = Rule(name="names", judge=_judge)
