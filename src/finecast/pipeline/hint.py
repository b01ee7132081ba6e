"""What an engine lowers by itself: a candidate like any other, and an anchor for the result.

One setting of the engine is what a user would try instead of tuning. What it chose is stated
as a plan; and the model under that setting is evaluated and timed beside what tuning found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from finecast.pipeline.subject import Built
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner


class Hinted(Built, Protocol):
    """The model under such a setting; ``plan`` is what the engine chose there."""

    @property
    def exact(self) -> Plan:
        """The choice without roundings that the engine spares and a model cannot."""
        ...


def choices_of(hinted: Hinted) -> tuple[tuple[str, Plan], ...]:
    """Plans of what the engine chose, by name."""
    return ("the hint's choice", hinted.plan), ("the hint's choice, exact", hinted.exact)


@runtime_checkable
class Hinting(Protocol):
    """A subject whose engine lowers a model by itself, where a setting asks for it."""

    def hints(self, planner: Planner) -> Sequence[Hinted]:
        """The model under each such setting.

        Each can be timed and run like what a plan gives. A setting by which the engine lowers
        nothing, or under which it cannot run the model, is left out.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """What a user gets without tuning, measured like the result and beside it.

    ``cost`` is what the objective counts.
    """

    name: str
    metric: float
    passed: bool
    latency_s: float
    cost: float
