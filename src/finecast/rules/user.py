"""Users' rules in Python: ``def rule(node) -> "fp32" | ["fp32", "bf16"] | None``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from finecast.errors import UsageError
from finecast.graph import Node
from finecast.numbers.formats import Format
from finecast.rules.base import Context, NodeView, Rule, Ruling
from finecast.rules.reason import Reason
from finecast.usercode import guarded

_SAID: Final = "user rule "


def _judge(node: Node, context: Context) -> Ruling | None:
    verdicts: list[tuple[str, frozenset[Format]]] = []
    view = NodeView(node=node, context=context)
    for name, function in context.user_rules:
        with guarded(f"user rule {name} failed", where=node.name, fix="correct its file"):
            answer = function(view)
        if answer is None:
            continue
        labels = [answer] if isinstance(answer, str) else answer
        try:
            permits = frozenset(Format.parse(label) for label in labels)
        except (AttributeError, TypeError) as error:
            raise UsageError(
                f"user rule {name} returned {answer!r}",
                where=node.name,
                fix="return a format's name, a list of them, or None",
            ) from error
        except UsageError as error:
            raise UsageError(
                f"user rule {name}: {error.what}", where=node.name, fix=error.fix
            ) from error
        verdicts.append((name, permits))
    if not verdicts:
        return None
    permits = frozenset[Format].intersection(*(p for _, p in verdicts))
    names = ", ".join(n for n, _ in verdicts)
    return Ruling(permits=permits, text=f"{_SAID}{names}", waives=True)


USER = Rule(name="user", judge=_judge)


def without_opinion(names: Iterable[str], reasons: Iterable[Reason]) -> tuple[str, ...]:
    """A warning for each of the user's rules without a verdict among a plan's ``reasons``.

    That may be intended; most often the rule tests for a misspelt name.
    """
    heard = {
        name
        for reason in reasons
        if reason.rule == USER.name
        for name in reason.text.removeprefix(_SAID).split(", ")
    }
    return tuple(
        f"user rule {name} had no opinion on any op: if it should have one, see the ops' names"
        " with finecast explain"
        for name in names
        if name not in heard
    )
