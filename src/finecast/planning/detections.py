"""What the numbers of a detector's rows are: scores of classes, class numbers, coordinates.

A detector gives a row for each object or place: the coordinates of a box with a score for each
class, or with one score and the number of a class. They lie in one output or in several. The
largest number of a row is mostly a coordinate, which says nothing of what was found. So the
parts are told apart, by what fp32 gives and by what the graph joins.

Law: only evidence that an ordinary output does not show by chance tells coordinates from
scores; without it an output is taken as scores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.graph import Graph, Value
from finecast.graph.structure import turned_axes
from finecast.numbers.rounding import widened
from finecast.planning.slices import BOUNDED, LEAST, WHOLE, Slice, groups_along, slices_of

_Array = NDArray[np.generic]
_Rows = NDArray[np.float64]

COORDINATES: Final = 4
"""Numbers of a box."""
_BOXES: Final = (COORDINATES, COORDINATES + 1)
"""Columns of an output of boxes, with a score or without."""
# Numbers of another unit decide every row of what is no decision. Where small numbers are the
# largest of their row more often than that, they compete with the others as scores do.
_RARELY: Final = 0.01
# Coordinates are hardly ever negative, logits mostly: of numbers of another unit than the
# scores at most this share is.
_NEGATIVE: Final = 0.1
# Rows by which columns are judged, of more of them, and numbers in these.
_MOST_ROWS: Final = 4096
_MOST_NUMBERS: Final = 1 << 22
# The right end of a box is beyond its left one in every row. That is a law of boxes, and no
# accident of two columns of which one is larger, if it is broken in this share of the rows
# where the ends of other rows are put in their places, and far more often than by chance.
_BROKEN: Final = 0.03
_BY_CHANCE: Final = 3.0
_TRIES: Final = 8
# Neighbours in an image rise and fall together, and quantiles rise in every row; of boxes the
# two axes do neither.
_TOGETHER: Final = 0.9
# Normalized boxes may reach beyond the image by this much.
_BEYOND: Final = 0.02
# Rows with more columns than this are no box with a score and some numbers.
_FEW_COLUMNS: Final = 8
# Ops whose numbers are those of what they read.
_MOVES: Final = frozenset({"cast", "identity", "transpose"})
# Outputs with so many axes beside that of samples hold images, whose columns are no rows.
_PLANES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParts:
    """What the slices of an output hold.

    Attributes:
        scores: Scores of classes, of which the largest decides.
        classes: Class numbers, which are decisions already: whole numbers in every row.
        numbers: Coordinates and other numbers that decide nothing.
        doubt: Whether coordinates are suspected among the scores.
    """

    scores: tuple[Slice, ...] = ()
    classes: tuple[Slice, ...] = ()
    numbers: tuple[Slice, ...] = ()
    doubt: bool = False


_TOGETHER_ALL: Final = RowParts(scores=(WHOLE,))


# ------------------------------------------------------------- the parts of one output's rows


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedOutput:
    """An output that a concatenation gives: sizes of what it joins, along an axis."""

    axis: int
    sizes: tuple[int, ...]


def joined_outputs(graph: Graph) -> Mapping[str, JoinedOutput]:
    """The outputs that a concatenation of parts of known sizes gives, by name."""
    joins = ((value.name, _join(graph, value)) for value in graph.outputs)
    return {name: join for name, join in joins if join is not None}


def _join(graph: Graph, value: Value) -> JoinedOutput | None:
    """The concatenation that gives a value, through casts and transposes."""
    rank, node = len(value.shape or ()), graph.maker(value)
    order = [*range(rank)]  # the axes of what ``node`` gives, in the order of the output's
    while node is not None and node.op in _MOVES:
        if node.op == "transpose":
            turned = turned_axes(graph, node, rank)
            if turned is None:
                return None
            order = [turned[axis] for axis in order]
        read = graph.read(node, 0)
        node = None if read is None else graph.maker(read)
    if node is None or node.op != "concat":
        return None
    axis = node.attributes.get("axis", node.attributes.get("dim", 0))
    if not isinstance(axis, int) or not -rank <= axis < rank:
        return None
    parts = [graph.values[i].shape for i in node.input_ids]
    sizes = [part[axis] for part in parts if part is not None and len(part) == rank]
    whole = [size for size in sizes if isinstance(size, int)]
    if len(whole) < len(node.inputs):
        return None
    return JoinedOutput(axis=order.index(axis % rank), sizes=tuple(whole))


def row_parts(wanted: _Array, joined: JoinedOutput | None = None) -> RowParts:
    """What the slices of an output hold, by what fp32 gives and by the parts that it joins.

    Boxes in pixels are larger than every score beside them. Such scores are the slice of the
    smallest unit, and decide along the axis of the slices. They are chances, or the large
    numbers are hardly negative, as coordinates. Boxes of the scores' own unit are known by
    their law, or by a graph that joins them. Else the numbers decide together, along the last
    axis: large ones that are never the largest (masked logits), or small ones that sometimes
    are.
    """
    if not _holds_floats(wanted) or wanted.ndim < 2:
        return _TOGETHER_ALL
    slices = slices_of(wanted)
    units = [list(part.indices or ()) for part in slices]
    long = [axis for axis in range(1, wanted.ndim) if wanted.shape[axis] > 1]
    axes = long[::-1] if len(long) < _PLANES else []
    if len(units) > 1:
        axes = [slices[0].axis]
    for axis in axes:
        parts = _Columns.of(wanted, axis, joined).parts(units)
        if parts is not None:
            return parts
    return replace(_TOGETHER_ALL, doubt=any(_suspected(wanted, axis) for axis in axes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """The numbers along an axis: a column for each of its indices.

    Attributes:
        rows: The numbers of some rows, in columns.
        joined: The sizes of the parts that the graph joins along the axis; empty if unknown.
        classes: The columns that hold class numbers.
        constant: Columns that hold one whole number.
    """

    axis: int
    rows: _Rows
    joined: tuple[int, ...] = ()
    classes: list[int] = field(default_factory=list[int])
    constant: list[int] = field(default_factory=list[int])

    @classmethod
    def of(cls, wanted: _Array, axis: int, joined: JoinedOutput | None) -> _Columns:
        """The columns of an output along an axis."""
        rows = _sampled(wanted, axis)
        # Places are joined, too, as those of several scales: they are more than columns.
        others = [s for n, s in enumerate(wanted.shape) if n not in (0, axis) and s > 1]
        fewer = wanted.shape[axis] < max(others, default=len(rows))
        sizes = joined.sizes if joined and joined.axis == axis and fewer else ()
        classes, constant = list[int](), list[int]()
        if len(rows) >= LEAST and wanted.shape[axis] <= _FEW_COLUMNS:
            every = np.moveaxis(wanted, axis, -1).reshape(-1, wanted.shape[axis])
            whole = whole_columns(every)
            varied = [c for c in whole if len(np.unique(rows[:, c])) > 1]
            constant = [c for c in whole if c not in varied]
            if rows.shape[1] - len(whole) >= COORDINATES:
                classes = [c for c in varied if np.abs(rows[:, c]).max() > BOUNDED]
        return cls(axis=axis, rows=rows, joined=sizes, classes=classes, constant=constant)

    def parts(self, units: Sequence[list[int]]) -> RowParts | None:
        """What the columns hold; None if they hold scores alone, as far as is known.

        ``units`` are the columns by their units, the largest first.
        """
        floats = [c for c in range(self.rows.shape[1]) if c not in self.classes]
        if self.classes:
            units = [[floats[c] for c in unit] for unit in _units(self.rows[:, floats])]
        if len(units) > 1:
            *others, scores = units
            if not self.decide_apart(others, scores):
                return self._rest(floats) if self.classes else None
        else:
            boxes = self._boxes(floats)
            if not boxes:
                return self._rest(floats) if self.classes else None
            others, scores = [boxes], [c for c in floats if c not in boxes]
        if len({*scores} - {*self.constant}) > 1:
            return RowParts(
                scores=(self._slice(scores),),
                classes=self._slices([self.classes]),
                numbers=self._slices(others),
            )
        if self.rows.shape[1] == 2:
            return None
        # A box with a score: a class number that is the same in all rows is one, too.
        classes = sorted({*self.classes, *self.constant})
        left = [[c for c in group if c not in classes] for group in (*others, scores)]
        return RowParts(classes=self._slices([classes]), numbers=self._slices(left))

    def decide_apart(self, others: Sequence[Sequence[int]], scores: Sequence[int]) -> bool:
        """Whether the columns of the smallest unit decide, and those of others are numbers."""
        own, larger = self.rows[:, scores], [self.rows[:, group] for group in others]
        best = np.max([numbers.max(axis=1) for numbers in larger], axis=0)
        chances = ((own >= 0) & (own <= BOUNDED)).all()
        coordinates = all(np.mean(numbers < 0) <= _NEGATIVE for numbers in larger)
        competes = np.mean(own.max(axis=1) > best) > _RARELY
        return bool(not competes and (chances or coordinates))

    def _boxes(self, floats: Sequence[int]) -> list[int]:
        """Four columns of coordinates that have the unit of the others; empty if unknown."""
        count = len(floats)
        starts = range(count - 3) if count <= _FEW_COLUMNS else (0, count - COORDINATES)
        for columns in ([*floats[start : start + COORDINATES]] for start in starts):
            rows = self.rows[:, columns]
            if are_boxes(rows) or (self._joins(columns) and _is_normalized(rows)):
                return columns
        return []

    def _joins(self, columns: Sequence[int]) -> bool:
        """Whether the graph joins the four columns, or two and two of them, to others."""
        begins = [0, *accumulate(self.joined)]
        inside = [
            size
            for begin, size in zip(begins, self.joined, strict=False)
            if columns[0] <= begin and begin + size <= columns[-1] + 1
        ]
        return inside in ([COORDINATES], [2, 2]) and len(inside) < len(self.joined)

    def _rest(self, floats: Sequence[int]) -> RowParts:
        """Class numbers decide, the other columns are numbers."""
        return RowParts(
            classes=self._slices([self.classes]), numbers=self._slices([list(floats)])
        )

    def _slices(self, groups: Sequence[Sequence[int]]) -> tuple[Slice, ...]:
        return tuple(self._slice(group) for group in groups if group)

    def _slice(self, columns: Sequence[int]) -> Slice:
        every = len(columns) == self.rows.shape[1]
        return WHOLE if every else Slice(axis=self.axis, indices=tuple(sorted(columns)))


def _units(rows: _Rows) -> list[tuple[int, ...]]:
    """The columns of rows by the size of their numbers, the largest first."""
    every = [tuple(range(rows.shape[1]))]
    return groups_along(np.abs(rows).astype(np.float32), 1) or every


def whole_columns(rows: _Array) -> list[int]:
    """The columns that hold whole numbers in every row."""
    first = widened(rows[:64])
    some = np.flatnonzero((first == np.rint(first)).all(axis=0))
    numbers = widened(rows[:, some])
    whole = (np.isfinite(numbers) & (numbers == np.rint(numbers))).all(axis=0)
    return [int(column) for column in some[whole]]


def class_columns(wanted: _Array, got: _Array) -> list[int]:
    """The columns of fp32's rows that hold class numbers, beside another model's rows.

    Few rows of coordinates that were clipped to the image are whole, too. So whole numbers
    that are all the same, or of few rows, have to be whole in both models; and where most
    columns are whole they are places.
    """
    whole = whole_columns(wanted) if len(wanted) else []
    if 2 * len(whole) >= wanted.shape[1] > 1:
        return []
    columns = [column for column in whole if np.abs(wanted[:, column]).max() > BOUNDED]
    beside = {*whole_columns(got)}
    return [
        column
        for column in columns
        if column in beside or (len(wanted) >= LEAST and len(np.unique(wanted[:, column])) > 1)
    ]


def are_boxes(rows: _Array) -> bool:
    """Whether rows of four numbers are boxes: two corners, or a normalized middle and size.

    The second corner is beyond the first one, and a box is within the image, in every row.
    """
    numbers = widened(rows)
    numbers = numbers[np.isfinite(numbers).all(axis=1) & (numbers != 0).any(axis=1)]
    if len(numbers) < LEAST or np.mean(numbers < 0) > _NEGATIVE:
        return False
    if (numbers.std(axis=0) == 0).any():
        return False
    rises = (np.diff(numbers, axis=1) >= 0).all(axis=1)
    alike = abs(np.corrcoef(numbers[:, 0], numbers[:, 1])[0, 1])
    if max(alike, np.mean(rises)) > _TOGETHER:
        return False
    laws = [_corners]
    if (numbers >= -_BEYOND).all() and (numbers <= BOUNDED + _BEYOND).all():
        laws.append(_within)
    return any(_is_law(law, numbers) for law in laws)


def _is_law(law: Callable[[_Rows], NDArray[np.bool_]], rows: _Rows) -> bool:
    """Whether rows keep a law because of what they are, and not by the sizes of columns."""
    rng, count = np.random.default_rng(0), len(rows)
    broken = np.sum(~law(rows))
    mixed = [
        np.sum(~law(np.concatenate([rows[:, :2], rng.permutation(rows[:, 2:])], axis=1)))
        for _ in range(_TRIES)
    ]
    usual = float(np.mean(mixed))
    few = broken <= min(_RARELY * count, usual / 10)
    many = usual >= _BROKEN * count and usual - broken >= _BY_CHANCE * np.sqrt(usual + 1)
    return bool(few and many)


def _corners(rows: _Rows) -> NDArray[np.bool_]:
    return np.all(rows[:, 2:] >= rows[:, :2], axis=1)


def _within(rows: _Rows) -> NDArray[np.bool_]:
    half = rows[:, 2:] / 2
    least, most = rows[:, :2] - half, rows[:, :2] + half
    return np.all((least >= -_BEYOND) & (most <= BOUNDED + _BEYOND), axis=1)


def _is_normalized(rows: _Rows) -> bool:
    """Whether all numbers are within 0 and 1, and are no chances of classes."""
    return _is_within(rows) and not _are_chances(rows)


def _are_chances(rows: _Rows) -> bool:
    return bool(np.allclose(rows.sum(axis=1), 1, atol=1e-3))


def _is_within(rows: _Rows) -> bool:
    return bool((rows >= 0).all() and (rows <= BOUNDED).all())


def _suspected(wanted: _Array, axis: int) -> bool:
    """Whether the first four numbers of each row are the largest, as normalized boxes are."""
    rows = _sampled(wanted, axis)
    if rows.shape[1] <= COORDINATES + 1 or len(rows) < 4 * LEAST or wanted.ndim < 3:
        return False
    first, others = rows[:, :COORDINATES].max(axis=1), rows[:, COORDINATES:].max(axis=1)
    return _is_normalized(rows) and bool(np.mean(first > others) >= 1 - _RARELY)


def _sampled(wanted: _Array, axis: int) -> _Rows:
    """Rows of numbers along an axis; some of many."""
    moved = np.moveaxis(wanted, axis, -1)
    count = wanted.size // max(wanted.shape[axis], 1)
    places = np.arange(count)
    most = min(_MOST_ROWS, _MOST_NUMBERS // max(wanted.shape[axis], 1))
    if count > most:  # drawn: every k-th may be a place of one kind, as an anchor
        places = np.sort(np.random.default_rng(0).integers(0, count, most))
    rows = widened(moved[np.unravel_index(places, moved.shape[:-1])])
    return np.where(np.isfinite(rows), rows, 0.0)


# ---------------------------------------------------------- the outputs of a detector together


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorOutputs:
    """Outputs that hold the rows of a detector together.

    Attributes:
        boxes: The output of coordinates.
        axis: The axis of its coordinates.
        scores: Outputs with a score for each class, each with the axis of these.
        classes: Outputs with a class number for each row.
        numbers: Outputs with another number for each row.
        certain: Whether their numbers prove that the first are coordinates.
        likely: Whether they rather are, by the form of all.
    """

    boxes: str
    axis: int
    scores: Mapping[str, int]
    classes: tuple[str, ...]
    numbers: tuple[str, ...]
    certain: bool = False
    likely: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (self.boxes, *self.scores, *self.classes, *self.numbers)


def detector_outputs(
    outputs: Mapping[str, _Array], samples: Collection[int]
) -> DetectorOutputs | None:
    """The outputs of a detector among those of a model, if there are boxes with scores.

    Args:
        outputs: What fp32 gives.
        samples: Numbers that may be that of the samples. Of one box a sample its size proves
            nothing, unless it is the first output, which would decide.
    """
    every = (_with_boxes(outputs, n, samples, is_first=not i) for i, n in enumerate(outputs))
    found = sorted(filter(None, every), key=lambda detector: not detector.certain)
    return found[0] if found else None


def _with_boxes(
    outputs: Mapping[str, _Array], name: str, samples: Collection[int], *, is_first: bool
) -> DetectorOutputs | None:
    """The outputs of a detector whose boxes the output ``name`` may hold."""
    array = outputs[name]
    if not _holds_floats(array) or not 2 <= array.ndim <= 4:
        return None
    axes = [axis for axis in (array.ndim - 1, 1) if array.shape[axis] in _BOXES]
    if not axes:
        return None
    shape, rows = _long(np.delete(array.shape, axes[0])), _sampled(array, axes[0])
    boxes, alone = rows[:, :COORDINATES], rows.shape[1] == COORDINATES
    detector = replace(
        _beside({n: a for n, a in outputs.items() if n != name}, shape),
        boxes=name,
        axis=axes[0],
    )
    several = shape not in [(count,) for count in samples]
    beside = [*detector.scores.items()]
    beside += [] if beside else [(n, outputs[n].ndim) for n in detector.numbers]
    apart = any(_has_other_unit(boxes, outputs[n], axis) for n, axis in beside)
    if len(detector.names) > 1:
        apart = alone and apart and (several or is_first)
        if apart or (are_boxes(boxes) and (alone or not row_parts(array).scores)):
            return replace(detector, certain=True)
    likely = _is_normalized(boxes)
    decided = detector.scores or (likely and detector.classes)
    if decided and is_first and alone and len(shape) > 1 and not _are_chances(boxes):
        return replace(detector, likely=likely)
    return None


def _beside(outputs: Mapping[str, _Array], rows: tuple[int, ...]) -> DetectorOutputs:
    """What ``outputs`` hold of rows of this shape."""
    scores, classes, numbers = dict[str, int](), list[str](), list[str]()
    for name, array in outputs.items():
        shape, floats = _long(array.shape), _holds_floats(array)
        if shape == rows:
            whole = not floats or whole_columns(array.reshape(-1, 1))
            (classes if whole else numbers).append(name)
        elif floats and shape[:-1] == rows:
            scores[name] = array.ndim - 1
        elif floats and len(shape) == 3 == array.ndim and (shape[0], shape[2]) == rows:
            scores[name] = 1
    chances = {n: a for n, a in scores.items() if _is_within(_sampled(outputs[n], a))}
    first = dict([*scores.items()][:1])
    return DetectorOutputs(
        boxes="",
        axis=-1,
        scores=chances or first,
        classes=tuple(classes),
        numbers=tuple(numbers),
    )


def _has_other_unit(boxes: _Rows, beside: _Array, axis: int) -> bool:
    """Whether ``boxes`` are coordinates by their unit, beside scores along an axis."""
    numbers = beside if axis < beside.ndim else beside[..., None]
    rows = np.concatenate([boxes, _sampled(numbers, axis)], axis=1)
    *others, scores = _units(rows)
    apart = min(scores) == COORDINATES and len(scores) == rows.shape[1] - COORDINATES
    return apart and _Columns(axis=1, rows=rows).decide_apart(others, scores)


def _long(shape: Sequence[int] | NDArray[np.intp]) -> tuple[int, ...]:
    """A shape without the axes of size 1 behind the first."""
    first, *others = map(int, shape)
    return (first, *(size for size in others if size > 1))


def _holds_floats(array: _Array) -> bool:
    return array.dtype.kind not in "biucOSUmM" and array.size > 0
