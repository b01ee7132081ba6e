"""INC's ``DataLoader`` over a data set of the user's, and its data sets of random numbers.

INC's readers of known data sets (ImageNet, COCO, ...) and their transforms are not here: a
framework's own readers give the same batches, and asking for one says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, cast

import numpy as np

from finecast.errors import UsageError
from finecast.naming import look_up

_LAST: Final = {"rollover": True, "keep": True, "discard": False, "drop": False}


class SampleSource(Protocol):
    """A data set of samples ``(inputs, label)``, by number."""

    def __getitem__(self, index: int, /) -> Any:
        """One sample."""
        ...

    def __len__(self) -> int:
        """How many there are."""
        ...


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
        columns = [
            draw.uniform(_nth(low, i), _nth(high, i), one).astype(_nth(dtype, i))
            for i, one in enumerate(shapes)
        ]
        self._columns, self._label = columns, label

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._columns[0])

    def __getitem__(self, index: int) -> Any:
        """One sample."""
        inputs = tuple(column[index] for column in self._columns)
        found = inputs[0] if len(inputs) == 1 else inputs
        return (found, 0) if self._label else found


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


_NAMES: Final = (
    *("tensorflow", "tensorflow_itex", "keras", "pytorch", "pytorch_fx", "mxnet"),
    *("onnxruntime", "onnxrt_qlinearops", "onnxrt_qdq", "onnxrt_integerops"),
)
_FRAMEWORKS: Final = dict.fromkeys(_NAMES, True)


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
        source = cast("SampleSource", dataset)
        return (source[i] for i in range(len(source)))
    return iter(dataset)


def _stacked(batch: list[Any]) -> Any:
    """Samples as one batch: each part of their tuples, lists and dicts is stacked."""
    first = batch[0]
    if isinstance(first, Mapping):
        return {key: _stacked([sample[key] for sample in batch]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(_stacked([*parts]) for parts in zip(*batch, strict=True))
    return np.stack([np.asarray(sample) for sample in batch])
