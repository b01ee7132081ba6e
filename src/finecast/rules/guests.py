"""Guests: other tools whose casting rules finecast takes, each of a plugin.

A guest is loaded when an override is written or a rule set is named; nothing else knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from finecast.graph import Graph
from finecast.naming import look_up
from finecast.numbers.formats import Format
from finecast.plugin import load, plugins
from finecast.rules.base import Rule, UserRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A rule function, and the ops that it judges: canonical or native names."""

    ops: tuple[str, ...]
    rule: UserRule


Overrides: TypeAlias = Mapping[str, Override]
"""Overrides by the names that users gave them; inner blocks come last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """Another tool's casting rules.

    Attributes:
        override: What a rule function and the name of its op mean; None if neither is in the
            tool's notation. Raises UsageError if the name is, and no op has it.
        rules: The tool's own rules for a graph and a low format, which leave no op a choice,
            and those of overrides. Raises ModelError if they lack an op.
    """

    override: Callable[[str, Callable[..., Any]], Override | None]
    rules: Callable[[Graph, Format, Overrides], tuple[Rule, ...]]


FINECAST: Final = "finecast"
"""The rule set that is finecast's own."""
GUESTS: Final[Mapping[str, str]] = {
    name: reference for plugin in plugins() for name, reference in plugin.rule_sets.items()
}
"""Where each guest is, as ``module:attribute``; its name is that of its rule set."""


def guest_of(name: str) -> Guest:
    """The guest of a name among ``GUESTS``."""
    guest: Guest = load(GUESTS[name])
    return guest


def rule_set_of(name: str) -> str:
    """The rule set that users name: finecast's own, or a guest's.

    Raises:
        UsageError: If there is none of that name.
    """
    known = (FINECAST, *GUESTS)
    return look_up(name, {n: n for n in known}, what="rule set", where="rule_set")
