"""Statistics of each channel of a value, observed in runs of the fp32 model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelFacts:
    """Each channel's least and largest number, with 0 included, and its sum of squares.

    ``count`` is the number of elements per channel.
    """

    lowest: Floats
    highest: Floats
    squares: Floats
    count: int

    @classmethod
    def of(cls, array: NDArray[np.generic], axis: int) -> ChannelFacts:
        """Facts of one array, whose channels lie along ``axis``."""
        x = np.moveaxis(np.asarray(array, np.float32), axis, 0)
        x = x.reshape(len(x), -1)
        return cls(
            lowest=x.min(axis=1, initial=0.0).astype(np.float64),
            highest=x.max(axis=1, initial=0.0).astype(np.float64),
            squares=np.einsum("ci,ci->c", x, x, dtype=np.float64),
            count=x.shape[1],
        )

    def merge(self, other: ChannelFacts) -> ChannelFacts:
        """Facts of both sets of numbers together; associative and commutative."""
        return ChannelFacts(
            lowest=np.minimum(self.lowest, other.lowest),
            highest=np.maximum(self.highest, other.highest),
            squares=self.squares + other.squares,
            count=self.count + other.count,
        )

    @property
    def largest(self) -> Floats:
        """Largest magnitude of each channel."""
        return np.maximum(-self.lowest, self.highest)

    @property
    def power(self) -> Floats:
        """Mean square of each channel."""
        return self.squares / max(self.count, 1)
