"""Metrics of decisions and ranks: top-k, agreement with fp32, rank correlation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import numpy as np

from finecast.engines.base import Array
from finecast.errors import UsageError


@final
class TopK:
    """Share of decisions whose label is among the ``k`` largest scores of the first output.

    Scores lie along the last axis; labels have the shape of the other axes. An integer output
    of the labels' shape is taken as decisions already made (for ``k`` = 1).
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self._right = 0
        self._count = 0
        self._nan = False

    def update(
        self,
        outputs: Mapping[str, Array],
        labels: Array | None,
        reference: Mapping[str, Array] | None,
    ) -> None:
        """Take one batch.

        Raises:
            UsageError: If there are no labels, or their shape does not fit the scores.
        """
        name, scores = _first(outputs)
        if labels is None:
            raise UsageError(
                f"top{self._k} needs labels", fix="add a 'label' array, or give --labels NAME"
            )
        labels = _squeezed(labels, scores)
        if _is_integer(scores) and scores.shape == labels.shape and self._k == 1:
            hits = scores == labels
        elif scores.shape[:-1] != labels.shape or scores.ndim == 0:
            raise UsageError(
                f"labels of shape {list(labels.shape)} do not fit output {name!r} "
                f"of shape {list(scores.shape)}",
                fix=f"give labels of shape {list(scores.shape[:-1])}",
            )
        else:
            self._nan = self._nan or has_nan(scores)
            hits = (_top(scores, self._k) == labels[..., None]).any(axis=-1)
        self._right += int(np.count_nonzero(hits))
        self._count += hits.size

    def result(self) -> float:
        """Right decisions over all decisions."""
        return _share(self._right, self._count, self._nan)


@final
class Agreement:
    """Share of decisions (largest score of the first output) equal to the fp32 model's."""

    def __init__(self) -> None:
        self._same = 0
        self._count = 0
        self._nan = False

    def update(
        self,
        outputs: Mapping[str, Array],
        labels: Array | None,
        reference: Mapping[str, Array] | None,
    ) -> None:
        """Take one batch.

        Raises:
            UsageError: If there is no reference, or the output holds no scores.
        """
        if reference is None:
            raise UsageError("agreement needs the fp32 model's outputs")
        name, scores = _first(outputs)
        expected = reference[name]
        self._nan = self._nan or has_nan(scores) or has_nan(expected)
        same = _decisions(scores, name) == _decisions(expected, name)
        self._same += int(np.count_nonzero(same))
        self._count += same.size

    def result(self) -> float:
        """Equal decisions over all decisions."""
        return _share(self._same, self._count, self._nan)


@final
class Spearman:
    """Rank correlation of each sample's first output scalar with its label."""

    def __init__(self) -> None:
        self._values: list[Array] = []
        self._labels: list[Array] = []

    def update(
        self,
        outputs: Mapping[str, Array],
        labels: Array | None,
        reference: Mapping[str, Array] | None,
    ) -> None:
        """Take one batch.

        Raises:
            UsageError: If there are no labels, or not one per sample.
        """
        name, scores = _first(outputs)
        if labels is None:
            raise UsageError(
                "spearman needs labels", fix="add a 'label' array, or give --labels NAME"
            )
        values = scores.reshape(len(scores), -1)[:, 0] if scores.ndim else scores[None]
        if labels.size != len(values):
            raise UsageError(
                f"{labels.size} labels for {len(values)} samples of output {name!r}",
                fix="give one number per sample",
            )
        self._values.append(values.astype(np.float64))
        self._labels.append(labels.reshape(-1).astype(np.float64))

    def result(self) -> float:
        """Spearman's rho; NaN where all values or all labels are equal."""
        from scipy.stats import spearmanr

        if not self._values:
            return float("nan")
        values, labels = np.concatenate(self._values), np.concatenate(self._labels)
        if has_nan(values) or np.ptp(values) == 0 or np.ptp(labels) == 0:
            return float("nan")
        result: Any = spearmanr(values, labels)
        return float(result.statistic)


def has_nan(array: Array) -> bool:
    """Whether a float array holds a NaN; ml_dtypes' types included."""
    return not _is_integer(array) and bool(np.isnan(array.astype(np.float32)).any())


def _first(outputs: Mapping[str, Array]) -> tuple[str, Array]:
    return next(iter(outputs.items()))


def _is_integer(array: Array) -> bool:
    return array.dtype.kind in "biu"


def _top(scores: Array, k: int) -> Array:
    wide = scores.astype(np.float32)
    if k == 1:
        return wide.argmax(axis=-1)[..., None]
    # stable, so that ties go to the lower class as in argmax
    return np.argsort(-wide, axis=-1, kind="stable")[..., :k]


def _decisions(scores: Array, name: str) -> Array:
    if _is_integer(scores):
        return scores
    if scores.ndim == 0 or scores.shape[-1] < 2 or scores.ndim < 2:
        raise UsageError(
            f"output {name!r} of shape {list(scores.shape)} holds no scores per class",
            fix="use --metric cosine or snr_db, or --eval",
        )
    return scores.astype(np.float32).argmax(axis=-1)


def _squeezed(labels: Array, scores: Array) -> Array:
    if labels.ndim == scores.ndim and labels.shape[-1:] == (1,) and not _is_integer(scores):
        return labels[..., 0]
    return labels


def _share(part: int, whole: int, nan: bool) -> float:
    return float("nan") if nan or not whole else part / whole
