"""What INC's examples state an evaluation by: data loaders, random data sets and metrics.

INC's readers of known data sets (ImageNet, COCO, ...) and their transforms are not here: a
framework's own readers give the same batches, and asking for one says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import numpy as np

from finecast.data import METRICS, Accumulator, TopK, to_array
from finecast.errors import UsageError
from finecast.naming import look_up

_LAST: Final = {"rollover": True, "keep": True, "discard": False, "drop": False}
_NAMES: Final = (
    *("tensorflow", "tensorflow_itex", "keras", "pytorch", "pytorch_fx", "mxnet"),
    *("onnxruntime", "onnxrt_qlinearops", "onnxrt_qdq", "onnxrt_integerops"),
)
_FRAMEWORKS: Final = dict.fromkeys(_NAMES, True)


class DefaultDataLoader:
    """Batches of a data set's samples, in order.

    Args:
        dataset: Samples ``(inputs, label)``, by number or in a loop.
        batch_size: Samples a batch; the last one may have fewer.
        last_batch: ``rollover`` keeps a smaller last batch, ``discard`` leaves it out.
        collate_fn: Makes a batch of samples; by default arrays are stacked.
        without_effect: Other arguments of INC's, about workers and shuffling.

    Raises:
        UsageError: If the size of batches is not positive, or ``last_batch`` is unknown.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        last_batch: str = "rollover",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **without_effect: Any,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"batch_size {batch_size} leaves no sample", fix="give 1 or more")
        if without_effect.get("shuffle"):
            raise UsageError("shuffle=True: samples are taken in order", fix="leave it out")
        self.dataset = dataset
        self.batch_size = batch_size
        self._keeps_last = look_up(last_batch, _LAST, what="last_batch")
        self._collate = collate_fn or _stacked

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches."""
        batch: list[Any] = []
        for sample in _samples(self.dataset):
            batch.append(sample)
            if len(batch) == self.batch_size:
                yield self._collate(batch)
                batch = []
        if batch and self._keeps_last:
            yield self._collate(batch)


class DataLoader(DefaultDataLoader):
    """``DefaultDataLoader`` with a framework's name first; batches are the same for all."""

    def __init__(self, framework: str, dataset: Any, **given: Any) -> None:
        look_up(framework, _FRAMEWORKS, what="framework", where="DataLoader")
        super().__init__(dataset, **given)


class DummyDataset:
    """Samples of uniformly random numbers, the same in each run; all labels are 0.

    Args:
        shape: The number of samples, then the shape of one; or a list of these, for a model of
            several inputs.
        low: The least number, of each input where it is a list.
        high: The largest number.
        dtype: NumPy's name of the type.
        label: Whether samples have a label.
    """

    def __init__(
        self,
        shape: Sequence[Any],
        low: float | Sequence[float] = -128.0,
        high: float | Sequence[float] = 127.0,
        dtype: str | Sequence[str] = "float32",
        label: bool = True,
    ) -> None:
        single = all(isinstance(size, int) for size in shape)
        shapes = cast("Sequence[Sequence[int]]", [shape] if single else shape)
        draw = np.random.default_rng(0)
        self._columns = [
            draw.uniform(_nth(low, i), _nth(high, i), one).astype(_nth(dtype, i))
            for i, one in enumerate(shapes)
        ]
        self._label = label

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._columns[0])

    def __getitem__(self, index: int) -> Any:
        """One sample."""
        inputs = tuple(column[index] for column in self._columns)
        features = inputs[0] if len(inputs) == 1 else inputs
        return (features, 0) if self._label else features


class Datasets:
    """``Datasets(framework)["dummy"]``: data sets by name."""

    def __init__(self, framework: str) -> None:
        look_up(framework, _FRAMEWORKS, what="framework", where="Datasets")

    def __getitem__(self, name: str) -> type[DummyDataset]:
        """The class of data sets called ``name``.

        Raises:
            UsageError: If it is not here.
        """
        if name in ("dummy", "dummy_v2"):
            return DummyDataset
        raise _absent(name)


def _absent(name: str) -> UsageError:
    return UsageError(
        f"INC's {name} is not here",
        fix="read the samples by your framework (tf.data, torchvision), and give an iterable"
        " of batches (inputs, labels), or DataLoader(framework, dataset) of samples",
    )


def __getattr__(name: str) -> Any:
    """Raise for INC's readers and transforms, which scripts import by name."""
    if name.startswith("_"):
        raise AttributeError(name)
    raise _absent(name)


def _nth(given: Any, index: int) -> Any:
    return given if isinstance(given, int | float | str) else given[index]


def _samples(dataset: Any) -> Iterator[Any]:
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return (dataset[i] for i in range(len(dataset)))
    return iter(dataset)


def _stacked(batch: list[Any]) -> Any:
    """Samples as one batch: each part of their tuples, lists and dicts is stacked."""
    first = batch[0]
    if isinstance(first, Mapping):
        return {key: _stacked([sample[key] for sample in batch]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(_stacked([*parts]) for parts in zip(*batch, strict=True))
    return np.stack([np.asarray(sample) for sample in batch])


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
            metric = made(**given)
        except TypeError as error:
            raise UsageError(
                f"metric {name!r}: {error}", where="Metric", fix="check its arguments"
            ) from error
        self.reset, self.update, self.result = metric.reset, metric.update, metric.result


class _OwnMetric:
    """A metric of finecast's, with INC's methods; ``start`` makes its accumulator."""

    def __init__(self, start: Callable[[], Accumulator], *, root: bool = False) -> None:
        self._start, self._root = start, root
        self.reset()

    def reset(self) -> None:
        self._metric = self._start()

    def update(self, predictions: Any, labels: Any) -> None:
        truth = to_array(labels)
        outputs = to_array(_first(predictions, len(truth)))
        truth = truth.reshape(len(truth)) if truth.size == len(truth) else truth
        self._metric.update({"output": outputs}, truth, None)

    def result(self) -> float:
        score = self._metric.result()
        return math.sqrt(score) if self._root else score


def _first(predictions: Any, samples: int) -> Any:
    """The first output, where ``predictions`` are those of a model with several."""
    if isinstance(predictions, Mapping):
        return next(iter(predictions.values()))
    if not isinstance(predictions, list | tuple) or not np.ndim(predictions[0]):
        return predictions
    one = predictions[0]
    several = len(one) == samples and (len(predictions) != samples or np.ndim(one) > 1)
    return one if several else predictions


def _top(k: int = 1) -> _OwnMetric:
    if k < 1:
        raise UsageError(f"k={k} leaves no prediction", where="Metric", fix="give 1 or more")
    return _OwnMetric(partial(TopK, k))


_METRICS: Final[Mapping[str, Callable[..., _OwnMetric]]] = {
    "topk": _top,
    "accuracy": partial(_OwnMetric, METRICS["top1"].start),
    "mae": partial(_OwnMetric, METRICS["mae"].start),
    "mse": partial(_OwnMetric, METRICS["mse"].start),
    "rmse": partial(_OwnMetric, METRICS["mse"].start, root=True),
}
