"""Formats that are worth trying here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from finecast.engines.probe import Speed
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy, Scope


def worthwhile(
    policy: Policy, speed: Callable[[Format], Speed], user_rules: Sequence[object] = ()
) -> tuple[Policy, tuple[str, ...]]:
    """The policy without formats that gain nothing here, and what was left out.

    Law: one format stays: whether it helps is measured op by op. Only ``auto`` chooses; other
    scopes, and formats that the user gives an op, were asked for by name.
    """
    if policy.scope is not Scope.AUTO or len(policy.formats) == 1 or user_rules:
        return policy, ()
    speeds = {fmt: speed(fmt) for fmt in policy.formats}
    named = set(policy.op_formats.values())
    left = tuple(f for f, s in speeds.items() if s.gains or f in named) or policy.formats[:1]
    told = tuple(f"{s.text}: left out" for f, s in speeds.items() if f not in left)
    return replace(policy, formats=left), told
