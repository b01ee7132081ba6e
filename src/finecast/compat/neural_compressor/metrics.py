"""INC's ``Metric``: the accuracy of predictions, by a metric's name or a user's class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from finecast.errors import UsageError
from finecast.naming import look_up

Numbers = npt.NDArray[Any]


class NamedMetric:
    """A metric that ``fit`` takes as ``eval_metric``; called ``Metric`` as in INC.

    Law: the result is over all samples since ``reset``, however they were batched.

    Args:
        name: ``topk`` (with ``k``), ``Accuracy``, ``MAE``, ``MSE`` or ``RMSE``.
        metric_cls: A class of the user's with ``reset``, ``update`` and ``result``; ``name``
            is then of no importance.
        given: Arguments of the metric.

    Raises:
        UsageError: If there is no such metric, or it has no such argument.
    """

    def __init__(
        self,
        name: str = "user_metric",
        metric_cls: Callable[..., Any] | None = None,
        **given: Any,
    ) -> None:
        made = metric_cls or look_up(name, _METRICS, what="metric", where="Metric")
        try:
            self._metric = made(**given)
        except TypeError as error:
            raise UsageError(
                f"metric {name!r}: {error}", where="Metric", fix="check its arguments"
            ) from error

    def reset(self) -> None:
        """Forget all samples."""
        self._metric.reset()

    def update(self, predictions: Any, labels: Any) -> None:
        """Add a batch."""
        self._metric.update(predictions, labels)

    def result(self) -> float:
        """The metric of all samples."""
        return self._metric.result()


class _MeanOfSamples:
    """The mean of a number of each sample."""

    def __init__(
        self, of: Callable[[Numbers, Numbers], Numbers], *, root: bool = False
    ) -> None:
        self._of, self._root = of, root
        self.reset()

    def reset(self) -> None:
        self._total, self._count = 0.0, 0

    def update(self, predictions: Any, labels: Any) -> None:
        truth = _array(labels)
        found = self._of(_array(_first(predictions, len(truth))), truth).astype(np.float64)
        self._total += float(found.sum())
        self._count += found.size

    def result(self) -> float:
        mean = self._total / self._count if self._count else float("nan")
        return float(np.sqrt(mean)) if self._root else mean


def _first(predictions: Any, samples: int) -> Any:
    """The first output, where ``predictions`` are those of a model with several."""
    if isinstance(predictions, Mapping):
        return next(iter(predictions.values()))
    if not isinstance(predictions, list | tuple) or not np.ndim(predictions[0]):
        return predictions
    one = predictions[0]
    several = len(one) == samples and (len(predictions) != samples or np.ndim(one) > 1)
    return one if several else predictions


def _array(given: Any) -> Numbers:
    detached = getattr(given, "detach", None)  # a tensor that has a gradient is no array
    return np.asarray(detached() if detached is not None else given)


def _top(k: int = 1) -> _MeanOfSamples:
    if k < 1:
        raise UsageError(f"k={k} leaves no prediction", where="Metric", fix="give 1 or more")

    def hits(predictions: Numbers, labels: Numbers) -> Numbers:
        scores = predictions.reshape(len(predictions), -1)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return (best == _classes(labels, len(scores))[:, None]).any(axis=1)

    return _MeanOfSamples(hits)


def _accuracy() -> _MeanOfSamples:
    def right(predictions: Numbers, labels: Numbers) -> Numbers:
        return _classes(predictions, len(predictions)) == _classes(labels, len(predictions))

    return _MeanOfSamples(right)


def _classes(given: Numbers, count: int) -> Numbers:
    """The class of each sample: stated, or the one with the highest score (one-hot, too)."""
    if given.size == count:
        return given.reshape(count)
    return given.reshape(count, -1).argmax(axis=1)


def _distances(power: int, *, root: bool = False) -> Callable[[], _MeanOfSamples]:
    def apart(predictions: Numbers, labels: Numbers) -> Numbers:
        gap = predictions.astype(np.float64) - labels.astype(np.float64)
        return np.abs(gap) ** power

    return lambda: _MeanOfSamples(apart, root=root)


_METRICS: Final[Mapping[str, Callable[..., _MeanOfSamples]]] = {
    "topk": _top,
    "accuracy": _accuracy,
    "mae": _distances(1),
    "mse": _distances(2),
    "rmse": _distances(2, root=True),
}
