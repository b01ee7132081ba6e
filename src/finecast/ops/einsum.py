"""An Einsum of two operands as one matrix product, with ops that move axes around it.

Labels that both operands and the result have are batch axes of the product; labels that only
the operands have are summed over; the others are rows (of the left operand) and columns. If
there are several rows or columns, all but the last are batch axes of length 1 in the other
operand, so that no length has to be known. If the right operand's lengths are known, its
columns are merged into one axis instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

_ELLIPSIS = "..."
_UNKNOWN = "it moves axes beside '...', whose number is not known"


class Move(Enum):
    """An ONNX op that moves numbers. Its argument is a list of axes; for Reshape a shape.

    In a shape 0 keeps the axis' length, and -1 is inferred.
    """

    TRANSPOSE = "Transpose"
    UNSQUEEZE = "Unsqueeze"
    SQUEEZE = "Squeeze"
    RESHAPE = "Reshape"


Moves = tuple[tuple[Move, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The moves of the operands of ``a @ b`` and, ``after`` it, of its result.

    ``a`` (``left``) is the first operand of the equation, or the second one if ``swapped``.
    """

    left: Moves
    right: Moves
    after: Moves
    swapped: bool = False


@dataclass(slots=True)
class _Axes:
    """An array's axes by label, and the moves that brought them into this order."""

    labels: list[str]
    moves: list[tuple[Move, tuple[int, ...]]] = field(default_factory=list)

    def add(self, move: Move, argument: Sequence[int]) -> None:
        if _ELLIPSIS in self.labels and move is not Move.SQUEEZE:
            raise ValueError(_UNKNOWN)
        self.moves.append((move, tuple(argument)))

    def arrange(self, order: Sequence[str]) -> None:
        """Bring the labels into ``order``; an empty one is an axis of length 1."""
        known = [label for label in order if label]
        if known != self.labels:
            self.add(Move.TRANSPOSE, [self.labels.index(label) for label in known])
        single = [i for i, label in enumerate(order) if not label]
        if single == [len(known)]:
            self.moves.append((Move.UNSQUEEZE, (-1,)))
        elif single:
            self.add(Move.UNSQUEEZE, single)
        self.labels = list(order)


def as_product(
    equation: str, *, constant: Sequence[bool] = (), lengths: Sequence[int] | None = None
) -> Product:
    """The product that equals ``equation``, for arrays of any lengths.

    Args:
        equation: In the notation of ONNX's Einsum, with or without ``->``.
        constant: Whether each operand is a constant; a single constant becomes the right one.
        lengths: The lengths of the right operand's axes, if known.

    Raises:
        ValueError: If the equation is no matrix product; says why.
    """
    operands, result = _parsed(equation)
    swapped = list(constant) == [True, False]
    left, right = reversed(operands) if swapped else operands
    batch = [x for x in left if x in right and x in result]
    summed = [x for x in left if x in right and x not in result]
    rows = [x for x in left if x not in right]
    columns = [x for x in right if x not in left]
    if not summed:
        raise ValueError("it sums over no axis of both operands")
    if any(x not in result for x in (*rows, *columns)):
        raise ValueError("it sums over an axis of one operand alone")
    known = lengths is not None and _ELLIPSIS not in right
    sizes = dict(zip(right, lengths or (), strict=True)) if known else {}
    a, b = _Axes(list(left)), _Axes(list(right))
    merged = len(columns) > 1 and bool(sizes)
    outer = [] if merged else columns[:-1]
    _arrange_left(a, batch, rows, summed, outer)
    column = columns if merged else columns[-1:] or [""]
    beside = rows[:-1] if batch else []
    # Axes of '...' that one operand alone has would meet the other one's leading axes.
    own_row = _ELLIPSIS in rows and (batch or outer)
    own_column = _ELLIPSIS in outer and (batch or rows[:-1])
    if own_row or own_column or _ELLIPSIS in column:
        raise ValueError(_UNKNOWN)
    lead = [*batch, *[""] * len(beside), *outer]
    if merged:
        b.arrange([*lead, *summed, *columns])
        matrix = (math.prod(sizes[x] for x in axes) for axes in (summed, columns))
        b.add(Move.RESHAPE, [*[0] * len(lead), *matrix])
    elif len(summed) > 1:
        b.arrange([*lead, *column, *summed])
        b.add(Move.RESHAPE, [*[0] * (len(lead) + 1), -1])
        b.add(Move.TRANSPOSE, [*range(len(lead)), len(lead) + 1, len(lead)])
    else:
        b.arrange([*lead, *summed, *column])
    product_axes = _Axes([*batch, *rows[:-1], *outer, *(rows[-1:] or [""]), *column])
    _finish(product_axes, columns if merged else [], sizes, result)
    return Product(
        left=tuple(a.moves),
        right=tuple(b.moves),
        after=tuple(product_axes.moves),
        swapped=swapped,
    )


def _arrange_left(
    a: _Axes,
    batch: Sequence[str],
    rows: Sequence[str],
    summed: Sequence[str],
    outer: Sequence[str],
) -> None:
    # Leading axes of length 1 need not be stated: the product broadcasts.
    beside = [""] * len(outer) if batch or rows[:-1] else []
    lead = [*batch, *rows[:-1], *beside, *(rows[-1:] or [""])]
    a.arrange([*lead, *summed])
    if len(summed) > 1:
        a.add(Move.RESHAPE, [*[0] * len(lead), -1])


def _finish(
    made: _Axes, merged: Sequence[str], sizes: dict[str, int], result: Sequence[str]
) -> None:
    """Move the axes of the product's result to those of the equation's."""
    single = [i for i, label in enumerate(made.labels) if not label]
    if single:
        # Absent rows or columns; counted from the end, as '...' may stand in front of them.
        last = len(made.labels) - len(merged[1:])
        made.add(Move.SQUEEZE, [i - last for i in single])
        made.labels = [label for label in made.labels if label]
    if merged:
        lead = len(made.labels) - len(merged)
        made.add(Move.RESHAPE, [*[0] * lead, *(sizes[x] for x in merged)])
    made.arrange(result)


def _parsed(equation: str) -> tuple[list[list[str]], list[str]]:
    """The labels of the operands and of the result; '...' is one label."""
    terms, arrow, result_term = "".join(equation.split()).partition("->")
    operands = [_labels(term) for term in terms.split(",")]
    if len(operands) != 2:
        raise ValueError(f"it has {len(operands)} operands, and a product has two")
    flat = [label for labels in operands for label in labels]
    if any(len(set(labels)) != len(labels) for labels in operands):
        raise ValueError("it takes a diagonal")
    once = sorted(x for x in set(flat) - {_ELLIPSIS} if flat.count(x) == 1)
    result = (
        _labels(result_term) if arrow else [*([_ELLIPSIS] if _ELLIPSIS in flat else []), *once]
    )
    if _ELLIPSIS in flat and _ELLIPSIS not in result:
        raise ValueError("it sums over '...'")
    return operands, result


def _labels(term: str) -> list[str]:
    before, ellipsis, after = term.partition(_ELLIPSIS)
    return [*before, *([_ELLIPSIS] if ellipsis else []), *after]
