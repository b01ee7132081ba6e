"""Numbers in blocks: each so many of them in a row share a scale, which their largest gives.

Sources: OCP Microscaling Formats (MX) Specification 1.0, sections 5.2 (concrete formats), 5.3
(elements), 5.4 (the scale e8m0) and 6.3 (conversion); for NVFP4 NVIDIA's "Pretraining Large
Language Models with NVFP4" (arXiv 2509.25149), appendix on the quantization of tensors; for
four over six "Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling"
(arXiv 2512.02010).

Laws, for each block by itself: in MX the scale is 2 to the power of the largest exponent of
the block's numbers less the largest exponent of an element, within the range of e8m0. Each
number divided by it is rounded to the nearest element, ties to even, and what is beyond the
largest element becomes the largest. In NVFP4 a tensor has a scale in fp32, by which the scale
of its largest number becomes the largest of e4m3; a block's scale, divided by that of the
tensor, is rounded to e4m3. With four over six a block's largest number may become 4 in place
of 6, between which there is no element: its scale is half as large again then. That is chosen
where the sum of the squared errors of the block is less by it; so that e4m3 holds such scales,
the scale of the tensor's largest number becomes 256. A last block that is not whole is a block
like others. Zeros keep their sign, but for those of integers. A NaN or an Inf has no element:
all numbers that share a scale with it become NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

_FP32: Final = np.finfo(np.float32)
_LEAST_EXPONENT: Final = -127
_MOST_EXPONENT: Final = 127
# By how much a scale grows where the largest number becomes 4 in place of 6, and the largest
# scale by 6: e4m3 has 256 times that factor exactly.
FOUR_OVER_SIX: Final = 1.5
_MOST_BY_SIX: Final = 256.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """What one number of a block is stored as.

    Attributes:
        dtype: The type that stores it.
        bits: Bits that it takes.
        mantissa_bits: Bits of its fraction.
        smallest_normal: Magnitudes below are as far apart as those above it are. In integers
            times a step all numbers are equally far apart: this is their largest power of two.
        largest: The largest magnitude.
        step: What the stored number 1 stands for.
    """

    dtype: np.dtype[np.generic]
    bits: int
    mantissa_bits: int
    smallest_normal: float
    largest: float
    step: float = 1.0

    @property
    def signed_zero(self) -> bool:
        """Whether zeros have a sign: those of integers have none."""
        return not np.issubdtype(self.dtype, np.integer)

    @property
    def largest_exponent(self) -> int:
        """That of the largest power of two."""
        return int(np.frexp(self.largest)[1]) - 1

    def round(self, x: Array) -> Array:
        """``x`` rounded to nearest even, and clamped to the largest magnitude."""
        least = int(np.frexp(self.smallest_normal)[1]) - 1
        exponent = np.maximum(np.frexp(x)[1] - 1, least)
        step = np.ldexp(np.float32(1), exponent - self.mantissa_bits)
        near = np.rint(x / step) * step
        near = np.clip(near, -self.largest, self.largest).astype(np.float32)
        return near if self.signed_zero else near + np.float32(0)


def _float(dtype: type[np.generic], bits: int) -> Element:
    facts = ml_dtypes.finfo(dtype)
    return Element(
        dtype=np.dtype(dtype),
        bits=bits,
        mantissa_bits=int(facts.nmant),
        smallest_normal=float(facts.smallest_normal),
        largest=float(facts.max),
    )


E4M3: Final = _float(ml_dtypes.float8_e4m3fn, 8)
E5M2: Final = _float(ml_dtypes.float8_e5m2, 8)
E2M3: Final = _float(ml_dtypes.float6_e2m3fn, 6)
E3M2: Final = _float(ml_dtypes.float6_e3m2fn, 6)
E2M1: Final = _float(ml_dtypes.float4_e2m1fn, 4)
# The specification lets converters leave the code of -2 unused, so that both signs end alike.
INT8: Final = Element(
    dtype=np.dtype(np.int8),
    bits=8,
    mantissa_bits=6,
    smallest_normal=1.0,
    largest=127 / 64,
    step=2.0**-6,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlocks:
    """Numbers as they are stored: codes, a scale for each block, and one for the tensor."""

    codes: NDArray[np.generic]
    scales: NDArray[np.generic]
    tensor_scale: np.float32 | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """How numbers are stored in blocks.

    Attributes:
        element: What each number is stored as.
        size: How many numbers share a scale.
        per_tensor: Whether a tensor has a scale, too: those of blocks are e4m3 then, else
            they are e8m0.
        four_over_six: Whether each block has the better of two scales.
    """

    element: Element
    size: int
    per_tensor: bool = False
    four_over_six: bool = False

    @property
    def scale_dtype(self) -> np.dtype[np.generic]:
        """The type that stores the scale of a block, in a byte."""
        return np.dtype(
            ml_dtypes.float8_e4m3fn if self.per_tensor else ml_dtypes.float8_e8m0fnu
        )

    @property
    def largest_scale(self) -> float:
        """What the scale of a tensor's largest number becomes, if the tensor has a scale."""
        return _MOST_BY_SIX if self.four_over_six else E4M3.largest

    @property
    def effective_bits(self) -> float:
        """Bits that a number takes with its share of the block's scale."""
        return self.element.bits + 8 / self.size

    def bytes_for(self, count: int) -> int:
        """Bytes of ``count`` numbers in a row with the scales of their blocks."""
        tensor = _FP32.bits // 8 if self.per_tensor else 0
        return -(-count * self.element.bits // 8) + -(-count // self.size) + tensor

    def round(self, x: Array, axis: int) -> Array:
        """``x`` as it is read back: blocks lie along ``axis``."""
        x = np.asarray(x, np.float32)
        if not x.size:
            return x
        scale = self._spread(*self._scales(x, axis), axis, x.shape[axis])
        return self._elements(x, scale) * scale

    def stored(self, x: Array, axis: int) -> StoredBlocks:
        """``x`` as it is stored."""
        x = np.asarray(x, np.float32)
        scales, of_tensor = self._scales(x, axis)
        numbers = self._elements(x, self._spread(scales, of_tensor, axis, x.shape[axis]))
        # What has no element is told by its scale.
        codes = np.nan_to_num(numbers / np.float32(self.element.step), nan=0.0)
        return StoredBlocks(
            codes=codes.astype(self.element.dtype),
            scales=scales.astype(self.scale_dtype),
            tensor_scale=of_tensor if self.per_tensor else None,
        )

    def decoded(self, stored: StoredBlocks, axis: int) -> Array:
        """The numbers that what is stored stands for."""
        of_tensor = np.float32(1) if stored.tensor_scale is None else stored.tensor_scale
        scales, count = stored.scales.astype(np.float32), stored.codes.shape[axis]
        numbers = stored.codes.astype(np.float32) * np.float32(self.element.step)
        return numbers * self._spread(scales, of_tensor, axis, count)

    def _scales(self, x: Array, axis: int) -> tuple[Array, np.float32]:
        """The scale of each block, as it is stored, and that of the tensor."""
        magnitude = np.abs(x)
        starts = np.arange(0, x.shape[axis], self.size)
        largest = np.maximum.reduceat(magnitude, starts, axis=axis)
        if not self.per_tensor:
            return self._powers(largest), np.float32(1)
        whole = magnitude.max()
        most = np.float32(self.element.largest)
        if not np.isfinite(whole):
            return np.full_like(largest, np.nan), np.float32(1)
        of_tensor = np.maximum(
            whole / np.float32(most * self.largest_scale), _FP32.smallest_normal
        )
        exact = largest / most / of_tensor
        by_six = E4M3.round(exact)
        if not self.four_over_six:
            return by_six, of_tensor
        by_four = E4M3.round(exact * np.float32(FOUR_OVER_SIX))
        six, four = (self._errors(x, scales, of_tensor, axis) for scales in (by_six, by_four))
        return np.where(four < six, by_four, by_six), of_tensor

    def _errors(self, x: Array, scales: Array, of_tensor: np.float32, axis: int) -> Array:
        """The sum of squared errors of each block, as shares of the tensor's scale."""
        count = x.shape[axis]
        near = self._elements(x, self._spread(scales, of_tensor, axis, count))
        missed = near * self._spread(scales, np.float32(1), axis, count) - x / of_tensor
        starts = np.arange(0, count, self.size)
        return np.add.reduceat(missed * missed, starts, axis=axis)

    def _powers(self, largest: Array) -> Array:
        """The powers of two by which the numbers of a block are divided; any for zeros."""
        exponent = np.frexp(largest)[1] - 1 - self.element.largest_exponent
        exponent = np.clip(exponent, _LEAST_EXPONENT, _MOST_EXPONENT)
        powers = np.ldexp(np.float32(1), exponent)
        return np.where(np.isfinite(largest), powers, np.float32(np.nan))

    def _elements(self, x: Array, scale: Array) -> Array:
        """``x`` divided by ``scale``, rounded to elements; 0 where the scale is 0."""
        with np.errstate(invalid="ignore"):
            quotient = np.divide(x, scale, out=np.copysign(np.float32(0), x), where=scale != 0)
        return self.element.round(quotient)

    def _spread(self, scales: Array, of_tensor: np.float32, axis: int, count: int) -> Array:
        """The scale of each of ``count`` numbers along ``axis``."""
        each = np.repeat(scales * of_tensor, self.size, axis=axis)
        return np.take(each, range(count), axis=axis) if each.shape[axis] > count else each
