"""GPTQ: codes of weights by what products lose, and not by what each weight loses.

Each weight's rounding error is passed on to weights of the same sum that are not rounded yet,
as much as the values that they meet are correlated. Source: E. Frantar et al., "GPTQ: accurate
post-training quantization for generative pre-trained transformers" (2022), arXiv:2210.17323;
weights that meet the largest values come first ("act-order"), and scales are those of the
weights as they were ("static groups").
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.numbers.encodings import Scaled, stored_shifts

Floats = NDArray[np.float64]

# The share of the mean moment that is added to each value's own, as in the paper. Without it
# the errors of weights that hardly ever meet a value would be passed on many times as large.
_DAMPING: Final = 0.01
# Rows whose errors are passed on among themselves first, and then to all others at once.
_BLOCK: Final = 64
# Columns are sums of their own. So many are computed at once, which bounds the memory.
_COLUMNS: Final = 1024
# Shifts are stored in 8 bits, and are rarely more than 1.
_LARGEST_SHIFT: Final = 7


def compensated(encoding: Scaled, weights: NDArray[np.float32], moments: Floats) -> Scaled:
    """``encoding`` with the codes of GPTQ in place of the nearest ones. Scales stay.

    Law: on values of these ``moments`` no column of the product has a larger squared error
    than by the nearest codes. Moments that are not finite, or of zeros alone, change nothing.

    Args:
        encoding: The scales of ``weights``, by groups along the axis that products sum.
        weights: A matrix.
        moments: The second moments of what the weights meet: the mean of x times its
            transpose, of shape [summed, summed].
    """
    assert encoding.axis is not None
    if not (np.isfinite(moments).all() and moments.any()):
        return encoding
    axis, zero = encoding.axis, encoding.zero_point
    ends = encoding.grid.lowest - zero, encoding.grid.highest - zero
    rows, scales, codes = (
        np.moveaxis(a, axis, 0)
        for a in (weights, encoding.along(weights.shape), encoding.encode(weights))
    )
    order, passed = _shares(moments)
    shifts = np.empty(rows.shape, np.int8)
    for start in range(0, rows.shape[1], _COLUMNS):
        own = slice(start, start + _COLUMNS)
        exact, scale = rows[:, own].astype(np.float64), scales[:, own].astype(np.float64)
        nearest = codes[:, own].astype(np.float64) - zero
        found = np.empty_like(nearest)
        found[order] = _passed_on(exact[order], scale[order], nearest[order], ends, passed)
        before, after = (_error(exact - scale * steps, moments) for steps in (nearest, found))
        shifts[:, own] = np.where(after > before, 0, found - nearest)
    return replace(encoding, shifts=stored_shifts(np.moveaxis(shifts, 0, axis)))


def _error(lost: Floats, moments: Floats) -> Floats:
    """The squared error of each column of a product whose weights lost so much."""
    return np.einsum("kn,kn->n", lost, moments @ lost)


def _shares(moments: Floats) -> tuple[NDArray[np.int64], Floats]:
    """The order of rounding, and the shares of each row's error that later rows take."""
    damped = moments + _DAMPING * np.trace(moments) / len(moments) * np.eye(len(moments))
    order = np.argsort(-damped.diagonal(), kind="stable")
    return order, np.linalg.cholesky(np.linalg.inv(damped[np.ix_(order, order)])).T


def _passed_on(
    left: Floats, scales: Floats, nearest: Floats, ends: tuple[int, int], passed: Floats
) -> Floats:
    """The steps of each weight, [summed, columns]: codes without their zero point.

    Rows are in the order in which they are rounded; ``left`` is overwritten.
    """
    steps = np.empty_like(left)
    lows = np.maximum(nearest - _LARGEST_SHIFT, ends[0])
    highs = np.minimum(nearest + _LARGEST_SHIFT, ends[1])
    for start in range(0, len(left), _BLOCK):
        block = slice(start, min(start + _BLOCK, len(left)))
        errors = np.empty_like(left[block])
        for k in range(block.start, block.stop):
            steps[k] = np.clip(np.rint(left[k] / scales[k]), lows[k], highs[k])
            error = (left[k] - scales[k] * steps[k]) / passed[k, k]
            left[k + 1 : block.stop] -= np.outer(passed[k, k + 1 : block.stop], error)
            errors[k - start] = error
        left[block.stop :] -= passed[block, block.stop :].T @ errors
    return steps
