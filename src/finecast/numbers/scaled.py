"""Encodings with parameters: numbers stored as integer codes, by a scale and a zero point.

``x`` is stored as ``x / scale``, rounded to nearest even, plus the zero point, and clamped to
the codes of the grid. A tensor has one scale, or one for each channel along an axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from finecast.numbers.formats import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The codes of an encoding: all integers from ``lowest`` to ``highest``.

    In a ``symmetric`` grid the zero point is 0.
    """

    dtype: np.dtype[np.generic]
    lowest: int
    highest: int
    symmetric: bool = False

    def fit(
        self, lows: NDArray[np.float64], highs: NDArray[np.float64]
    ) -> tuple[NDArray[np.float32], int]:
        """The scales, and the zero point, whose codes cover each range from low to high.

        Law: 0 is stored exactly, and what is within a range is read back within half a step;
        a range of nothing but 0 has the scale 1. A grid that is not symmetric takes one range.
        """
        lows, highs = np.minimum(lows, 0.0), np.maximum(highs, 0.0)
        if self.symmetric:
            scales = np.maximum(-lows, highs) / min(-self.lowest, self.highest)
        else:
            scales = (highs - lows) / (self.highest - self.lowest)
        scales = np.where(scales > 0, np.maximum(scales, Format.FP32.smallest_normal), 1.0)
        scales = scales.astype(np.float32)
        if self.symmetric:
            return scales, 0
        zero = np.rint(self.lowest - lows / scales)
        return scales, int(zero.item())


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """An encoding with parameters: one scale for a tensor, or one per channel along ``axis``.

    Channels may lie along several axes, as those of a grouped convolution do: along ``axis``
    and as many axes after it as give one channel for each scale.

    Laws: ``round`` is idempotent; what is within the range moves by half a step at most, and
    what is beyond it, infinities too, becomes its end. NaN has no code and becomes 0: a value
    in which one was observed must not be encoded. Each channel is encoded independently.

    Raises:
        ValueError: If the parameters cannot store numbers.
    """

    format: Format
    grid: Grid
    scale: tuple[float, ...]
    zero_point: int = 0
    axis: int | None = None

    def __post_init__(self) -> None:
        grid, zero = self.grid, self.zero_point
        if not grid.lowest <= zero <= grid.highest or (grid.symmetric and zero):
            raise ValueError(f"{self.label} has no zero point {zero}")
        widest = max(grid.highest - zero, zero - grid.lowest)
        least, most = Format.FP32.smallest_normal, Format.FP32.max / widest
        for scale in self.scale:
            if not least <= scale <= most or float(np.float32(scale)) != scale:
                raise ValueError(f"{scale!r} is no scale of {self.label}")
        if not self.scale or (self.axis is None and len(self.scale) > 1):
            raise ValueError(f"{len(self.scale)} scales of one tensor")
        if self.axis is not None and self.axis < 0:
            raise ValueError(f"axis {self.axis}")

    @classmethod
    def fitted(
        cls,
        fmt: Format,
        grid: Grid,
        lows: NDArray[np.floating[Any]],
        highs: NDArray[np.floating[Any]],
        axis: int | None = None,
    ) -> Scaled:
        """The encoding whose range covers that from low to high, in each channel.

        Raises:
            ValueError: If an end is not finite, or too large for a scale.
        """
        ends = np.asarray([lows, highs], np.float64).reshape(2, -1)
        if not np.isfinite(ends).all():
            raise ValueError("a range that is not finite has no scale")
        scales, zero = grid.fit(*ends)
        scale = tuple(float(s) for s in scales)
        return cls(format=fmt, grid=grid, scale=scale, zero_point=zero, axis=axis)

    @property
    def label(self) -> str:
        """The format's name."""
        return self.format.label

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The type that stores the codes."""
        return self.grid.dtype

    @property
    def range(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The least and the largest number that is stored, by channel."""
        scale, zero = np.asarray(self.scale, np.float32), self.zero_point
        return (self.grid.lowest - zero) * scale, (self.grid.highest - zero) * scale

    def encode(self, x: NDArray[np.generic]) -> NDArray[np.generic]:
        """The codes of ``x``."""
        return self.codes(x, self.along(x.shape))

    def decode(self, codes: NDArray[np.generic]) -> NDArray[np.float32]:
        """The numbers that ``codes`` stand for."""
        steps = codes.astype(np.float32) - np.float32(self.zero_point)
        return np.asarray(steps * self.along(codes.shape), np.float32)

    def round(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """``x`` encoded and decoded."""
        return self.decode(self.encode(x))

    def along(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The scale of each element of an array of ``shape``, as a view.

        Raises:
            ValueError: If the array does not have one channel for each scale.
        """
        return np.broadcast_to(self.spread(shape), shape)

    def spread(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The scales, in a shape that broadcasts to ``shape``.

        Raises:
            ValueError: As ``along``.
        """
        scale = np.asarray(self.scale, np.float32)
        if self.axis is None:
            return scale.reshape(())
        for end in range(self.axis + 1, len(shape) + 1):
            channels = shape[self.axis : end]
            if math.prod(channels) == scale.size:
                return scale.reshape(*channels, *(1,) * (len(shape) - end))
        raise ValueError(
            f"{scale.size} scales along axis {self.axis} of a tensor of shape {shape}"
        )

    def codes(self, x: NDArray[np.generic], scale: NDArray[np.float32]) -> NDArray[np.generic]:
        """The codes of ``x`` where each element has its ``scale``."""
        grid, zero = self.grid, np.float32(self.zero_point)
        with np.errstate(over="ignore", invalid="ignore"):
            steps = np.rint(np.asarray(x, np.float32) / scale) + zero
        limited = np.clip(np.where(np.isnan(steps), zero, steps), grid.lowest, grid.highest)
        return limited.astype(grid.dtype)

    def to_dict(self) -> dict[str, Any]:
        """The parameters as JSON content, without the format and its grid."""
        return {"scale": list(self.scale), "zero_point": self.zero_point, "axis": self.axis}

    @classmethod
    def from_dict(cls, fmt: Format, grid: Grid, content: dict[str, Any]) -> Scaled:
        """Read what ``to_dict`` gave.

        Raises:
            ValueError, TypeError, KeyError: If ``content`` has another form.
        """
        scale = cast("list[object]", content["scale"])
        zero, axis = content["zero_point"], content["axis"]
        if type(zero) is not int or type(axis) not in (int, type(None)):
            raise TypeError(f"zero point {zero!r}, axis {axis!r}")
        if type(scale) is not list or not all(type(s) is float for s in scale):
            raise TypeError("scales that are not a list of floats")
        numbers = tuple(cast("list[float]", scale))
        return cls(format=fmt, grid=grid, scale=numbers, zero_point=zero, axis=axis)
