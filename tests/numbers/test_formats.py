"""Every fact of a format equals ml_dtypes', where it has the type."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from finecast.errors import UsageError
from finecast.numbers.formats import FLOATS, Format

STORED = [f for f in FLOATS if f is not Format.TF32]


@pytest.mark.parametrize("fmt", STORED, ids=lambda f: f.label)
def test_facts_equal_ml_dtypes(fmt: Format) -> None:
    info = ml_dtypes.finfo(fmt.dtype)
    assert fmt.max == float(info.max)
    assert fmt.smallest_normal == float(info.smallest_normal)
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert fmt.epsilon == float(info.eps)
    assert fmt.mantissa_bits == info.nmant
    assert fmt.exponent_bits == info.nexp
    assert fmt.bits == info.bits


@pytest.mark.parametrize("fmt", STORED, ids=lambda f: f.label)
def test_finite_only_means_that_infinity_has_no_code(fmt: Format) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        infinity = np.array([np.inf], dtype=np.float32).astype(fmt.dtype)
    assert bool(np.isinf(infinity.astype(np.float32))[0]) is not fmt.finite_only


def test_tf32_has_the_range_of_fp32_and_the_fraction_of_fp16() -> None:
    tf32 = Format.TF32
    assert tf32.exponent_bits == Format.FP32.exponent_bits
    assert tf32.smallest_normal == Format.FP32.smallest_normal
    assert tf32.epsilon == Format.FP16.epsilon == 2.0**-10
    # The largest: all fraction bits set in the top binade, its low 13 bits cut from fp32's.
    assert tf32.max == float(np.uint32(0x7F7FE000).view(np.float32))
    assert tf32.smallest_subnormal == float(np.uint32(1 << 13).view(np.float32))
    assert tf32.storage is Format.FP32
    assert tf32.bits == Format.FP32.bits
    assert tf32.dtype == np.dtype(np.float32)


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.label)
def test_derived_facts(fmt: Format) -> None:
    assert fmt.unit_roundoff == fmt.epsilon / 2
    assert Format.parse(fmt.label) is fmt
    assert Format.parse(f" {fmt.label.upper()} ") is fmt
    if fmt is not Format.TF32:
        assert fmt.storage is fmt
        assert 1 + fmt.exponent_bits + fmt.mantissa_bits == fmt.bits


def test_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'int3'.*int8"):
        Format.parse("int3")
