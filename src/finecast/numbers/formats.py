"""Number formats: all numeric facts live here, and nowhere else.

Sources: IEEE 754-2019 (fp16, fp32); Google's bfloat16; NVIDIA's TF32; OCP 8-bit Floating
Point Specification 1.0 (e4m3 "fn", e5m2); the IEEE-like e4m3 and e3m4 are ml_dtypes' and
Neuron's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from finecast.errors import UsageError
from finecast.numbers.rounding import convert_constant, round_to


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    exponent_bits: int
    mantissa_bits: int
    storage_bits: int
    finite_only: bool = False
    scaled: bool = False
    constants_only: bool = False


class Format(Enum):
    """A binary floating-point format, or a scaled format: integer codes and a scale.

    For a ``scaled`` format, ``mantissa_bits`` is the precision near the end of its range, and
    ``exponent_bits`` is that of its scale. How it rounds depends on the parameters of an
    encoding (``scaled.Scaled``).
    """

    FP32 = _Layout(exponent_bits=8, mantissa_bits=23, storage_bits=32)
    TF32 = _Layout(exponent_bits=8, mantissa_bits=10, storage_bits=32)
    BF16 = _Layout(exponent_bits=8, mantissa_bits=7, storage_bits=16)
    FP16 = _Layout(exponent_bits=5, mantissa_bits=10, storage_bits=16)
    FP8_E4M3 = _Layout(exponent_bits=4, mantissa_bits=3, storage_bits=8, finite_only=True)
    FP8_E4M3_IEEE = _Layout(exponent_bits=4, mantissa_bits=3, storage_bits=8)
    FP8_E5M2 = _Layout(exponent_bits=5, mantissa_bits=2, storage_bits=8)
    FP8_E3M4 = _Layout(exponent_bits=3, mantissa_bits=4, storage_bits=8)
    INT8 = _Layout(exponent_bits=8, mantissa_bits=7, storage_bits=8, scaled=True)
    # Weight-only: constants are stored as codes, and ops compute in fp32 on decoded numbers.
    INT8_WEIGHTS = _Layout(
        exponent_bits=8, mantissa_bits=7, storage_bits=8, scaled=True, constants_only=True
    )

    # Members are compared by identity; Enum hashes the name, which takes ten times as long.
    __hash__ = object.__hash__

    @property
    def label(self) -> str:
        """The name used in options, plans and reports: ``bf16``, ``fp8_e4m3``."""
        return self.name.lower()

    @property
    def exponent_bits(self) -> int:
        """Width of the exponent field."""
        return self.value.exponent_bits

    @property
    def mantissa_bits(self) -> int:
        """Width of the stored fraction, without the implicit leading bit."""
        return self.value.mantissa_bits

    @property
    def storage_bytes(self) -> int:
        """Bytes that one stored element takes (tf32 is stored as fp32)."""
        return self.value.storage_bits // 8

    @property
    def operands_only(self) -> bool:
        """Whether only operands are rounded to it: results of 8-bit and tf32 ops are wider."""
        return self.storage_bytes == 1 or self is Format.TF32

    @property
    def finite_only(self) -> bool:
        """Whether the format has no infinities (OCP "fn": only all-ones is NaN)."""
        return self.value.finite_only

    @property
    def scaled(self) -> bool:
        """Whether elements are integer codes that parameters map to numbers."""
        return self.value.scaled

    @property
    def constants_only(self) -> bool:
        """Whether an op in it only stores constants so, and reads values unrounded."""
        return self.value.constants_only

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

    @property
    def storage(self) -> Format:
        """The format in which results computed in this one are stored (tf32: fp32)."""
        return Format.FP32 if self is Format.TF32 else self

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The numpy (or ml_dtypes) type that stores this format."""
        return _DTYPES[self]

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
        if self.scaled:
            raise ValueError(
                f"{self.label} does not round without the parameters of an encoding"
            )

    @classmethod
    def parse(cls, name: str) -> Format:
        """Read a format's label, or what frameworks call it: ``bfloat16``, ``half``.

        Raises:
            UsageError: If ``name`` is none of them.
        """
        spelled = name.strip().lower()
        try:
            return _BY_LABEL.get(spelled) or _BY_ALIAS[spelled]
        except KeyError:
            known = ", ".join(_BY_LABEL)
            raise UsageError(f"unknown format {name!r}", fix=f"use one of {known}") from None


_DTYPES: dict[Format, np.dtype[np.generic]] = {
    Format.FP32: np.dtype(np.float32),
    Format.TF32: np.dtype(np.float32),
    Format.BF16: np.dtype(ml_dtypes.bfloat16),
    Format.FP16: np.dtype(np.float16),
    Format.FP8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    Format.FP8_E4M3_IEEE: np.dtype(ml_dtypes.float8_e4m3),
    Format.FP8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
    Format.FP8_E3M4: np.dtype(ml_dtypes.float8_e3m4),
    Format.INT8: np.dtype(np.int8),
    Format.INT8_WEIGHTS: np.dtype(np.int8),
}
FLOATS: Final = tuple(f for f in Format if not f.scaled)
"""Floating-point formats: each rounds a number by itself, without parameters."""
_BY_LABEL = {f.label: f for f in Format}
# What PyTorch, numpy, ONNX, RAF and tools that compress weights call them.
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
    "int8-weights": Format.INT8_WEIGHTS,
    "int8_weight_only": Format.INT8_WEIGHTS,
    "w8": Format.INT8_WEIGHTS,
}
