"""Number formats: all numeric facts live here, and nowhere else.

Sources: IEEE 754-2019 (fp16, fp32); Google's bfloat16; NVIDIA's TF32; OCP 8-bit Floating
Point Specification 1.0 (e4m3 "fn", e5m2); the IEEE-like e4m3 and e3m4 are ml_dtypes' and
AWS Trainium's; formats of blocks: those of ``numbers.blocks``.

Code outside this package asks a format what it does (``encodes_values``, ``needs_ranges``,
``bytes_for``) and never what kind of format it is, so that a new format is one row here.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Final, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from finecast.errors import UsageError
from finecast.naming import unknown_name
from finecast.numbers import blocks
from finecast.numbers.blocks import BlockLayout
from finecast.numbers.rounding import convert_constant, round_to


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The codes of an encoding: all numbers of a type from ``lowest`` to ``highest``.

    The type has integers, or low floats. In a ``symmetric`` grid the zero point is 0.
    """

    dtype: np.dtype[np.generic]
    lowest: int
    highest: int
    symmetric: bool = False

    @property
    def has_floats(self) -> bool:
        """Whether codes are low floats, not integers."""
        return self.dtype in (_FP8, _FP8_WIDE)

    def nearest(self, steps: NDArray[np.float32]) -> NDArray[np.float32]:
        """The number of the type that is nearest to each of ``steps``, in place for integers.

        Ties go to the even one; what is beyond the ends becomes an end only by a clip.
        """
        if not self.has_floats:
            return np.rint(steps, out=steps)
        within = np.clip(steps, self.lowest, self.highest)
        return within.astype(self.dtype).astype(np.float32)

    def moved(self, zero_point: int) -> Grid:
        """The grid whose codes are larger by ``zero_point``, and stand for the same numbers.

        A grid moved by 0 is itself.

        Raises:
            ValueError: If the type that stores codes does not have all of them.
        """
        if not zero_point:
            return self
        lowest, highest = self.lowest + zero_point, self.highest + zero_point
        held = ml_dtypes.iinfo(self.dtype)
        if lowest < held.min or highest > held.max:
            raise ValueError(
                f"{self.dtype.name} does not have the integers {lowest} to {highest}"
            )
        return replace(self, lowest=lowest, highest=highest, symmetric=False)

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
class _Codes:
    """What a format with scales stores as integer codes, and by which codes.

    Without a zero point kernels multiply ``signed`` values; the grid is that of ``values`` if
    there is none.
    Without a grid for ``values`` the format is for constants alone: ops compute on decoded
    constants. With ``groups``, sizes in order of
    preference, the numbers of a channel have a scale for each group of so many, and
    ``fewest_groups`` at least. Of a ``dynamic`` format the kernels themselves round the values
    that meet such constants, to integers of 8 bits, or to low floats as those of the
    constants: they find a scale for each so many numbers in a row.
    """

    values: Grid | None
    constants: Grid
    groups: tuple[int, ...] = ()
    signed: Grid | None = None
    fewest_groups: int = 1
    dynamic: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The facts of a format.

    Ops on decoded constants compute in ``decoded``, the name of a float format; fp32 if there
    is none. Constants are stored in ``blocks``; where nothing says what they are decoded to,
    kernels multiply blocks, and round the values that they read to blocks, too.
    """

    exponent_bits: int
    mantissa_bits: int
    bits: int
    finite_only: bool = False
    codes: _Codes | None = None
    blocks: BlockLayout | None = None
    decoded: str | None = None


_FP8: Final = np.dtype(ml_dtypes.float8_e4m3fn)
_FP8_WIDE: Final = np.dtype(ml_dtypes.float8_e5m2)
# What x86's integer products take: unsigned values, and signed weights symmetric around 0.
_UINT8: Final = Grid(dtype=np.dtype(np.uint8), lowest=0, highest=255)
_INT8: Final = Grid(dtype=np.dtype(np.int8), lowest=-127, highest=127, symmetric=True)
# Products of two values take no zero point, so that codes of negative numbers are signed.
_SIGNED: Final = Grid(dtype=np.dtype(np.int8), lowest=-128, highest=127, symmetric=True)
_E4M3: Final = Grid(dtype=_FP8, lowest=-448, highest=448, symmetric=True)
E5M2: Final = Grid(dtype=_FP8_WIDE, lowest=-57344, highest=57344, symmetric=True)
"""The codes of gradients in fp8, which need more range than values, and fewer digits."""
_INT4: Final = Grid(dtype=np.dtype(ml_dtypes.int4), lowest=-7, highest=7, symmetric=True)
# Values that kernels round have few numbers to a scale: one that is far larger than the others
# costs only its group digits. 32 is OpenVINO's default (2026.4), and the least that ONNX
# Runtime takes.
_DYNAMIC_GROUP: Final = 32
# Kernels of ONNX Runtime are faster with fewer scales; 128 is what other tools write for it.
_LARGE_GROUP: Final = 128
_SIZES_OF_FP8: Final = 16
WHOLE_ROW: Final = 0
"""As the size of groups: all numbers of a row share a scale. One sum of integers then makes an
element of a product, which PyTorch's kernels take."""
# Large groups take the fewest scales; 128 is what other tools take by default, too. OpenVINO's
# kernels take four groups at least.
_BY_GROUPS: Final = _Codes(values=None, constants=_INT4, groups=(128, 64, 32), fewest_groups=4)
_BY_CHANNELS: Final = _Codes(values=None, constants=_INT8)


