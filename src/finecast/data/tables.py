"""Tables and folders of images as samples of a model: CSV, Parquet, data frames, ``datasets``.

Laws: a column named as an input is that input. Columns ``NAME.0``, ``NAME.1`` and so on are
the numbers of one input, in this order; so are all columns but the labels where no column is
named as the model's one input and their number is that of its numbers. The numbers of a sample
fill the input's shape, the last axis first. Other columns are left out. Integers become the
input's own type where it holds all of them. A picture is resized to the input's height and
width, and its values are divided by 255 unless the input has integers.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from finecast.data.datasets import LABELS, ONE_FILE
from finecast.data.streams import to_array
from finecast.engines.base import DTYPES, Array, TensorSpec, shape_text
from finecast.errors import UsageError

_SEPARATORS: Final[Mapping[str, str]] = {".csv": ",", ".tsv": "\t"}
_IMAGES: Final = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
_CHANNELS: Final[Mapping[int, str]] = {1: "L", 3: "RGB"}
SCALED: Final = (
    "images were resized to the model's input and divided by 255; if the model was trained on"
    " other numbers, as with a mean and deviation, give a function that prepares them: --data"
    " FILE.py:FUNCTION"
)


def table_in(data: Any) -> Mapping[str, Any] | None:
    """The columns by name of a table: a file, or one of pandas, pyarrow or ``datasets``.

    None for anything else.

    Raises:
        UsageError: If a file is no table, or the library that reads it is not installed.
    """
    if isinstance(data, str | Path):
        path = Path(data)
        if path.suffix.lower() in _SEPARATORS:
            return _csv(path)
        return table_in(_parquet(path)) if path.suffix.lower() == ".parquet" else None
    names: Any = getattr(data, "column_names", None)
    if isinstance(names, Mapping):
        raise UsageError(
            f"the data has the parts {', '.join(map(str, names))}",
            where="data",
            fix="give one of them, as data['validation']",
        )
    if names is None:
        names = getattr(data, "columns", None)
    if names is None or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        return None
    return {str(name): data[name] for name in names}


def _csv(path: Path) -> dict[str, list[str]]:
    separator = _SEPARATORS[path.suffix.lower()]
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file, delimiter=separator) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(
            f"cannot read the table: {getattr(error, 'strerror', None) or error}",
            where=str(path),
            fix="give a text file in UTF-8 whose first line names the columns",
        ) from error
    names, *lines = rows or [[]]
    if not lines or any(_is_number(name) for name in names) or len({*names}) < len(names):
        raise UsageError(
            "the table has no rows"
            if not lines
            else "the first line does not name the columns",
            where=str(path),
            fix="write the names of inputs and 'label' there, as image.0,image.1,label",
        )
    for number, row in enumerate(lines, 2):
        if len(row) != len(names):
            raise UsageError(
                f"row {number} has {len(row)} values, and there are {len(names)} columns",
                where=str(path),
                fix="give each row a value for each column",
            )
    return dict(zip(names, map(list, zip(*lines, strict=True)), strict=True))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UsageError(
            "a Parquet file is read by pyarrow, which is not installed",
            where=str(path),
            fix="pip install pyarrow, or save the columns by numpy.savez",
        ) from error
    try:
        return parquet.read_table(path)  # pyright: ignore[reportUnknownMemberType]
    except Exception as error:
        raise UsageError(
            f"cannot read the table: {error}", where=str(path), fix="check the file"
        ) from error


def samples_of(
    columns: Mapping[str, Any],
    inputs: Sequence[TensorSpec],
    *,
    labels: str | None,
    beside: str | None,
    where: str,
) -> dict[str, Array]:
    """Arrays by name: those of the inputs, of the labels, and of the column ``beside``.

    Raises:
        UsageError: If the columns do not make up the inputs; says what they would have to be.
    """
    names = [spec.name for spec in inputs]
    targets = (labels,) if labels is not None else LABELS
    target = next((n for n in targets if n in columns and n not in names), None)
    used = {n for n in (target, beside) if n and n in columns and n not in names}
    made = {n: _array(columns[n], n, where) for n in used}
    if target is not None:
        made[labels or LABELS[0]] = _numbers(made.pop(target))
    for spec in inputs:
        made[spec.name] = _input(columns, spec, used, alone=len(inputs) == 1, where=where)
    return made


def _input(
    columns: Mapping[str, Any],
    spec: TensorSpec,
    used: Collection[str],
    *,
    alone: bool,
    where: str,
) -> Array:
    parts = [spec.name] if spec.name in columns else _numbered(columns, spec.name)
    needed = _size(spec)
    if not parts and alone:
        parts = [name for name in columns if name not in used]
        if needed is not None and len(parts) != needed:
            raise UsageError(
                f"input {spec.name!r} has {needed} numbers a sample, and the table"
                f" {len(parts)} columns beside the labels: {_some(parts)}",
                where=where,
                fix=f"name the columns {spec.name}.0, {spec.name}.1 and so on, or one of lists"
                f" {spec.name}",
            )
    if not parts:
        raise UsageError(
            f"no column is input {spec.name!r}; there are {_some(columns)}",
            where=where,
            fix=f"name a column {spec.name}, or columns {spec.name}.0, {spec.name}.1 and on",
        )
    arrays = [_typed(_array(columns[name], name, where), name, spec, where) for name in parts]
    array = arrays[0] if parts == [spec.name] else np.stack(arrays, axis=1)
    shape = (spec.shape or ())[1:]
    if needed is not None and array[:1].size == needed and array.shape[1:] != shape:
        return array.reshape(len(array), *map(int, filter(None, shape)))
    return array


def _some(names: Collection[str], most: int = 6) -> str:
    named = ", ".join([*names][:most]) or "none"
    return f"{named} and {len(names) - most} more" if len(names) > most else named


def _numbered(columns: Mapping[str, Any], name: str) -> list[str]:
    """The columns ``NAME.0``, ``NAME.1`` and so on, by their numbers."""
    stem = f"{name}."
    found = [c for c in columns if c.startswith(stem) and c[len(stem) :].isdecimal()]
    return sorted(found, key=lambda column: int(column[len(stem) :]))


def _size(spec: TensorSpec) -> int | None:
    """Numbers of one sample of an input; None if an axis other than the first is free."""
    sizes = [dim for dim in (spec.shape or ())[1:] if isinstance(dim, int)]
    known = spec.shape is not None and len(sizes) == len(spec.shape) - 1
    return math.prod(sizes) if known else None


def _array(column: Any, name: str, where: str) -> Array:
    """A column as one array: of numbers, text, lists that are equally long, or pictures."""
    items: list[Any] = list(column.to_pylist() if hasattr(column, "to_pylist") else column)
    for row, item in enumerate(items):
        if item is None:
            raise UsageError(
                f"row {row} of column {name!r} is empty",
                where=where,
                fix="leave such rows out",
            )
    if items and not isinstance(items[0], str | int | float):
        arrays = [to_array(item) for item in items]
        for row, array in enumerate(arrays):
            if array.shape != arrays[0].shape:
                raise UsageError(
                    f"row {row} of column {name!r} has shape {shape_text(array.shape)}, the"
                    f" first {shape_text(arrays[0].shape)}",
                    where=where,
                    fix="pad samples to one size, or give batches in which they have one",
                )
        return np.stack(arrays)
    return to_array(items)


def _numbers(array: Array) -> Array:
    """Text as whole numbers or others, if all of it is that; else as it is."""
    for dtype in (np.int64, np.float64) if array.dtype.kind == "U" else ():
        try:
            return array.astype(dtype)
        except ValueError:
            continue
    return array


def _typed(array: Array, name: str, spec: TensorSpec, where: str) -> Array:
    """A column of single numbers in the input's type; arrays are checked with the rest."""
    wanted = DTYPES.get(spec.dtype)
    if wanted is None or wanted.kind in "OSU":
        return array
    if array.dtype.kind == "U":
        for row, text in enumerate(array):
            if not _is_number(str(text)):
                raise UsageError(
                    f"row {row} of column {name!r} is {str(text)!r}, no number",
                    where=where,
                    fix=f"give numbers for input {spec.name!r}, or leave such rows out",
                )
        array = _numbers(array)
    if array.dtype.kind not in "iu" or (array.ndim > 1 and wanted.kind not in "iu"):
        return array
    converted = array.astype(wanted)
    return converted if np.array_equal(converted.astype(np.float64), array) else array


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """Batches of the images in a folder, for a model of one input of images.

    The classes are the folders in it, numbered from 0 in the order of their names, as by
    ``torchvision.datasets.ImageFolder``; of images in the folder itself there are no labels.
    """

    folder: Path
    spec: TensorSpec
    batch: int

    @staticmethod
    def of(folder: Path, inputs: Sequence[TensorSpec], batch: int) -> ImageFolder:
        """The images of ``folder`` for a model with ``inputs``.

        Raises:
            UsageError: If there are none, or the model does not take images.
        """
        images = ImageFolder(folder, inputs[0], batch)
        if len(inputs) != 1 or images._place is None:
            named = ", ".join(f"{s.name} {shape_text(s.shape or ())}" for s in inputs)
            raise UsageError(
                f"a folder of images fits one input of 1 or 3 channels and of a fixed height"
                f" and width; the model has {named}",
                where=str(folder),
                fix=ONE_FILE,
            )
        if not images.files:
            raise UsageError(
                f"there are no images ({' '.join(_IMAGES)}) in the folder",
                where=str(folder),
                fix="give a folder with one folder of images for each class",
            )
        try:
            import PIL.Image  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
        except ImportError as error:
            raise UsageError(
                "images are read by Pillow, which is not installed",
                where=str(folder),
                fix="pip install pillow, or give a function that reads them: --data"
                " FILE.py:FUNCTION",
            ) from error
        return images

    @property
    def notices(self) -> tuple[str, ...]:
        """What was assumed of the images."""
        return (SCALED,) if DTYPES[self.spec.dtype].kind not in "iu" else ()

    @property
    def files(self) -> list[tuple[Path, int | None]]:
        """The images and their classes, in order of their names."""
        folders = sorted(path for path in self.folder.iterdir() if path.is_dir())
        classed = [
            (p, i) for i, folder in enumerate(folders) for p in sorted(folder.rglob("*"))
        ]
        files = classed or [(path, None) for path in sorted(self.folder.iterdir())]
        return [(path, i) for path, i in files if path.suffix.lower() in _IMAGES]

    @property
    def _place(self) -> tuple[str, int, int, bool] | None:
        """The mode, height and width, and whether channels are first; None for no images."""
        shape = self.spec.shape or ()
        sizes = [dim for dim in shape[1:] if isinstance(dim, int)]
        if len(shape) != 4 or len(sizes) != 3:
            return None
        if sizes[0] in _CHANNELS:
            return _CHANNELS[sizes[0]], sizes[1], sizes[2], True
        last = _CHANNELS.get(sizes[2])
        return None if last is None else (last, sizes[0], sizes[1], False)

    def __iter__(self) -> Iterator[tuple[Array, Array] | Array]:
        """Batches of images, and of classes where there are any."""
        files = self.files
        for start in range(0, len(files), self.batch):
            part = files[start : start + self.batch]
            images = np.stack([self._image(path) for path, _ in part])
            classes = [number for _, number in part if number is not None]
            yield (images, np.array(classes)) if classes else images

    def _image(self, path: Path) -> Array:
        from PIL import Image  # pyright: ignore[reportMissingImports]

        assert self._place is not None
        mode, height, width, first = self._place
        open_image: Callable[..., Any] = Image.open  # pyright: ignore[reportUnknownMemberType]
        try:
            with open_image(path) as image:
                resized = image.convert(mode).resize((width, height))
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise UsageError(
                f"cannot read the image: {error}", where=str(path), fix="leave it out"
            ) from error
        values = np.asarray(resized).reshape(height, width, -1)
        values = values.transpose(2, 0, 1) if first else values
        dtype = DTYPES[self.spec.dtype]
        return values.astype(dtype) if dtype.kind in "iu" else (values / 255).astype(dtype)
