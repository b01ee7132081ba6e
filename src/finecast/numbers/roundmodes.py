"""Every conversion a device may do: to nearest, toward zero or stochastic; saturating or not.

Laws: a representable number converts to itself in every mode (but for subnormals that are
flushed); results are representable or Inf or NaN; to nearest without saturation and flush
it is ``rounding.round_to``; the stochastic draw of an element depends on seed, stream and
the element's index in the whole stream alone, so splitting a stream into batches changes
nothing. Stochastic rounding is unbiased to 2^-32 of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.numbers.encodings import Dynamic, Stored
from finecast.numbers.formats import Format
from finecast.numbers.rounding import round_to

SEEDS: Final = 2**128
"""Seeds of stochastic rounding are below this: a key of Philox has 128 bits."""

# A Philox block is four words of 64 bits; a draw takes the upper half of one.
_DRAWS_PER_BLOCK: Final = 4
_DRAW_BITS: Final = 32
_WORD: Final = 64


class Rounding(Enum):
    """Which of its two neighbours a number that is not representable becomes."""

    NEAREST_EVEN = "nearest_even"
    TOWARD_ZERO = "toward_zero"
    STOCHASTIC = "stochastic"
    UP_FROM_ODD = "up_from_odd"
    """To nearest from an odd number, else toward zero: off by up to a step. It is what
    OpenVINO does in a Convert from fp32 to bf16 that stands alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounder:
    """How numbers are converted to ``format``.

    Attributes:
        format: The format of the results.
        rounding: Which neighbour a number becomes.
        saturate: Numbers beyond the range, infinities too, become the largest number; else
            they become Inf (NaN in formats without). Finite numbers rounded toward zero stay
            in the range.
        flush_subnormals: Results below the smallest normal number become zero.
        seed: Of stochastic rounding.
        encoding: The parameters of a scaled format: numbers are rounded to nearest even and
            clamped to its codes, and all other attributes are ignored.
    """

    format: Format
    rounding: Rounding = Rounding.NEAREST_EVEN
    saturate: bool = False
    flush_subnormals: bool = False
    seed: int = 0
    encoding: Stored | Dynamic | None = None


def convert(
    x: NDArray[np.float32], how: Rounder, *, offset: int = 0, stream: int = 0
) -> NDArray[np.float32]:
    """Convert ``x`` and return the results as float32, in the same shape.

    ``offset`` is the index of the first element of ``x`` in the whole stream, and ``stream``
    tells apart streams of one seed.
    """
    x = np.asarray(x, dtype=np.float32)
    if how.encoding is not None:
        return how.encoding.round(x)
    plain = not how.saturate and not how.flush_subnormals
    if plain and how.rounding is Rounding.NEAREST_EVEN:
        return round_to(x, how.format)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return _by_steps(x, how, offset, stream)


def _by_steps(
    x: NDArray[np.float32], how: Rounder, offset: int, stream: int
) -> NDArray[np.float32]:
    fmt = how.format
    magnitude = np.abs(x.astype(np.float64))
    finite = np.isfinite(magnitude)
    exponent = np.frexp(np.where(finite, magnitude, 0.0))[1] - 1
    quantum = np.ldexp(1.0, np.maximum(exponent, 1 - fmt.bias) - fmt.mantissa_bits)
    # Exact: fp64 holds any fp32 number times a power of two.
    steps = np.where(finite, magnitude, 0.0) / quantum
    rounded = np.where(finite, _whole(steps, how, offset, stream) * quantum, magnitude)
    rounded = _limit(rounded, finite, how)
    if how.flush_subnormals:
        rounded = np.where(rounded < fmt.smallest_normal, 0.0, rounded)
    return np.copysign(rounded, x).astype(np.float32)


def draws(count: int, *, seed: int, offset: int = 0, stream: int = 0) -> NDArray[np.float64]:
    """Multiples of 2^-32 in [0, 1) for elements ``offset`` and on: Philox, by counter.

    Law: ``draws(n, offset=k)`` are the last n of ``draws(k + n)``.
    """
    first, skip = divmod(offset, _DRAWS_PER_BLOCK)
    counter = first + (stream << _WORD)
    words = np.random.Philox(key=seed, counter=counter).random_raw(skip + count)[skip:]
    return (words >> np.uint64(_WORD - _DRAW_BITS)).astype(np.float64) * 2.0**-_DRAW_BITS


def _whole(
    steps: NDArray[np.float64], how: Rounder, offset: int, stream: int
) -> NDArray[np.float64]:
    if how.rounding is Rounding.NEAREST_EVEN:
        return np.rint(steps)
    below = np.floor(steps)
    if how.rounding is Rounding.TOWARD_ZERO:
        return below
    if how.rounding is Rounding.UP_FROM_ODD:
        return below + ((steps - below >= 0.5) & (below % 2 == 1))
    draw = draws(steps.size, seed=how.seed, offset=offset, stream=stream)
    return below + (draw.reshape(steps.shape) < steps - below)


def _limit(
    rounded: NDArray[np.float64], finite: NDArray[np.bool_], how: Rounder
) -> NDArray[np.float64]:
    fmt = how.format
    beyond = rounded > fmt.max
    if how.saturate:
        return np.where(beyond, fmt.max, rounded)
    infinity = np.nan if fmt.finite_only else np.inf
    if how.rounding is Rounding.TOWARD_ZERO:
        return np.where(beyond, np.where(finite, fmt.max, infinity), rounded)
    return np.where(beyond, infinity, rounded)