def _coded(codes: _Codes, decoded: str | None = None) -> _Layout:
    """The layout of codes whose sign is a bit of its own, with fp32 scales."""
    dtype = codes.constants.dtype
    floats = codes.constants.has_floats
    bits = (ml_dtypes.finfo if floats else ml_dtypes.iinfo)(dtype).bits
    mantissa_bits = ml_dtypes.finfo(dtype).nmant if floats else bits - 1
    return _Layout(
        exponent_bits=8, mantissa_bits=mantissa_bits, bits=bits, codes=codes, decoded=decoded
    )


# The sizes of blocks: of the OCP MX specification, and of NVFP4.
_MX: Final = 32
_NV: Final = 16


def _in_blocks(
    element: blocks.Element,
    size: int = _MX,
    *,
    decoded: str | None = None,
    four_over_six: bool = False,
) -> _Layout:
    """The layout of elements in blocks, whose scales give them fp32's range."""
    return _Layout(
        exponent_bits=8,
        mantissa_bits=element.mantissa_bits,
        bits=element.bits,
        blocks=BlockLayout(
            element=element, size=size, per_tensor=size == _NV, four_over_six=four_over_six
        ),
        decoded=decoded,
    )


class Format(Enum):
    """A binary floating-point format, or one with scales: integers, or blocks of low floats.

    For a format with scales, ``mantissa_bits`` is the precision near the end of its range, and
    ``exponent_bits`` is that of its scale. How it rounds depends on the parameters of an
    encoding (``encodings.Scaled``, ``encodings.Blocks``).
    """

    FP32 = "fp32", _Layout(exponent_bits=8, mantissa_bits=23, bits=32)
    TF32 = "tf32", _Layout(exponent_bits=8, mantissa_bits=10, bits=32)
    BF16 = "bf16", _Layout(exponent_bits=8, mantissa_bits=7, bits=16)
    FP16 = "fp16", _Layout(exponent_bits=5, mantissa_bits=10, bits=16)
    FP8_E4M3 = "fp8_e4m3", _Layout(exponent_bits=4, mantissa_bits=3, bits=8, finite_only=True)
    FP8_E4M3_IEEE = "fp8_e4m3_ieee", _Layout(exponent_bits=4, mantissa_bits=3, bits=8)
    FP8_E5M2 = "fp8_e5m2", _Layout(exponent_bits=5, mantissa_bits=2, bits=8)
    FP8_E3M4 = "fp8_e3m4", _Layout(exponent_bits=3, mantissa_bits=4, bits=8)
    INT8 = "int8", _coded(_Codes(values=_UINT8, constants=_INT8, signed=_SIGNED))
    INT8_WEIGHTS = "int8_weights", _coded(_BY_CHANNELS)
    INT4_WEIGHTS = "int4_weights", _coded(_BY_GROUPS)
    INT8_DYNAMIC = "int8_dynamic", _coded(replace(_BY_CHANNELS, dynamic=_DYNAMIC_GROUP))
    INT8_DYNAMIC_ROW = "int8_dynamic_row", _coded(replace(_BY_CHANNELS, dynamic=WHOLE_ROW))
    # One scale for a value, observed on data, and one for weights.
    FP8 = "fp8", _coded(_Codes(values=_E4M3, constants=_E4M3))
    FP8_DYNAMIC_ROW = (
        "fp8_dynamic_row",
        _coded(_Codes(values=None, constants=_E4M3, dynamic=WHOLE_ROW)),
    )
    INT4_DYNAMIC = "int4_dynamic", _coded(replace(_BY_GROUPS, dynamic=_DYNAMIC_GROUP))
    INT8_DYNAMIC_128 = "int8_dynamic_128", _coded(replace(_BY_CHANNELS, dynamic=_LARGE_GROUP))
    # A kernel of ONNX Runtime has one size of groups for both operands.
    INT4_DYNAMIC_128 = (
        "int4_dynamic_128",
        _coded(
            _Codes(values=None, constants=_INT4, groups=(_LARGE_GROUP,), dynamic=_LARGE_GROUP)
        ),
    )
    # Values in bf16 meet weights that are decoded to bf16: the types of OpenVINO's kernels.
    INT8_WEIGHTS_BF16 = "int8_weights_bf16", _coded(_BY_CHANNELS, "BF16")
    INT4_WEIGHTS_BF16 = "int4_weights_bf16", _coded(_BY_GROUPS, "BF16")
    MXFP8_E4M3 = "mxfp8_e4m3", _in_blocks(blocks.E4M3)
    MXFP8_E5M2 = "mxfp8_e5m2", _in_blocks(blocks.E5M2)
    MXFP6_E2M3 = "mxfp6_e2m3", _in_blocks(blocks.E2M3)
    MXFP6_E3M2 = "mxfp6_e3m2", _in_blocks(blocks.E3M2)
    MXFP4 = "mxfp4", _in_blocks(blocks.E2M1)
    MXINT8 = "mxint8", _in_blocks(blocks.INT8)
    NVFP4 = "nvfp4", _in_blocks(blocks.E2M1, _NV)
    # Kernels read it as nvfp4: scales are found in another way.
    NVFP4_FOUR_OVER_SIX = (
        "nvfp4_four_over_six",
        _in_blocks(blocks.E2M1, _NV, four_over_six=True),
    )
    # Values in bf16 meet weights that are decoded to bf16.
    MXFP8_WEIGHTS_BF16 = "mxfp8_weights_bf16", _in_blocks(blocks.E4M3, decoded="BF16")
    MXFP4_WEIGHTS_BF16 = "mxfp4_weights_bf16", _in_blocks(blocks.E2M1, decoded="BF16")
    NVFP4_WEIGHTS_BF16 = "nvfp4_weights_bf16", _in_blocks(blocks.E2M1, _NV, decoded="BF16")

    _layout: _Layout

    def __new__(cls, label: str, layout: _Layout) -> Self:
        """A member whose value is its label, as it stands in files."""
        member = object.__new__(cls)
        member._value_, member._layout = label, layout
        return member

    # Members are compared by identity; Enum hashes the name, which takes ten times as long.
    __hash__ = object.__hash__

    @classmethod
    def _missing_(cls, value: object) -> Format | None:
        """The format that frameworks call so."""
        with suppress(UsageError):
            return cls.parse(value) if isinstance(value, str) else None

    @property
    def label(self) -> str:
        """The name used in options, plans and reports: ``bf16``, ``fp8_e4m3``."""
        return self.value

    @property
    def exponent_bits(self) -> int:
        """Width of the exponent field."""
        return self._layout.exponent_bits

    @property
    def has_less_range(self) -> bool:
        """Whether a number of fp32's range may be too large or too small for the format."""
        return self.exponent_bits < Format.FP32.exponent_bits

    @property
    def mantissa_bits(self) -> int:
        """Width of the stored fraction, without the implicit leading bit."""
        return self._layout.mantissa_bits

    def holds(self, other: Format) -> bool:
        """Whether the format has every number of the float format ``other``."""
        return (
            other.mantissa_bits <= self.mantissa_bits
            and other.exponent_bits <= self.exponent_bits
        )

    @property
    def bits(self) -> int:
        """Bits that one stored element takes (tf32 is stored as fp32)."""
        return self._layout.bits

    @property
    def effective_bits(self) -> float:
        """Bits that one stored element takes with its share of the scale of a block."""
        return self.bits if self.blocks is None else self.blocks.effective_bits

    def bytes_for(self, count: int) -> int:
        """Bytes that ``count`` stored elements take, with scales if blocks of it have them."""
        return (
            -(-count * self.bits // 8) if self.blocks is None else self.blocks.bytes_for(count)
        )

    @property
    def finite_only(self) -> bool:
        """Whether the format has no infinities (OCP "fn": only all-ones is NaN)."""
        return self._layout.finite_only

    @cached_property
    def has_scales(self) -> bool:
        """Whether elements are codes that parameters, or scales of blocks, map to numbers."""
        return self._layout.codes is not None or self.blocks is not None

    @cached_property
    def blocks(self) -> BlockLayout | None:
        """How elements are stored in blocks; None if they are not."""
        return self._layout.blocks

    @cached_property
    def multiplies_blocks(self) -> bool:
        """Whether kernels round values to blocks as they read them, and multiply blocks."""
        return self.blocks is not None and self._layout.decoded is None

    @property
    def encodes_values(self) -> bool:
        """Whether values are rounded before an op in it reads them; constants always are."""
        return not self.has_scales or self.reads is not Format.FP32

    @cached_property
    def reads(self) -> Format:
        """The format in which an op reads values; for constants alone what codes decode to."""
        itself = not self.has_scales or self.runs_on_codes or self.multiplies_blocks
        return self if itself else self.result

    @cached_property
    def dynamic_group(self) -> int | None:
        """How many numbers of a value share a scale that a kernel finds as it reads them.

        None if kernels read values as they are, or as codes that were made before;
        ``WHOLE_ROW`` if it is all numbers of a row.
        """
        if self.blocks is not None:
            return self.blocks.size if self.multiplies_blocks else None
        codes = self._layout.codes
        return None if codes is None else codes.dynamic

    @cached_property
    def encodes_results(self) -> bool:
        """Whether an op's result is as narrow as its operands; in tf32 and fp8 it is not."""
        return self is Format.FP32 or self.result is not Format.FP32

    @cached_property
    def result(self) -> Format:
        """The format in which an op that computes in this one stores its result.

        Codes of constants are decoded to it.
        """
        if self.has_scales:
            return Format[self._layout.decoded or "FP32"]
        return self if self.bits > 8 and self is not Format.TF32 else Format.FP32

    @property
    def needs_ranges(self) -> bool:
        """Whether its scales are chosen by values that were observed on data."""
        return self.runs_on_codes

    @cached_property
    def runs_on_codes(self) -> bool:
        """Whether kernels in it compute on integer codes, and not on decoded numbers."""
        codes = self._layout.codes
        return codes is not None and codes.values is not None

    @cached_property
    def multiplies_codes(self) -> bool:
        """Whether kernels multiply codes, of values encoded before or as they are read."""
        return self.runs_on_codes or self.dynamic_group is not None

    @cached_property
    def multiplies_integers(self) -> bool:
        """Whether kernels multiply codes other than low floats of whole tensors and rows."""
        return self.multiplies_codes and not self.has_float_codes

    @cached_property
    def has_float_codes(self) -> bool:
        """Whether codes are low floats, with scales of whole tensors, or rows and channels."""
        codes = self._layout.codes
        return codes is not None and codes.constants.has_floats

    @property
    def size_multiple(self) -> int:
        """What both sizes of a matrix are multiples of, where a kernel reads it.

        Of fp8's on GPUs: ``torch._scaled_mm``, by its documentation in PyTorch 2.13.
        """
        return _SIZES_OF_FP8 if self.has_float_codes else 1

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """How many numbers of a constant may share a scale; empty for a whole channel."""
        codes = self._layout.codes
        return () if codes is None else codes.groups

    @property
    def fewest_groups(self) -> int:
        """How many groups the numbers of a channel make at least."""
        codes = self._layout.codes
        return 1 if codes is None else codes.fewest_groups

    def grid(self, *, constant: bool, signed: bool = False) -> Grid:
        """The codes of values, which kernels may need ``signed``, or of constants.

        Raises:
            ValueError: If it has no scales, or values are not encoded.
        """
        codes = self._layout.codes
        grid = None if codes is None else codes.constants if constant else codes.values
        if codes is not None and grid is not None and signed:
            grid = codes.signed or grid
        if grid is None:
            what = "constants" if constant else "values"
            raise ValueError(f"{self.label} has no quantized form for {what}")
        return grid

    @property
    def bias(self) -> int:
        """Exponent bias."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def max(self) -> float:
        """Largest finite magnitude."""
        top = 2.0 - 2.0**-self.mantissa_bits
        exponent = self.bias
        if self.finite_only:  # the top binade is used, all but its all-ones code
            exponent += 1
            top = 2.0 - 2.0 ** (1 - self.mantissa_bits)
        return top * 2.0**exponent

    @property
    def smallest_normal(self) -> float:
        """Smallest positive normal number."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive number."""
        return self.smallest_normal * self.epsilon

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger number."""
        return 2.0**-self.mantissa_bits

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding a normal number to nearest: epsilon / 2."""
        return self.epsilon / 2

    @cached_property
    def storage(self) -> Format:
        """The format in which results computed in this one are stored (tf32: fp32)."""
        return self.result if self.encodes_results or self is Format.TF32 else self

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The numpy (or ml_dtypes) type that stores this format."""
        if self.blocks is not None:
            return self.blocks.element.dtype
        codes = self._layout.codes
        return _DTYPES[self] if codes is None else codes.constants.dtype

    @property
    def format(self) -> Format:
        """Itself: a float format is an encoding without parameters."""
        return self

    def round(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """``x`` rounded to the format, as float32: ``rounding.round_to``."""
        self._check_float()
        return round_to(x, self)

    def encode(self, x: NDArray[np.generic]) -> NDArray[np.generic]:
        """The constant ``x`` as it is stored: ``rounding.convert_constant``."""
        self._check_float()
        return convert_constant(x, self)

    def decode(self, codes: NDArray[np.generic]) -> NDArray[np.float32]:
        """The numbers that a stored constant, as ``encode`` gives it, stands for."""
        self._check_float()
        return codes.astype(np.float32, copy=False)

    def _check_float(self) -> None:
        if self.has_scales:
            raise ValueError(
                f"{self.label} does not round without the parameters of an encoding"
            )

    @classmethod
    def parse(cls, name: str) -> Format:
        """Read a format's label, or what frameworks call it: ``bfloat16``, ``half``.

        Raises:
            UsageError: If ``name`` is none of them.
        """
        spelled = name.strip().lower().replace("-", "_")
        try:
            return _BY_LABEL.get(spelled) or _BY_ALIAS[spelled]
        except KeyError:
            raise unknown_name(name, _BY_LABEL, what="format") from None


_DTYPES: dict[Format, np.dtype[np.generic]] = {
    Format.FP32: np.dtype(np.float32),
    Format.TF32: np.dtype(np.float32),
    Format.BF16: np.dtype(ml_dtypes.bfloat16),
    Format.FP16: np.dtype(np.float16),
    Format.FP8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    Format.FP8_E4M3_IEEE: np.dtype(ml_dtypes.float8_e4m3),
    Format.FP8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
    Format.FP8_E3M4: np.dtype(ml_dtypes.float8_e3m4),
}
FLOATS: Final = tuple(f for f in Format if not f.has_scales)
"""Floating-point formats: each rounds a number by itself, without parameters."""
CODED: Final = tuple(f for f in Format if f.has_scales and f.blocks is None)
"""Formats of integer codes: how each rounds depends on the parameters of an encoding."""
BLOCKS: Final = tuple(f for f in Format if f.blocks is not None)
"""Formats of blocks: their numbers give their scales. No engine here has kernels for them."""
DYNAMIC: Final = tuple(f for f in CODED if f.dynamic_group is not None)
"""Formats of codes whose kernels round values as they read them."""
_BY_LABEL = {f.label: f for f in Format}
# What PyTorch, numpy, ONNX and tools that compress weights call them.
_BY_ALIAS = {
    "float32": Format.FP32,
    "float": Format.FP32,
    "single": Format.FP32,
    "bfloat16": Format.BF16,
    "float16": Format.FP16,
    "half": Format.FP16,
    "float8_e4m3fn": Format.FP8_E4M3,
    "float8_e4m3": Format.FP8_E4M3_IEEE,
    "float8_e5m2": Format.FP8_E5M2,
    "float8_e3m4": Format.FP8_E3M4,
    "int8_weight_only": Format.INT8_WEIGHTS,
    "w8": Format.INT8_WEIGHTS,
    "w4": Format.INT4_WEIGHTS,
    "w8a8_dynamic": Format.INT8_DYNAMIC,
    "w4a8_dynamic": Format.INT4_DYNAMIC,
    "float8": Format.FP8,
    "float8_dynamic_row": Format.FP8_DYNAMIC_ROW,
    "mxfp8": Format.MXFP8_E4M3,
    "mxfp4_e2m1": Format.MXFP4,
}
