"""The user's evaluation: a function of a model, or batches and a metric."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from finecast.errors import UsageError
from finecast.usercode import guarded

EvalFunc = Callable[[Any], float]
# Makes of a model a function that gives its outputs on one batch.
Predictor = Callable[[Any], Callable[[Any], Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEvaluation:
    """How accuracy is measured: by ``function``, or by ``metric`` on ``batches``.

    Batches are (inputs, labels). Where all are None there is no evaluation.
    """

    function: EvalFunc | None
    batches: Iterable[Any] | None
    metric: Any

    @classmethod
    def of(
        cls, function: EvalFunc | None, dataloader: Iterable[Any] | None, metric: Any
    ) -> ModelEvaluation:
        """The evaluation that the user's arguments of ``fit`` state.

        Raises:
            UsageError: If only one of dataloader and metric is given, or the metric lacks a
                method.
        """
        if function is None and (dataloader is None) != (metric is None):
            raise UsageError(
                "an evaluation needs both eval_dataloader and eval_metric",
                fix="give both, or eval_func",
            )
        lacking = [n for n in ("reset", "update", "result") if not hasattr(metric, n)]
        if function is None and metric is not None and lacking:
            raise UsageError(
                f"eval_metric {metric!r} has no {lacking[0]}()",
                fix="give an object with reset(), update(predictions, labels) and result()",
            )
        return cls(function=function, batches=kept(dataloader), metric=metric)

    @property
    def given(self) -> bool:
        """Whether there is an evaluation."""
        return self.function is not None or self.batches is not None

    def score(self, model: Any, predictor: Predictor) -> float:
        """The accuracy of ``model``.

        Raises:
            UsageError: If the evaluation does not give a number.
            UserCodeError: If it fails.
        """
        if self.function is not None:
            with guarded(
                "the evaluation failed",
                where=getattr(self.function, "__qualname__", "eval_func"),
                fix=f"it is given a {type(model).__name__}, the model as it was or converted,"
                " and returns a number",
            ):
                found = self.function(model)
            return _number(found, "eval_func")
        assert self.batches is not None
        predict = predictor(model)
        with guarded(
            "eval_dataloader or eval_metric failed",
            where=type(self.metric).__name__,
            fix="batches are (inputs, labels), and the metric gets predictions and labels",
        ):
            self.metric.reset()
            for inputs, labels in self.batches:
                self.metric.update(predict(inputs), labels)
            found = self.metric.result()
        return _number(found, "eval_metric")


def kept(dataloader: Iterable[Any] | None) -> Iterable[Any] | None:
    """Batches that every trial can iterate; an iterator, which allows one pass, as a list."""
    if dataloader is None or iter(dataloader) is not dataloader:
        return dataloader
    return list(dataloader)


def _number(value: Any, where: str) -> float:
    try:
        number: Any = None if isinstance(value, str | bytes | bytearray) else value
        return float(number)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"it gave {value!r}, and an accuracy is a number", where=where, fix="return one"
        ) from error
