"""Reading labels for metrics: class numbers within the model's classes, or finite numbers.

Laws: one-hot labels are read as the class they mark; a label of -100, or a row of it, marks a
decision that does not count, as in PyTorch's losses; any other label that is no class of the
model is an error, because a metric of it would mean nothing.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.engines.base import Array
from finecast.errors import UsageError

IGNORED: Final = -100
_SHOWN: Final = 6
"""Numbers of a row that an error shows."""
_FEW: Final = 30
"""With fewer decisions than this a single one changes a share of them by more than 3%."""


def class_labels(labels: Array | None, scores: Array, *, output: str, metric: str) -> Array:
    """Labels as class numbers, of the shape of ``scores`` without its last axis.

    Args:
        labels: Class numbers (of any type that holds whole numbers), or one-hot rows.
        scores: A score for each class along the last axis.
        output: The scores' name, for errors.
        metric: The metric's name, for errors.

    Raises:
        UsageError: If there are none, they or the scores are not numbers, they do not fit the
            scores, or name a class that the model does not have.
    """
    check_numbers(scores, output, metric)
    given = required(labels, metric)
    if given.dtype.kind not in "biuf":
        raise _text(given, metric)
    scored = given.ndim > 1 or scores.dtype.kind not in "biu"
    if scored and given.shape == scores.shape and has_rows(given, scores.shape[:-1]):
        given = _marked(given, metric)
    elif given.ndim == scores.ndim and given.shape[-1:] == (1,):
        given = given[..., 0]
    if given.shape != scores.shape[:-1] or scores.ndim == 0:
        raise misfit(given, scores, scores.shape[:-1], output)
    return _within(given, scores.shape[-1], output)


def misfit(labels: Array, outputs: Array, shape: tuple[int, ...], output: str) -> UsageError:
    """The error for a batch's labels that are not of the ``shape`` that its outputs need."""
    each = list(shape[1:])
    if is_one_hot(labels) and labels.shape[:-1] == shape:
        return UsageError(
            f"one-hot labels mark one of {labels.shape[-1]} classes, and output {output!r}"
            f" scores {outputs.shape[-1]}",
            where="labels",
            fix="mark the classes that the model scores, in its order, or save class numbers",
        )
    return UsageError(
        f"labels of shape {list(labels.shape)} do not fit output {output!r} of shape"
        f" {list(outputs.shape)}",
        where="labels",
        fix="give one label for each sample"
        if not each
        else f"give labels of shape {each} for each sample, all samples along the first axis",
    )


def decided_labels(labels: Array | None, decisions: Array, *, metric: str) -> Array:
    """Labels for an output that is decisions already: both are numbers, or both text.

    Raises:
        UsageError: If one is text and the other is not, or rows are not one-hot.
    """
    given = required(labels, metric)
    if has_rows(given, decisions.shape):
        given = _marked(given, metric)
    given = given.reshape(decisions.shape)
    if (given.dtype.kind in "OSU") != (decisions.dtype.kind in "OSU"):
        raise _text(given, metric)
    return given.astype(str) if given.dtype.kind == "S" else given


def _text(labels: Array, metric: str) -> UsageError:
    if labels.dtype.kind in "mMV":  # dates and durations
        return UsageError(
            f"{metric} needs numbers or text, the labels are {labels.dtype}",
            where="labels",
            fix="save what the model gives: a class's index in its scores, or a number",
        )
    return UsageError(
        f"{metric} compares numbers with text: the labels are such as {str(labels.flat[0])!r}",
        where="labels",
        fix="save what the model gives: a class's index in its scores, or its own text",
    )


def _marked(labels: Array, metric: str) -> Array:
    """The class that each one-hot row marks, ``IGNORED`` for rows of that alone.

    Raises:
        UsageError: If a row is neither.
    """
    if labels.dtype.kind not in "biuf":
        raise _text(labels, metric)
    ignored = (labels == IGNORED).all(axis=-1)
    binary = np.asarray(np.isin(labels, (0, 1)).all(axis=-1))
    wrong = ~ignored & ~(binary & (labels.sum(axis=-1) == 1))
    if wrong.any():
        at = tuple(int(n) for n in np.argwhere(wrong)[0])
        row = ", ".join(f"{x:.3g}" for x in labels[at][:_SHOWN].astype(np.float64))
        row += ", ..." if labels.shape[-1] > _SHOWN else ""
        count = int(labels[at].sum()) if binary[at] else 0
        what = f"some mark {count} classes" if binary[at] else "the labels are a share of each"
        place = f"labels[{', '.join(map(str, at))}]" if at else "labels"
        raise UsageError(
            f"{metric} needs one class a decision, {what}: {place} is {row}",
            where="labels",
            fix="save class numbers, or one-hot rows; for other labels use --eval",
        )
    return np.where(ignored, IGNORED, labels.argmax(axis=-1))


