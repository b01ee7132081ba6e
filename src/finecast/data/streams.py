"""Data that comes in batches: a list of feeds, a DataLoader of torch's, any such iterable.

Laws: every pass starts from the first batch. A batch is arrays by name, or arrays in the order
of the model's inputs; labels come last, or as the second of a pair. Tensors of other libraries
are converted by numpy. Where the model's batch size is fixed, larger batches are cut to it,
and a smaller one, as a DataLoader's last, is filled up with its last sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np

from finecast.data.datasets import (
    LABELS,
    Batch,
    as_input,
    check_array,
    repeated,
    sample_digests,
)
from finecast.engines.base import (
    Array,
    TensorSpec,
    by_own_names,
    fits,
    in_native_order,
    shape_text,
)
from finecast.errors import UsageError
from finecast.naming import unknown_name

_WHERE: Final = "a batch of the data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Batches for a model with ``inputs``; ``source`` starts a pass over them.

    ``label_name`` is the labels' name where batches are arrays by name; None for ``label`` or
    ``labels``. ``advice`` says what to do about an array of a name that is missing, or is not
    taken. ``notices`` say what was assumed of the data.
    """

    inputs: tuple[TensorSpec, ...]
    source: Callable[[], Iterable[Any]]
    label_name: str | None = None
    advice: Mapping[str, str] = field(default_factory=dict[str, str])
    notices: Sequence[str] = ()

    def batches(self, batch_size: int, *, limit: int | None = None) -> Iterator[Batch]:
        """All batches as they come, or so many that they have ``limit`` samples or more.

        Raises:
            UsageError: If there are none, or one does not fit the model.
        """
        del batch_size  # the source has its own
        taken = 0
        for item in self.source():
            if limit is not None and taken >= limit:
                return
            feeds, labels = self._parts(item)
            count = next((a.shape[0] for a in feeds.values() if a.ndim), 1)
            taken += count
            for start in range(0, count, self._fixed_batch or count or 1):
                yield self._batch(feeds, labels, start, count)
        if not taken:
            raise UsageError("the data yields no batch", where="data", fix="give some")

    @property
    def copies(self) -> int:
        """How many samples of a pass have the inputs of one before them."""
        digests: set[bytes] = set()
        total = 0
        for item in self.source():
            arrays = [a for a in self._parts(item)[0].values() if a.ndim]
            count = len(arrays[0]) if arrays else 0
            rows = [(a, 0) for a in arrays if len(a) == count]
            digests.update(sample_digests(rows, count))
            total += count
        return total - len(digests)

    def _batch(
        self, feeds: Mapping[str, Array], labels: Array | None, start: int, end: int
    ) -> Batch:
        """A call on the samples from ``start`` on of a batch of ``end`` samples."""
        rows = self._fixed_batch or end
        count = min(rows, end - start)
        whole = count == end or not self._fixed_batch
        part = {n: a if whole else a[start : start + count] for n, a in feeds.items()}
        of_part = labels
        if labels is not None and not whole and labels.shape[:1] == (end,):
            of_part = labels[start : start + count]
        filled = {n: repeated(a, 0, rows - count) for n, a in part.items()}
        return Batch(feeds=filled, labels=of_part, count=count, rows=rows)

    @property
    def _fixed_batch(self) -> int:
        """The batch size that is fixed in the model for all inputs; 0 if it is free."""
        sizes = {spec.shape[0] for spec in self.inputs if spec.shape}
        size = next(iter(sizes)) if len(sizes) == 1 else 0
        return size if isinstance(size, int) else 0

    def _parts(self, item: Any) -> tuple[dict[str, Array], Array | None]:
        inputs, labels = _split(item, len(self.inputs))
        names = [spec.name for spec in self.inputs]
        if not isinstance(inputs, Mapping):
            inputs = dict(zip(names, inputs, strict=True))
        arrays = dict(by_own_names(cast("Mapping[str, Any]", inputs), self.inputs))
        for name in (self.label_name,) if self.label_name else LABELS:
            if labels is None and name in arrays and name not in names:
                labels = arrays.pop(name)
        for name in arrays:
            if name not in names and name in self.advice:
                raise UsageError(
                    f"array {name!r} is not taken", where=_WHERE, fix=self.advice[name]
                )
            if name not in names:
                raise unknown_name(name, names, what="input", where=_WHERE)
        for name in names:
            if name not in arrays:
                have = ", ".join(arrays) or "none"
                raise UsageError(
                    f"input {name!r} is missing",
                    where=_WHERE,
                    fix=self.advice.get(name) or f"there are {have}",
                )
        feeds = {spec.name: _fitted(arrays[spec.name], spec) for spec in self.inputs}
        return feeds, None if labels is None else to_array(labels)


def re_iterable(data: Any) -> Callable[[], Iterable[Any]]:
    """A function that starts a pass over ``data``.

    Raises:
        UsageError: If it can be passed over only once, or is not iterable.
    """
    if not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        raise UsageError(
            f"data of type {type(data).__name__} is not iterable",
            where="data",
            fix="give a path, arrays by name, or batches",
        )
    if iter(data) is data:
        raise UsageError(
            "the data can be read only once, and every trial reads it",
            where="data",
            fix="give a list, a DataLoader, or a function that starts anew",
        )
    return lambda: data


def to_array(value: Any) -> Array:
    """A tensor of any library, or a list, as a numpy array.

    Raises:
        UsageError: For a list whose items differ in length.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":  # which numpy does not have
            value = value.float()
    try:
        return in_native_order(np.asarray(value))
    except ValueError as error:
        raise UsageError(
            f"a list in the data is no array: {error}",
            where="data",
            fix="make its items equally long, or give batches in which they are",
        ) from error


def _split(item: Any, inputs: int) -> tuple[Mapping[str, Any] | Sequence[Any], Any]:
    """The inputs of one batch, and its labels if it has any."""
    if isinstance(item, Mapping):
        return cast("Mapping[str, Any]", item), None
    parts: tuple[Any, ...] = (
        tuple(cast("Sequence[Any]", item)) if isinstance(item, tuple | list) else (item,)
    )
    if len(parts) == 2 and isinstance(parts[0], Mapping | tuple | list):
        first: Any = parts[0]
        if isinstance(first, Mapping) or len(first) == inputs:
            return first, parts[1]
    if len(parts) == inputs + 1:
        return parts[:-1], parts[-1]
    if len(parts) == inputs:
        return parts, None
    raise UsageError(
        f"a batch has {len(parts)} parts, the model {inputs} inputs",
        where="data",
        fix="yield arrays by name, or the inputs in order and then the labels",
    )


def _fitted(value: Any, spec: TensorSpec) -> Array:
    array = to_array(value)
    shape = spec.shape or ()
    if len(shape) > 1 and array.ndim == len(shape) - 1 and fits(array.shape, shape[1:]):
        raise UsageError(
            f"the data yields single samples: array {spec.name!r} has shape"
            f" {shape_text(array.shape)}, and a batch {shape_text(shape)}",
            where=_WHERE,
            fix="give batches, as torch.utils.data.DataLoader(data, batch_size=32)",
        )
    check_array(array, spec, 0 if spec.shape else None, _WHERE)
    return as_input(array, spec)
