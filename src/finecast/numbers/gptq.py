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
# Shares by which moments off the diagonal are shrunk: the fewer rows, the larger the best one.
_SHRUNK: Final = (0.0, 0.2, 0.6, 0.9)
# So many columns, spread over all, judge which share is the best.
_JUDGES: Final = 64
# Shifts are stored in 8 bits, and are rarely more than 1.
_LARGEST_SHIFT: Final = 7


def compensated(
    encoding: Scaled, weights: NDArray[np.float32], halves: Floats, count: int
) -> Scaled:
    """``encoding`` with the codes of GPTQ in place of the nearest ones. Scales stay.

    Of few rows much of what seems correlated is chance, and codes that make use of it lose
    more on other rows. So moments off the diagonal are shrunk by the share that loses least
    where one half of the rows chooses codes and the other half judges them.

    Laws: on all rows no column of the product has a larger squared error than by the nearest
    codes. These stay where others do not clearly lose less on rows that did not choose them,
    and where the moments of a half are not finite, or zeros alone.

    Args:
        encoding: The scales of ``weights``, by groups along the axis that products sum.
        weights: A matrix.
        halves: The second moments of what the weights meet: the sum of x times its
            transpose, of shape [2, summed, summed], over two halves of the rows.
        count: The number of rows.
    """
    assert encoding.axis is not None
    if not (np.isfinite(halves).all() and halves.any(axis=(1, 2)).all()):
        return encoding
    axis, zero = encoding.axis, encoding.zero_point
    ends = encoding.grid.lowest - zero, encoding.grid.highest - zero
    rows, scales, codes = (
        np.moveaxis(a, axis, 0)
        for a in (weights, encoding.along(weights.shape), encoding.encode(weights))
    )

    def steps(own: slice) -> tuple[Floats, Floats, Floats]:
        exact, scale, code = (a[:, own].astype(np.float64) for a in (rows, scales, codes))
        return exact, scale, code - zero

    judges = steps(slice(None, None, -(-rows.shape[1] // _JUDGES)))
    share = _bearable(*judges, ends, halves, count)
    if share == 1:
        return encoding
    moments = halves.sum(axis=0)
    shares = _shares(_shrunk(moments, share))
    shifts = np.empty(rows.shape, np.int8)
    for start in range(0, rows.shape[1], _COLUMNS):
        own = slice(start, start + _COLUMNS)
        exact, scale, nearest = steps(own)
        gptq_steps = _found(exact, scale, nearest, ends, shares)
        before, after = (
            _error(exact - scale * some, moments) for some in (nearest, gptq_steps)
        )
        shifts[:, own] = np.where(after > before, 0, gptq_steps - nearest)
    return replace(encoding, shifts=stored_shifts(np.moveaxis(shifts, 0, axis)))


def _bearable(
    exact: Floats,
    scale: Floats,
    nearest: Floats,
    ends: tuple[int, int],
    halves: Floats,
    count: int,
) -> float:
    """The share to shrink by that loses least where each half judges the other's codes.

    It is 1, for the nearest codes, unless that error is smaller than theirs by more than it
    varies with the rows, one part in the root of their number.
    """

    def error(share: float) -> float:
        total = 0.0
        for chooses, judges in (halves, halves[::-1]):
            shares = _shares(_shrunk(chooses, share))
            gptq_steps = _found(exact, scale, nearest, ends, shares)
            total += _error(exact - scale * gptq_steps, judges).sum()
        return total

    best, least = 1.0, np.inf
    for share in _SHRUNK:
        loss = error(share)
        if loss >= least:  # it falls up to the best share, and grows from there
            break
        best, least = share, loss
    limit = (1 - count**-0.5) * _error(exact - scale * nearest, halves.sum(axis=0)).sum()
    return best if least < limit else 1.0


def _shrunk(moments: Floats, share: float) -> Floats:
    """The moments, less this share of those off the diagonal."""
    return (1 - share) * moments + share * np.diag(moments.diagonal())


def _error(lost: Floats, moments: Floats) -> Floats:
    """The squared error of each column of a product whose weights lost so much."""
    return np.einsum("kn,kn->n", lost, moments @ lost)


def _found(
    exact: Floats,
    scale: Floats,
    nearest: Floats,
    ends: tuple[int, int],
    shares: tuple[NDArray[np.int64], Floats],
) -> Floats:
    """The steps of GPTQ, in the order of the rows."""
    order, passed = shares
    gptq_steps = np.empty_like(nearest)
    gptq_steps[order] = _passed_on(exact[order], scale[order], nearest[order], ends, passed)
    return gptq_steps


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
