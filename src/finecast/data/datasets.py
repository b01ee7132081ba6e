"""Evaluation data: arrays that carry the model's input names, and how an .npz is read.

Laws: batches come in file order and cover every sample once; feeds have the model's own
types; where the model's batch dimension is fixed, the last batch is filled up by repeating
its last sample, and ``Batch.trim`` cuts the outputs back.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from types import MappingProxyType
from typing import IO, Final

import numpy as np
from numpy.lib import format as npy

from finecast.engines.base import (
    DTYPES,
    Array,
    TensorSpec,
    dtype_label,
    fits,
    in_native_order,
    shape_text,
)
from finecast.errors import UsageError
from finecast.naming import close_names, unknown_name

__all__ = ["LABELS", "Batch", "Dataset", "data_set", "open_npz"]

LABELS: Final = ("label", "labels")
"""What the labels are called where nobody says it."""
_FLOATS = frozenset({"fp64", "fp32", "fp16", "bf16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Feeds and labels for one run.

    ``count`` is the number of samples; ``rows``, the batch size of the feeds, is larger where
    the last sample is repeated to fill up a fixed batch.
    """

    feeds: dict[str, Array]
    labels: Array | None
    count: int
    rows: int

    def trim(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs without the rows of repeated samples."""
        if self.count == self.rows:
            return dict(outputs)
        return {
            name: array[: self.count] if array.shape[:1] == (self.rows,) else array
            for name, array in outputs.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of ``count`` parts of the batches: runs of neighbours, as equal as possible."""

    index: int = 0
    count: int = 1

    def of(self, batches: range) -> range:
        """The batches of this part."""
        first, end = (len(batches) * i // self.count for i in (self.index, self.index + 1))
        return batches[first:end]


WHOLE: Final = Part()
"""All batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Samples of a model's inputs, and labels where there are any.

    ``axes`` has each input's sample axis; None for an input that all samples share. Where all
    inputs are shared, the data is one batch with all labels. ``size`` counts samples.
    """

    inputs: tuple[TensorSpec, ...]
    arrays: Mapping[str, Array]
    axes: Mapping[str, int | None]
    labels: Array | None
    size: int

    @property
    def fixed_batch(self) -> int | None:
        """The batch size that is fixed in the model; None if it is free."""
        for spec in self.inputs:
            axis = self.axes[spec.name]
            dim = None if axis is None or spec.shape is None else spec.shape[axis]
            if isinstance(dim, int):
                return dim
        return None

    @property
    def copies(self) -> int:
        """How many samples have the inputs of one before them."""
        axes = [(self.arrays[n], axis) for n, axis in self.axes.items() if axis is not None]
        return self.size - len({*sample_digests(axes, self.size)}) if axes else 0

    def batches(
        self, batch_size: int, *, limit: int | None = None, part: Part = WHOLE
    ) -> Iterator[Batch]:
        """All samples, or the first ``limit``, in batches of ``batch_size`` samples.

        Of a part they are those of its batches. A batch size that is fixed in the model takes
        the place of ``batch_size``.

        Raises:
            UsageError: If ``batch_size`` is not positive.
        """
        if batch_size < 1:
            raise UsageError(f"batch size {batch_size} is not usable", fix="give 1 or more")
        rows = self.fixed_batch or batch_size
        end = self.size if limit is None else min(limit, self.size)
        for start in part.of(range(0, end, rows)):
            count = min(rows, end - start)
            fill = rows - count if self.fixed_batch else 0
            yield Batch(
                feeds={s.name: self._rows(s, start, count, fill) for s in self.inputs},
                labels=self._labels(start, count),
                count=count,
                rows=count + fill,
            )

    def _labels(self, start: int, count: int) -> Array | None:
        shared = all(axis is None for axis in self.axes.values())
        if self.labels is None or shared:
            return self.labels
        return self.labels[start : start + count]

    def _rows(self, spec: TensorSpec, start: int, count: int, fill: int) -> Array:
        array, axis = self.arrays[spec.name], self.axes[spec.name]
        if axis is not None:
            index = (slice(None),) * axis + (slice(start, start + count),)
            array = array[index]
            array = repeated(array, axis, fill)
        return as_input(array, spec)


def repeated(array: Array, axis: int, fill: int) -> Array:
    """``array`` with the last sample along ``axis`` repeated ``fill`` times."""
    widths = [(0, fill if i == axis else 0) for i in range(array.ndim)]
    return np.pad(array, widths, mode="edge") if fill and widths else array


def as_input(array: Array, spec: TensorSpec) -> Array:
    """Samples as a contiguous array of the input's type.

    Raises:
        UsageError: If a sample holds NaN: the model's answer to it says nothing of accuracy.
    """
    if array.dtype.kind not in "biuOSU" and np.isnan(array).any():
        raise UsageError(
            f"array {spec.name!r} holds NaN",
            where="--data",
            fix="leave such samples out; where the model takes NaN for a missing value, a"
            " function of yours gives them: --calib FILE.py:FUNCTION, and --eval in tune",
        )
    plain = array.astype(str) if array.dtype.kind == "S" else array
    return np.ascontiguousarray(plain, dtype=DTYPES[spec.dtype]).reshape(array.shape)


def sample_digests(arrays: Sequence[tuple[Array, int]], size: int) -> Iterator[bytes]:
    """What identifies the inputs of each of ``size`` samples, from arrays and their axes."""
    for index in range(size):
        rows = (array.take(index, axis) for array, axis in arrays)
        yield hashlib.sha256(b"".join(row.tobytes() for row in rows)).digest()


def data_set(
    arrays: Mapping[str, Array],
    inputs: Sequence[TensorSpec],
    *,
    labels: str | None = None,
    sample_axes: Mapping[str, int | None] | None = None,
    beside: str | None = None,
    advice: Mapping[str, str] = MappingProxyType({}),
    where: str = "data",
) -> Dataset:
    """Arrays by name as samples for a model with these inputs.

    Args:
        arrays: One array for each input, by its name, with samples along the axis that is the
            batch in the model. Of an input of wholly fixed shape one array may serve all
            samples.
        inputs: The model's inputs.
        labels: The name of the labels' array; by default one of ``LABELS``, if there is one.
        sample_axes: By input's name, sample axes that differ from the model's batch axis;
            None for an input that all samples share.
        beside: The name of an array that is neither an input nor the labels.
        advice: What to do about an array of a name that is missing, or is not taken.
        where: The arrays' file, for errors.

    Raises:
        UsageError: If they do not fit; names the array, what it is and what was expected.
    """
    names = [spec.name for spec in inputs]
    usual = (name for name in LABELS if name in arrays and name not in names)
    target = labels if labels is not None else next(usual, LABELS[0])
    read = {n: a for n, a in arrays.items() if n != beside or n in (*names, target)}
    _check_names(read, names, target, named=labels is not None, advice=advice, where=where)
    axes = _sample_axes(inputs, arrays)
    for name in sample_axes or {}:
        if name not in names:
            raise unknown_name(name, names, what="input", where="--sample-axis")
    axes |= sample_axes or {}
    for spec in inputs:
        check_array(arrays[spec.name], spec, axes[spec.name], where)
        axis = axes[spec.name]
        if axis is not None and not 0 <= axis < arrays[spec.name].ndim:
            raise UsageError(
                f"array {spec.name!r} of shape {shape_text(arrays[spec.name].shape)} has no"
                f" axis {axis}",
                where="--sample-axis",
                fix=f"write {spec.name}=none if all samples share it",
            )
    sizes = {n: arrays[n].shape[axis] for n in names if (axis := axes[n]) is not None}
    label_array = arrays.get(target) if target not in names else None
    if label_array is not None and label_array.ndim == 0:
        raise UsageError(
            f"array {target!r} is a single number",
            where=where,
            fix="one label a sample is expected",
        )
    if label_array is not None and sizes:
        sizes[target] = len(label_array)
    shared = bool(sample_axes) and not sizes
    size = 1 if shared else _common_size(sizes, where)
    return Dataset(
        inputs=tuple(inputs),
        arrays={name: arrays[name] for name in names},
        axes=axes,
        labels=label_array,
        size=size,
    )


def _check_names(
    arrays: Mapping[str, Array],
    names: Sequence[str],
    target: str,
    *,
    named: bool,
    advice: Mapping[str, str],
    where: str,
) -> None:
    """Check that there are arrays of the inputs, and labels if they were named; no others."""
    have = f"the arrays are {', '.join(arrays) or 'none'}"
    for name in names:
        if name not in arrays:
            raise UsageError(
                f"input {name!r} is missing",
                where=where,
                fix=advice.get(name)
                or f"{have}; name them as inputs: {{{name!r}: ARRAY}}, in a file by"
                f" numpy.savez(FILE, **{{{name!r}: ARRAY}})",
            )
    if named and target not in arrays:
        close = "".join(f"did you mean {n}? " for n in close_names(target, arrays)[:1])
        raise UsageError(
            f"label array {target!r} is missing", where=where, fix=f"{close}{have}"
        )
    for name in arrays:
        if name in names or name == target:
            continue
        if name in advice:
            raise UsageError(f"array {name!r} is not taken", where=where, fix=advice[name])
        known = f"the model's inputs are {', '.join(names)}"
        raise UsageError(
            f"array {name!r} is neither an input nor the labels",
            where=where,
            fix=f"{known if names else 'the model has no inputs'}; --labels names the labels",
        )


def _sample_axes(
    inputs: Sequence[TensorSpec], arrays: Mapping[str, Array]
) -> dict[str, int | None]:
    """The sample axis of each input; None where all samples share the input's array.

    The batch's symbol is the first symbolic dimension that comes first in an input's shape.
    In other inputs it may stand elsewhere (a state of shape [2, batch, 128]).
    """
    free = [s for s in inputs if s.shape and not isinstance(s.shape[0], int)]
    symbol = next((s.shape[0] for s in free if s.shape and s.shape[0]), None)
    axes: dict[str, int | None] = {}
    for spec in inputs:
        shape, array = spec.shape, arrays[spec.name]
        axis: int | None = 0
        if shape is not None and symbol is not None and symbol in shape:
            axis = shape.index(symbol)
        elif array.ndim == 0 or (free and shape == array.shape):
            axis = None
        axes[spec.name] = axis
    return axes


def check_array(array: Array, spec: TensorSpec, axis: int | None, where: str) -> None:
    """Check samples against an input's type, shape and rows; ``axis`` may have any size.

    Raises:
        UsageError: If they do not fit; the advice says if only the axes are in another order.
    """
    got = dtype_label(array.dtype)
    wanted = DTYPES.get(spec.dtype)
    floats = got in _FLOATS and spec.dtype in _FLOATS
    text = got == spec.dtype == "string"
    if wanted is None or not (floats or text or _widens(array.dtype, wanted)):
        raise UsageError(
            f"array {spec.name!r} has type {got}, expected {spec.dtype}",
            where=where,
            fix="convert it before saving",
        )
    _check_rows(array, spec, where)
    if spec.shape is None:
        return
    declared = [None if i == axis else dim for i, dim in enumerate(spec.shape)]
    if not fits(array.shape, declared):
        raise UsageError(
            f"array {spec.name!r} has shape {shape_text(array.shape)}, "
            f"expected {shape_text(spec.shape)}",
            where=where,
            fix=_transposed(array.shape, declared)
            or "save samples in the model's input shape",
        )


def _check_rows(array: Array, spec: TensorSpec, where: str) -> None:
    """Raise UsageError for an index of no row: engines read beyond the table, or fail."""
    if spec.rows is None or not array.size:
        return
    rows = spec.rows
    if rows.start <= int(array.min()) and int(array.max()) < rows.stop:
        return
    wrong = np.less(array, rows.start) | np.greater_equal(array, rows.stop)
    place = [int(i) for i in np.unravel_index(int(wrong.argmax()), array.shape)]
    raise UsageError(
        f"array {spec.name!r} has {array[tuple(place)]} at {place}, and the model's table has"
        f" {rows.stop} rows",
        where=where,
        fix=f"give numbers from 0 to {rows.stop - 1}; are token ids those of this model?",
    )


def _transposed(shape: Sequence[int], declared: Sequence[int | str | None]) -> str:
    """Advice if the array fits once its axes are reordered (NHWC data for an NCHW model)."""
    rank = len(shape)
    if not 3 <= rank <= 5:
        return ""
    last, first = (0, rank - 1, *range(1, rank - 1)), (0, *range(2, rank), 1)
    named: dict[tuple[int, ...], str] = {
        last: "channels are last",
        first: "channels are second",
    }
    others = (p for p in permutations(range(rank)) if p[0] == 0 and p not in named)
    for order in (*named, *others):
        if fits([shape[i] for i in order], declared):
            why = named.get(order, "axes are in another order")
            return f"in the data {why}: save array.transpose{order}"
    return ""


def _widens(got: np.dtype[np.generic], wanted: np.dtype[np.generic]) -> bool:
    """Whether the types are equal, or integers that ``wanted`` holds without loss.

    Integers are not taken for a float input: uint8 pixels are mostly not scaled yet, and to
    convert them would hide that.
    """
    same_kind = got.kind in "iu" and wanted.kind in "iu"
    return got == wanted or (same_kind and np.can_cast(got, wanted, "safe"))


def _common_size(sizes: Mapping[str, int], where: str) -> int:
    if not sizes:
        raise UsageError(
            "no array has a sample axis", where=where, fix="add a batch dimension in front"
        )
    (first, size), *others = sizes.items()
    for name, other in others:
        if other != size:
            raise UsageError(
                f"array {name!r} has {other} samples, {first!r} has {size}",
                where=where,
                fix="save the same number of each; where samples differ in size (graphs), give"
                " --eval and --calib in place of --data; for an input that all samples share"
                f" write --sample-axis {name}=none",
            )
    if size == 0:
        raise UsageError("the data has no samples", where=where, fix="save at least one")
    return size


# ----------------------------------- arrays of an .npz; those not compressed are memory-mapped
#
# Law: the memory taken is bounded, whatever the file declares. Compressed arrays are held in
# memory, and a small file can hold compressed arrays a thousand times its size.

# The most bytes of all compressed arrays of a file: what a desktop computer can spare.
_COMPRESSED_MOST: Final = 4 << 30
_PIECE_BYTES: Final = 1 << 20
ONE_FILE: Final = (
    "save all samples in one file, named as the inputs: numpy.savez(FILE, **{NAME: ARRAY});"
    " .csv, .tsv, .parquet and folders of images are read, too, and a function of yours reads"
    " other files: --data FILE.py:FUNCTION"
)
# The zip format's local file header, which ends with the lengths of the name and extra field.
_LOCAL_HEADER = struct.Struct("<26xHH")


def open_npz(path: Path) -> dict[str, Array]:
    """The arrays by name; uncompressed ones as read-only maps of the file.

    Raises:
        UsageError: If the file is missing, not an npz, holds pickled objects, or compressed
            arrays of more than 4 GiB.
    """
    where = str(path)
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for
        raise UsageError("the data is no ordinary file", where=where, fix=ONE_FILE)
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            members = archive.infolist()
            _check(members, where)
            return {
                info.filename.removesuffix(".npy"): in_native_order(
                    _array(archive, info, file.fileno(), path)
                )
                for info in members
            }
    except OSError as error:
        raise UsageError(
            f"cannot read the data: {error.strerror or error}",
            where=where,
            fix=ONE_FILE if path.is_dir() else "check the path",
        ) from error
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        if _is_npy(path):
            raise UsageError(
                "an .npy file holds one array without a name", where=where, fix=ONE_FILE
            ) from error
        raise UsageError(
            "not an .npz file, or a truncated one", where=where, fix=ONE_FILE
        ) from error
    # zipfile raises RuntimeError for an encrypted member, and NotImplementedError, which is a
    # RuntimeError, for an unknown compression.
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"an array cannot be read: {str(error) or type(error).__name__}",
            where=where,
            fix="save plain arrays, no objects, with numpy.savez",
        ) from error


def _is_npy(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX


def _check(members: list[zipfile.ZipInfo], where: str) -> None:
    """Raise UsageError for too many compressed bytes, or two arrays of one name."""
    packed = [m for m in members if m.compress_type != zipfile.ZIP_STORED]
    size = sum(m.file_size for m in packed)
    if size > _COMPRESSED_MOST:
        largest = max(packed, key=lambda m: m.file_size)
        raise UsageError(
            f"compressed arrays of {size / 2**30:.1f} GiB, {largest.filename!r} the largest:"
            f" {_COMPRESSED_MOST / 2**30:g} GiB are the most that are held in memory",
            where=where,
            fix="save with numpy.savez: what is not compressed is read piece by piece",
        )
    names = [m.filename.removesuffix(".npy") for m in members]
    if len(set(names)) < len(names):
        twice = next(n for i, n in enumerate(names) if n in names[:i])
        raise UsageError(
            f"two arrays are called {twice!r}", where=where, fix="save it with numpy.savez"
        )


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, handle: int, path: Path) -> Array:
    with archive.open(info) as member:
        shape, fortran, dtype = _header(member)
        skip = member.tell()
        if dtype.hasobject:
            raise ValueError(f"{info.filename} holds Python objects")
        size = math.prod(shape) * dtype.itemsize
        if any(n < 0 for n in shape) or skip + size != info.file_size:
            raise ValueError(f"{info.filename} declares {size} bytes and does not have them")
        if size == 0:
            return np.zeros(shape, dtype)
        order = "F" if fortran else "C"
        if info.compress_type != zipfile.ZIP_STORED:
            flat = np.empty(math.prod(shape), dtype)
            _fill(flat, member)
            return flat.reshape(shape, order=order)
    header = os.pread(handle, _LOCAL_HEADER.size, info.header_offset)
    name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    start = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes + skip
    return np.memmap(path, dtype=dtype, mode="r", offset=start, shape=shape, order=order)


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    version = npy.read_magic(member)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    try:
        return read(member)
    except (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile):
        raise
    except Exception as error:
        # A header is a Python literal. NumPy does not catch what Python's tokenizer and parser
        # raise for a malformed one: TokenError, RecursionError, MemoryError.
        raise ValueError(f"its header: {type(error).__name__}") from error


def _fill(array: Array, member: IO[bytes]) -> None:
    """Read ``member`` into ``array``, piece by piece."""
    left = array.view(np.uint8)
    while len(left):
        piece = member.read(min(len(left), _PIECE_BYTES))
        if not piece:
            raise EOFError
        left[: len(piece)] = np.frombuffer(piece, np.uint8)
        left = left[len(piece) :]
