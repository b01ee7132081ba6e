"""GPTQ: codes of weights by what products lose, and not by what each weight loses.

Each weight's rounding error is passed on to weights of the same sum that are not rounded yet,
as much as the values that they meet are correlated. Source: E. Frantar et al., "GPTQ: accurate
post-training quantization for generative pre-trained transformers" (2022), arXiv:2210.17323;
weights that meet the largest values come first ("act-order"), and scales are those of the
weights as they were ("static groups").
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast.numbers.encodings import Scaled, stored_shifts

Floats = NDArray[np.float64]

# The share of the mean moment that is added to each value's own, as in the paper. Without it
# the errors of weights that hardly ever meet a value would be passed on many times as large.
_DAMPING: Final = 0.01
# Rows whose errors are passed on among themselves first, and then to all others at once.
_BLOCK: Final = 64
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
    axis = encoding.axis
    rows = np.moveaxis(weights, axis, 0).astype(np.float64)
    scales = np.moveaxis(encoding.along(weights.shape), axis, 0).astype(np.float64)
    ends = (
        encoding.grid.lowest - encoding.zero_point,
        encoding.grid.highest - encoding.zero_point,
    )
    nearest = np.moveaxis(encoding.encode(weights), axis, 0).astype(np.float64)
    nearest -= encoding.zero_point
    found = _passed_on(rows, scales, nearest, ends, moments)
    worse = _error(rows - scales * found, moments) > _error(rows - scales * nearest, moments)
    shifts = np.where(worse, 0, found - nearest).astype(np.int8)
    return replace(encoding, shifts=stored_shifts(np.moveaxis(shifts, 0, axis)))


def _error(lost: Floats, moments: Floats) -> Floats:
    """The squared error of each column of a product whose weights lost so much."""
    return np.einsum("kn,kn->n", lost, moments @ lost)


def _passed_on(
    rows: Floats, scales: Floats, nearest: Floats, ends: tuple[int, int], moments: Floats
) -> Floats:
    """The steps of each weight, [summed, columns]: codes without their zero point."""
    damped = moments + _DAMPING * np.trace(moments) / len(moments) * np.eye(len(moments))
    order = np.argsort(-damped.diagonal(), kind="stable")
    passed = np.linalg.cholesky(np.linalg.inv(damped[np.ix_(order, order)])).T
    left, scales, nearest = rows[order], scales[order], nearest[order]
    steps: NDArray[Any] = np.empty_like(left)
    for start in range(0, len(left), _BLOCK):
        block = slice(start, min(start + _BLOCK, len(left)))
        errors = np.empty_like(left[block])
        for k in range(block.start, block.stop):
            near = np.clip(
                np.rint(left[k] / scales[k]),
                nearest[k] - _LARGEST_SHIFT,
                nearest[k] + _LARGEST_SHIFT,
            )
            steps[k] = np.clip(near, *ends)
            error = (left[k] - scales[k] * steps[k]) / passed[k, k]
            left[k + 1 : block.stop] -= np.outer(passed[k, k + 1 : block.stop], error)
            errors[k - start] = error
        left[block.stop :] -= passed[block, block.stop :].T @ errors
    back = np.empty_like(steps)
    back[order] = steps
    return back
