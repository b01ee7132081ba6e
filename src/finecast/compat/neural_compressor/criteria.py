"""The accuracy to keep and the search, with Intel Neural Compressor's names and defaults."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from finecast.data.criterion import Criterion, CriterionKind
from finecast.errors import UsageError
from finecast.naming import unknown_name
from finecast.pipeline.goal import Objective

T = TypeVar("T")

_QUANT_LEVELS: Final = ("auto", 0, 1)
_OBJECTIVES: Final = ("performance", "accuracy", "modelsize", "footprint")
_SOUGHT: Final = {
    "performance": Objective.LATENCY,
    "modelsize": Objective.SIZE,
    "footprint": Objective.MEMORY,
}
_STRATEGIES: Final = (
    *("basic", "auto", "mse", "mse_v2", "bayesian", "random", "exhaustive", "sigopt", "tpe"),
    *("hawq_v2", "conservative", "lazy"),
)


def refuses_unknown(settings: type[T]) -> type[T]:
    """``settings``, whose constructor raises UsageError for an unknown keyword."""
    init = settings.__init__
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: T, *args: Any, **given: Any) -> None:
        for name in given:
            if name in known:
                continue
            if name in _SEARCH:
                raise UsageError(
                    f"{settings.__name__} has no setting {name!r}",
                    fix=f"give tuning_criterion=TuningCriterion({name}=...)",
                )
            raise unknown_name(name, known, what="setting", where=settings.__name__)
        init(self, *args, **given)

    settings.__init__ = checked
    return settings


# Settings of TuningCriterion, which INC 1 had as keywords of the configuration itself.
_SEARCH: Final = ("strategy", "strategy_kwargs", "timeout", "max_trials", "objective")


@refuses_unknown
@dataclass
class AccuracyCriterion:
    """The accuracy to keep: a loss relative to the baseline, or absolute."""

    higher_is_better: bool = True
    criterion: str = "relative"
    tolerable_loss: float = 0.01

    def to_criterion(self) -> Criterion:
        """These settings as a ``Criterion`` of finecast's.

        Raises:
            UsageError: If the kind or the loss is not usable.
        """
        kind, loss = CriterionKind.parse(self.criterion), self.tolerable_loss
        if kind is CriterionKind.RELATIVE and self.higher_is_better and loss >= 1:
            raise UsageError(
                f"tolerable_loss={loss:g} is {loss:.0%} of the accuracy: every model keeps it",
                where="AccuracyCriterion",
                fix=f"give {loss / 100:g} for {loss:g}%, or criterion='absolute'",
            )
        return Criterion(
            kind=kind,
            tolerance=self.tolerable_loss,
            higher_is_better=self.higher_is_better,
        )


@refuses_unknown
@dataclass
class TuningCriterion:
    """How long to search: ``timeout`` 0 ends at the first trial that passes."""

    strategy: str = "basic"
    strategy_kwargs: Mapping[str, Any] | None = None
    timeout: float = 0
    max_trials: int = 100
    objective: str | Sequence[str] | Mapping[str, Any] = "performance"

    def check(self) -> None:
        """Raise UsageError for a value that is unknown or not supported."""
        if self.strategy not in _STRATEGIES:
            raise unknown_name(self.strategy, _STRATEGIES, what="strategy")
        if self.max_trials < 1 or self.timeout < 0:
            raise UsageError(
                f"max_trials {self.max_trials} and timeout {self.timeout} leave no trial",
                fix="give at least one trial, and seconds, or 0 for the first that passes",
            )
        _ = self.sought  # raises for an objective that is not supported

    @property
    def sought(self) -> Objective:
        """``objective`` as an ``Objective`` of finecast's.

        Raises:
            UsageError: If ``objective`` is unknown, not supported, or more than one.
        """
        given = [self.objective] if isinstance(self.objective, str) else self.objective
        listed = () if isinstance(given, Mapping) else tuple(given)
        unknown = next((o for o in listed if o not in _OBJECTIVES), None)
        if unknown is not None:
            raise unknown_name(unknown, _OBJECTIVES, what="objective")
        found = _SOUGHT.get(listed[0]) if len(listed) == 1 else None
        if found is None:
            raise UsageError(
                f"objective {self.objective!r} is not supported: a search has one, and keeps"
                " the accuracy whatever it is",
                fix=f"use one of {', '.join(_SOUGHT)}",
            )
        return found


class SearchSettings(Protocol):
    """Settings of a search for the model that keeps an accuracy."""

    tuning_criterion: TuningCriterion
    accuracy_criterion: AccuracyCriterion
    quant_level: str | int


def without_evaluation(settings: SearchSettings) -> Iterator[str]:
    """The search's settings that are given, which have no effect without an evaluation."""
    searches = (
        ("tuning_criterion", settings.tuning_criterion, TuningCriterion()),
        ("accuracy_criterion", settings.accuracy_criterion, AccuracyCriterion()),
        ("quant_level", settings.quant_level, "auto"),
    )
    for name, given, default in searches:
        if given != default:
            yield f"{name}: without eval_func, or eval_dataloader and eval_metric"


def check_level(quant_level: str | int) -> None:
    """Raise UsageError for a level that INC does not have."""
    if quant_level not in _QUANT_LEVELS:
        raise UsageError(f"unknown quant_level {quant_level!r}", fix='use "auto", 0 or 1')
