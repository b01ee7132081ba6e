"""The kinds of data that users give, as one table: what each is, and what opens it.

Law: what data are is asked once, here: a kind is a row of ``KINDS``, of which the first that
holds counts. Samples are cut out of arrays, in batches of a size that the user chooses, or
the data come in whole calls.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from finecast.data.datasets import Dataset, data_set, open_npz
from finecast.data.feeds import no_effect
from finecast.data.functions import source_digest
from finecast.data.options import DataOptions
from finecast.data.streams import Stream, re_iterable, to_array
from finecast.data.tables import ImageFolder, samples_of, table_in
from finecast.engines.base import Array, TensorSpec, by_own_names
from finecast.errors import UsageError
from finecast.files import digest
from finecast.usercode import guarded


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """What a model needs of its data.

    Attributes:
        inputs: The inputs that the data give.
        options: The options beside the data.
        labels: The name of the labels; None for none, or the usual ones.
        advice: What to do about an array of a name that is missing, or is not taken.
    """

    inputs: Sequence[TensorSpec]
    options: DataOptions
    labels: str | None = None
    advice: Mapping[str, str] = field(default_factory=dict[str, str])

    def stream(
        self, source: Callable[[], Iterable[Any]], notices: Sequence[str] = ()
    ) -> Stream:
        """Batches of ``source`` for the model."""
        return Stream(
            source=source,
            inputs=tuple(self.inputs),
            label_name=self.labels,
            advice=self.advice,
            notices=notices,
        )

    def cut(self, arrays: Mapping[str, Array], where: str) -> Dataset:
        """Samples of ``arrays``.

        Raises:
            UsageError: If they do not fit the model.
        """
        options = self.options
        samples = data_set(
            by_own_names(arrays, self.inputs),
            self.inputs,
            labels=self.labels,
            sample_axes=by_own_names(options.sample_axes, self.inputs),
            beside=options.groups,
            advice=self.advice,
            where=where,
        )
        if options.batch is not None and samples.fixed_batch not in (None, options.batch):
            raise no_effect(options.batch, samples.fixed_batch)
        return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of data.

    Attributes:
        holds: Whether data are of this kind.
        samples: The samples that a model gets of them; raises UsageError if they do not fit.
        digest: Tells the content of two data apart; a new one at each call where it cannot.
        is_cut: Whether samples are cut out of the data, so that options may size calls.
        arrays: The arrays by name that samples are cut out of; None where there are none.
    """

    holds: Callable[[Any], bool]
    samples: Callable[[Any, Needed], Dataset | Stream]
    digest: Callable[[Any], str] = lambda _: uuid.uuid4().hex
    is_cut: bool = False
    arrays: Callable[[Any], Mapping[str, Array]] | None = None


def kind_of(data: object) -> Kind:
    """The kind of ``data``."""
    return next(kind for kind in KINDS if kind.holds(data))


def refuse_cut(options: DataOptions) -> None:
    """Raise UsageError for an option that cuts samples out of arrays."""
    stated = {"--batch": options.batch is not None, "--sample-axis": bool(options.sample_axes)}
    for option in (option for option, is_stated in stated.items() if is_stated):
        raise UsageError(
            "samples are cut out of arrays, and whole calls are given",
            where=option,
            fix="leave it out, or give arrays by name, a table or an .npz",
        )


def _is_function(data: object) -> bool:
    return callable(data) and not hasattr(data, "__iter__")


def _is_path(data: object) -> bool:
    return isinstance(data, str | Path)


def _is_folder(data: Any) -> bool:
    return _is_path(data) and Path(data).is_dir()


def _is_table(data: object) -> bool:
    return hasattr(data, "column_names") or hasattr(data, "columns")


def _of_function(function: Callable[[], Any], needed: Needed) -> Dataset | Stream:
    """What a user's function returns, or the batches that it yields.

    Raises:
        UserCodeError: If it fails.
    """
    with _guarded(function):
        data = function()
    if not kind_of(data).is_cut:
        refuse_cut(needed.options)
    if isinstance(data, Iterator):
        return needed.stream(partial(_yielded, function))
    return kind_of(data).samples(data, needed)


def _yielded(function: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """The batches that a user's generator yields."""
    with _guarded(function):
        yield from function()


def _guarded(function: Callable[[], Any]) -> Any:
    name = getattr(function, "__qualname__", type(function).__name__)
    fix = "call it in python to see more"
    return guarded("the function of the data failed", where=name, fix=fix)


def _images(folder: str | Path, needed: Needed) -> Stream:
    images = ImageFolder.of(Path(folder), needed.inputs, needed.options.samples)
    return needed.stream(lambda: images, images.notices)


def _of_file(path: str | Path, needed: Needed) -> Dataset:
    """The samples of an .npz, or of a file that is a table."""
    columns = table_in(path)
    if columns is None:
        return needed.cut(open_npz(Path(path)), str(path))
    return _rows(columns, needed, str(path))


def _of_table(table: Any, needed: Needed) -> Dataset | Stream:
    columns = table_in(table)
    return _batches(table, needed) if columns is None else _rows(columns, needed, "data")


def _rows(columns: Mapping[str, Any], needed: Needed, where: str) -> Dataset:
    beside = needed.options.groups
    arrays = samples_of(
        by_own_names(columns, needed.inputs),
        needed.inputs,
        labels=needed.labels,
        beside=beside,
        where=where,
    )
    return needed.cut(arrays, where)


def _batches(data: Any, needed: Needed) -> Stream:
    return needed.stream(re_iterable(data))


def _file_arrays(path: str | Path) -> Mapping[str, Array]:
    columns = table_in(path)
    return open_npz(Path(path)) if columns is None else _named(columns)


def _named(arrays: Mapping[str, Any]) -> dict[str, Array]:
    return {str(name): to_array(value) for name, value in arrays.items()}


def _digest_of_files(data: str | Path) -> str:
    path = Path(data)
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    return " ".join((digest(*files), *(str(f.relative_to(path)) for f in files)))


def _digest_of_arrays(data: Mapping[str, Any]) -> str:
    hasher = hashlib.sha256()
    for name, value in data.items():
        array = np.ascontiguousarray(to_array(value))
        hasher.update(f"{name} {array.dtype} {array.shape}".encode())
        plain = array.astype(str) if array.dtype.kind == "O" else array
        hasher.update(plain.tobytes())
    return hasher.hexdigest()


KINDS: Final = (
    Kind(holds=_is_function, samples=_of_function, digest=source_digest),
    Kind(holds=_is_folder, samples=_images, digest=_digest_of_files, is_cut=True),
    Kind(
        holds=_is_path,
        samples=_of_file,
        digest=_digest_of_files,
        is_cut=True,
        arrays=_file_arrays,
    ),
    Kind(
        holds=_is_table,
        samples=_of_table,
        is_cut=True,
        arrays=lambda data: _named(table_in(data) or {}),
    ),
    Kind(
        holds=lambda data: isinstance(data, Mapping),
        samples=lambda data, needed: needed.cut(_named(data), "data"),
        digest=_digest_of_arrays,
        is_cut=True,
        arrays=_named,
    ),
    Kind(holds=lambda _: True, samples=_batches),
)
"""A user's function, a folder of images, a file of arrays or of a table, a table of a library,
arrays by name, and batches of any kind that can be iterated."""
