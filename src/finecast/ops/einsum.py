"""An Einsum of two operands as one matrix product, with what moves axes before and after it.

Labels of both operands and of the result are the product's batch, labels of both operands
alone are summed over, and the others are rows (of the left one) and columns. Of several rows
or columns all but the last are batch axes of length 1 in the other operand, so that no
length has to be known; the columns of a right operand whose lengths are known are one axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

_ELLIPSIS = "..."
_UNKNOWN = "it moves axes beside '...', whose number is not known"


class Move(Enum):
    """An op that moves numbers, and what its argument is: axes, or a shape for Reshape.

    A shape has 0 for a length that stays, and -1 for the one that is left.
    """

    TRANSPOSE = "Transpose"
    UNSQUEEZE = "Unsqueeze"
    SQUEEZE = "Squeeze"
    RESHAPE = "Reshape"


Moves = tuple[tuple[Move, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """What is moved in each operand before ``a @ b``, and in its result.

    ``a`` is the first operand of the equation, or the second one if ``swapped``.
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
    """The product that ``equation`` is.

    Law: it gives what the equation does, for arrays of any lengths.

    Args:
        equation: As ONNX's Einsum has it, with or without ``->``.
        constant: Which operands are constants: of one, that is the right one.
        lengths: Of the constant's axes.

    Raises:
        ValueError: If it is none; says why.
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
    if _ELLIPSIS in (*beside, *column) or (_ELLIPSIS in outer and (batch or rows[:-1])):
        raise ValueError(_UNKNOWN)
    lead = [*batch, *[""] * len(beside), *outer]
    if merged:
        b.arrange([*lead, *summed, *columns])
        lengths_of = [_count(sizes, summed), _count(sizes, columns)]
        b.add(Move.RESHAPE, [*[0] * len(lead), *lengths_of])
    elif len(summed) > 1:
        b.arrange([*lead, *column, *summed])
        b.add(Move.RESHAPE, [*[0] * (len(lead) + 1), -1])
        b.add(Move.TRANSPOSE, [*range(len(lead)), len(lead) + 1, len(lead)])
    else:
        b.arrange([*lead, *summed, *column])
    made = _Axes([*batch, *rows[:-1], *outer, *(rows[-1:] or [""]), *column])
    _finish(made, columns if merged else [], sizes, result)
    return Product(
        left=tuple(a.moves), right=tuple(b.moves), after=tuple(made.moves), swapped=swapped
    )


def _arrange_left(
    a: _Axes,
    batch: Sequence[str],
    rows: Sequence[str],
    summed: Sequence[str],
    outer: Sequence[str],
) -> None:
    # Axes of length 1 in front of all others need not be stated.
    beside = [""] * len(outer) if batch or rows[:-1] else []
    lead = [*batch, *rows[:-1], *beside, *(rows[-1:] or [""])]
    a.arrange([*lead, *summed])
    if len(summed) > 1:
        a.add(Move.RESHAPE, [*[0] * len(lead), -1])


def _finish(
    made: _Axes, merged: Sequence[str], sizes: dict[str, int], result: Sequence[str]
) -> None:
    """From the product's axes to the equation's result."""
    single = [i for i, label in enumerate(made.labels) if not label]
    if single:
        # The rows or the columns: counted from the end, as '...' may stand before them.
        last = len(made.labels) - len(merged[1:])
        made.add(Move.SQUEEZE, [i - last for i in single])
        made.labels = [label for label in made.labels if label]
    if merged:
        lead = len(made.labels) - len(merged)
        made.add(Move.RESHAPE, [*[0] * lead, *(sizes[x] for x in merged)])
    made.arrange(result)


def _count(sizes: dict[str, int], labels: Sequence[str]) -> int:
    found = 1
    for label in labels:
        found *= sizes[label]
    return found


def _parsed(equation: str) -> tuple[list[list[str]], list[str]]:
    """The labels of the operands and of the result; '...' is one label."""
    terms, arrow, given = "".join(equation.split()).partition("->")
    operands = [_labels(term) for term in terms.split(",")]
    if len(operands) != 2:
        raise ValueError(f"it has {len(operands)} operands, and a product has two")
    flat = [label for labels in operands for label in labels]
    if any(len(set(labels)) != len(labels) for labels in operands):
        raise ValueError("it takes a diagonal")
    once = sorted(x for x in set(flat) - {_ELLIPSIS} if flat.count(x) == 1)
    result = _labels(given) if arrow else [*([_ELLIPSIS] if _ELLIPSIS in flat else []), *once]
    if _ELLIPSIS in flat and _ELLIPSIS not in result:
        raise ValueError("it sums over '...'")
    return operands, result


def _labels(term: str) -> list[str]:
    before, ellipsis, after = term.partition(_ELLIPSIS)
    return [*before, *([_ELLIPSIS] if ellipsis else []), *after]
