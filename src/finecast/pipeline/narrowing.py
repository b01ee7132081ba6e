"""Narrowing a policy to the formats that gain here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from finecast.engines.probe import Speed
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy, Scope


def drop_slow_formats(
    policy: Policy, speed: Callable[[Format], Speed], user_rules: Sequence[object] = ()
) -> tuple[Policy, tuple[str, ...]]:
    """The policy without formats that are not faster than fp32 here, and notes on these.

    Law: at least one format stays, as single ops may gain by it. Only scope ``auto`` is
    narrowed, and without user rules; formats that the user gives to an op stay.
    """
    if policy.scope is not Scope.AUTO or len(policy.formats) == 1 or user_rules:
        return policy, ()
    speeds = {fmt: speed(fmt) for fmt in policy.formats}
    named = set(policy.op_formats.values())
    kept = tuple(f for f, s in speeds.items() if s.gains or f in named) or policy.formats[:1]
    notes = tuple(f"{s.text}: left out" for f, s in speeds.items() if f not in kept)
    return replace(policy, formats=kept), notes
