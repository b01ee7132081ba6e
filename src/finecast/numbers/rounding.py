"""Rounding of arrays to nearest even; overflow gives Inf, or NaN in formats without Inf."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # formats.py imports this module
    from finecast.numbers.formats import Format

_FP32_FRACTION: Final = np.finfo(np.float32).nmant


def widened(array: NDArray[np.generic]) -> NDArray[np.float64]:
    """A copy of ``array`` in float64, in which signalling NaNs are quiet ones.

    An engine that leaves memory unwritten may give signalling NaNs. A cast by numpy alone
    warns of them, before anything can tell which value has them.
    """
    with np.errstate(invalid="ignore"):
        return array.astype(np.float64)


def round_to(x: NDArray[np.float32], fmt: Format) -> NDArray[np.float32]:
    """Round to nearest even into ``fmt`` and return as float32.

    Idempotent and monotone; equal to an ml_dtypes round trip where that type exists.
    Values beyond the largest become Inf (NaN in finite-only formats); subnormals are kept.
    """
    x = np.asarray(x, dtype=np.float32)
    if fmt.dtype == np.float32:  # fp32, or tf32, which is stored as fp32
        dropped = _FP32_FRACTION - fmt.mantissa_bits
        return _round_mantissa(x, dropped) if dropped else x
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(fmt.dtype).astype(np.float32)


def convert_constant(x: NDArray[np.generic], fmt: Format) -> NDArray[np.generic]:
    """Round a constant to nearest even into the type that stores ``fmt`` (tf32: fp32).

    Where that would overflow though ``x`` is less than one unit in the last place beyond the
    largest number, gives the largest: fp32's lowest, the usual mask, becomes bf16's lowest
    and not -Inf. Sign and zero are kept; larger constants do become infinite.
    """
    exact = np.asarray(x, dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        in_fp32 = fmt.dtype == np.float32  # tf32's type alone would keep all digits
        rounded = round_to(exact, fmt) if in_fp32 else exact.astype(fmt.dtype)
    if np.isfinite(rounded).all():  # the usual case: nothing overflows
        return rounded
    magnitude = np.abs(exact.astype(np.float64))
    barely = (magnitude > fmt.max) & (magnitude < overflow_limit(fmt))
    return np.where(barely, np.copysign(fmt.max, exact).astype(fmt.dtype), rounded)


def convert_scalar(number: float, fmt: Format) -> float:
    """``number`` as ``convert_constant`` gives it if it is out of range, else unchanged.

    Within the range nothing is rounded: a low-precision op rounds its scalars itself.
    """
    if not math.isfinite(number) or abs(number) <= fmt.max:
        return number
    return float(convert_constant(np.asarray(number), fmt))


def overflow_limit(fmt: Format) -> float:
    """One unit in the last place above the largest number of ``fmt``."""
    return fmt.max + 2.0 ** (math.floor(math.log2(fmt.max)) - fmt.mantissa_bits)


def _round_mantissa(x: NDArray[np.float32], drop: int) -> NDArray[np.float32]:
    """Drop the lowest ``drop`` bits of the fraction, to nearest even, on the bit pattern."""
    bits = x.view(np.uint32)
    half_below = np.uint32((1 << (drop - 1)) - 1)
    odd = (bits >> np.uint32(drop)) & np.uint32(1)
    mask = np.uint32(0xFFFFFFFF) << np.uint32(drop)
    rounded = ((bits + half_below + odd) & mask).view(np.float32)
    return np.where(np.isfinite(x), rounded, x)
