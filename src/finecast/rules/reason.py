"""Reasons: the recorded verdicts of rules on an op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

DECISION: Final = "decision"
"""The rule of a reason for one of several formats that the rules permit."""

WAIVED: Final = "(waived) "
"""In front of the text of a verdict that a user's word set aside."""
DECIDED_BY: Final = "decided by"
"""The evidence of such a reason that says in a word what decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """The verdict of one rule on an op: the labels that it permits, why, and the evidence."""

    rule: str
    text: str
    permits: tuple[str, ...] = ()
    evidence: Mapping[str, float | str] = field(default_factory=dict[str, float | str])

    @property
    def waived(self) -> bool:
        """Whether a user's word set the verdict aside."""
        return self.text.startswith(WAIVED)
