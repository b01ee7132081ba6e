"""A user's evaluation of a module in memory, which gets the module itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from finecast.engines.base import Feeds, Session
from finecast.pipeline.workload import Workload, check_finite, metric_value
from finecast.usercode import guarded

Evaluate = Callable[[torch.nn.Module], float]


class _OfModule(Protocol):
    module: torch.nn.Module


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleWorkload(Workload):
    """A user's evaluation of a module; the only data are the module's example inputs."""

    function: Evaluate
    known: float | None
    examples: Feeds
    lower_is_better: bool = False

    @property
    def higher_is_better(self) -> bool:
        """As the user states it."""
        return not self.lower_is_better

    def evaluate(self, session: Session, reference: Session | None) -> float:
        """The function's value for the session's module; for fp32 ``known``, if given."""
        if reference is None and self.known is not None:
            return self.known
        module = cast("_OfModule", session).module
        name = getattr(self.function, "__qualname__", "evaluate")
        with (
            torch.no_grad(),
            guarded(
                "the evaluation function failed",
                where=name,
                fix="it gets a module and returns a number: try it on the fp32 module",
            ),
        ):
            found = self.function(module)
        value = metric_value(found, name)
        if reference is None:
            check_finite(value, name)
        return value

    def calibration(self) -> Iterable[Feeds]:
        """The module's example inputs."""
        return (self.examples,)