def is_one_hot(labels: Array) -> bool:
    """Whether labels are rows with one 1 among zeros."""
    if labels.dtype.kind not in "biuf" or labels.shape[-1:] in ((), (1,)) or labels.ndim < 2:
        return False
    return bool(np.isin(labels, (0, 1)).all() and (labels.sum(axis=-1) == 1).all())


def has_rows(labels: Array, shape: tuple[int, ...]) -> bool:
    """Whether labels have a row for each decision of that shape, as one-hot labels do."""
    return labels.shape[:-1] == shape and labels.shape[-1:] not in ((), (1,))


def _within(labels: Array, classes: int, output: str) -> Array:
    """Labels as int64; UsageError if one is neither a class nor ``IGNORED``."""
    wide = labels.astype(np.float64)
    known = (np.floor(wide) == wide) & (wide >= 0) & (wide < classes)
    outside = wide[~known & (wide != IGNORED)]
    if outside.size:
        what = f"label {outside[0]:g} is no class of output {output!r}, which scores {classes}"
        fix = f"save class numbers from 0 to {classes - 1}; {IGNORED} is not counted"
        if np.all(outside == classes) and not np.any(wide == 0):
            what += ", and none is 0: labels seem to start at 1"
            fix = f"subtract 1 from them, to {fix}"
        raise UsageError(what, where="labels", fix=fix)
    return labels.astype(np.int64)


def is_counted(labels: Array | None, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Which decisions of this shape count: all, but those whose label is ``IGNORED``.

    Metrics that compare with the fp32 model need no labels. Where labels of that shape are
    given, they tell which positions of a text are padding.

    Raises:
        UsageError: If labels of another shape mark decisions: which ones is not known.
    """
    if labels is None or labels.dtype.kind not in "iuf":
        return np.ones(shape, dtype=bool)
    given = labels[..., 0] if labels.shape == (*shape, 1) else labels
    if given.shape == shape:
        return np.asarray(given != IGNORED)
    if labels.dtype.kind == "i" and (labels == IGNORED).any():
        raise UsageError(
            f"labels of shape {list(labels.shape)} have {IGNORED} for what does not count, and"
            f" the decisions have shape {list(shape)}",
            where="labels",
            fix=f"give labels of shape {list(shape[1:])} for each sample, or leave them out",
        )
    return np.ones(shape, dtype=bool)


def required(labels: Array | None, metric: str) -> Array:
    """The labels.

    Raises:
        UsageError: If there are none.
    """
    if labels is None:
        raise UsageError(
            f"{metric} needs labels", fix="add a 'label' array, or give --labels NAME"
        )
    if labels.dtype.kind in "mMV":  # dates and durations
        raise _text(labels, metric)
    return labels


def check_numbers(array: Array, output: str, metric: str) -> None:
    """Raise UsageError if an output is text."""
    if array.dtype.kind in "OSU":
        raise UsageError(
            f"{metric} needs numbers, and output {output!r} is text",
            where="--metric",
            fix="use top1 with labels in text, one for each, or --eval",
        )


def numbers(labels: Array | None, metric: str) -> NDArray[np.float64]:
    """Labels as numbers.

    Raises:
        UsageError: If there are none, or one is text, NaN or infinite.
    """
    given = required(labels, metric)
    if given.dtype.kind not in "biuf" or not np.isfinite(given).all():
        raise UsageError(
            f"{metric} needs a number for each sample, the labels have text, NaN or Inf",
            where="labels",
            fix="save finite numbers",
        )
    return given.astype(np.float64)


def few(count: int, metric: str, *, least: int = 2) -> tuple[str, ...]:
    """A warning if a metric rests on few decisions.

    Raises:
        UsageError: If there are fewer than ``least``, over which the metric says nothing.
    """
    check_some(count, metric)
    if count < least:
        raise UsageError(
            f"{metric} over {count} decision{'s' * (count > 1)} says nothing",
            where="--data",
            fix=f"give at least {_FEW} samples, or use --metric snr_db",
        )
    if count < _FEW:
        return (f"{metric} rests on {count} decisions: one is {1 / count:.0%} of it",)
    return ()


def check_some(count: int, metric: str) -> None:
    """Refuse data of which no decision counts.

    Raises:
        UsageError: If ``count`` is 0.
    """
    if not count:
        raise UsageError(
            f"{metric} is over no decision: all labels are {IGNORED}, or the outputs empty",
            where="--data",
            fix=f"give samples that count: labels of {IGNORED} mark what does not",
        )
