"""A user's evaluation of a module in memory, which gets the module itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from finecast.data.evaluation import check_baseline, check_finite, metric_value
from finecast.data.workload import Workload
from finecast.engines.base import Feeds, Session
from finecast.errors import UserCodeError
from finecast.native.torch.recorded_calls import RecordedCalls
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
    of: tuple[str, ...] = ()

    @property
    def higher_is_better(self) -> bool:
        """As the user states it."""
        return not self.lower_is_better

    def evaluate(self, session: Session, reference: Session | None) -> float:
        """The function's value for the session's module; for fp32 ``known``, if given.

        Raises:
            UserCodeError: If the function fails, or what it returns for fp32 says nothing.
        """
        if reference is None and self.known is not None:
            return self.known
        module = cast("_OfModule", session).module
        if reference is not None:
            return self._called(module)
        calls = RecordedCalls(module)
        try:
            with calls.recorded():
                value = self._called(module)
        except UserCodeError:
            # It may compile the module as one graph, and then needs it as it is.
            value = self._called(module)
            check_finite(value, self._name)
            return value
        check_baseline(
            value,
            self._name,
            runs=calls.runs > 0,
            again=lambda: self._within(module, calls.replayed()),
            replaced=lambda how: (
                self._within(module, calls.replaced(how)) if calls.is_whole else None
            ),
            call="the module",
        )
        return value

    @property
    def _name(self) -> str:
        return getattr(self.function, "__qualname__", "evaluate")

    def _within(self, module: torch.nn.Module, calls: AbstractContextManager[None]) -> float:
        with calls:
            return self._called(module)

    def _called(self, module: torch.nn.Module) -> float:
        with (
            torch.no_grad(),
            guarded(
                "the evaluation function failed",
                where=self._name,
                fix="it gets a module and returns a number: try it on the fp32 module",
            ),
        ):
            found = self.function(module)
        return metric_value(found, self._name)

    def calibration(self) -> Iterable[Feeds]:
        """The module's example inputs."""
        return (self.examples,)
