"""Rounding by arithmetic in fp32, for copies of a model that emulate low formats.

A cast to a low type and back means the same, but some engines remove both where they have no
kernels of that type, and some formats are no type of the library. Law: ``rounded`` gives what
a cast to the format and back gives, to nearest even (T. J. Dekker, "A floating-point technique
for extending the available precision", 1971: the high part of a product by 2 ** n + 1).
Numbers below fp32's smallest normal number may be taken for 0, as engines' kernels do.

``op`` makes the ops of a library's model: OpenVINO's opset module, or an object with functions
of the same names. ``port`` is the tensor that they read.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from finecast.numbers.encodings import Scaled
from finecast.numbers.formats import Format
from finecast.numbers.rounding import overflow_limit
from finecast.numbers.roundmodes import Rounder

_FP32_BITS: Final = np.finfo(np.float32).nmant
# The product of a number above this by 2 ** n + 1 could overflow: such numbers are first
# multiplied by _DOWN, which is exact.
_LARGE: Final = 2.0**64
_DOWN: Final = 2.0**-32


def rounded(op: Any, port: Any, fmt: Format) -> Any:
    """The numbers of ``port`` rounded to ``fmt``, in fp32."""
    magnitude = op.abs(port)
    if fmt.exponent_bits == Format.FP32.exponent_bits:
        large = op.greater(magnitude, _number(op, _LARGE))
        scaled = op.multiply(port, op.select(large, _number(op, _DOWN), _number(op, 1.0)))
        high = _high_part(op, scaled, fmt)
        back = op.multiply(high, op.select(large, _number(op, 1 / _DOWN), _number(op, 1.0)))
        # Inf and NaN have no high part.
        return op.select(op.is_finite(port), back, port)
    bounded = op.clamp(port, -2 * fmt.max, 2 * fmt.max)
    step = fmt.smallest_subnormal
    fixed = op.multiply(
        op.round(op.multiply(bounded, _number(op, 1 / step)), "half_to_even"),
        _number(op, step),
    )
    small = op.less(magnitude, _number(op, fmt.smallest_normal))
    near = op.select(small, fixed, _high_part(op, bounded, fmt))
    # From half a unit in the last place above the largest number on, numbers overflow; that
    # tie itself does so where the largest number's last bit is odd (to even).
    limit = _number(op, (fmt.max + overflow_limit(fmt)) / 2)
    compare = op.less_equal if fmt.finite_only else op.less
    inside = compare(magnitude, limit)
    beyond = op.multiply(op.sign(port), _number(op, math.nan if fmt.finite_only else math.inf))
    found = op.select(inside, near, beyond)
    return op.select(op.is_nan(port), port, found)  # kernels of clamp may not pass NaN on


def converted(op: Any, port: Any, how: Rounder) -> Any:
    """``port`` as a device converts it, to nearest even.

    Overflows saturate, and subnormals become 0, where ``how`` says so.
    """
    if how.encoding is not None:
        return coded(op, port, how.encoding)
    fmt = how.format
    if how.saturate:
        port = op.clamp(port, -fmt.max, fmt.max)
    found = port if fmt is Format.FP32 else rounded(op, port, fmt)
    if not how.flush_subnormals:
        return found
    tiny = op.less(op.abs(found), _number(op, fmt.smallest_normal))
    return op.select(tiny, op.multiply(found, _number(op, 0.0)), found)


def coded(op: Any, port: Any, encoding: Scaled) -> Any:
    """``port`` rounded to the numbers that codes of ``encoding`` stand for.

    ``encoding`` has one scale for the whole tensor. Engines replace the division by a constant
    with a product by its reciprocal, so a number halfway between two codes may become either.
    """
    if encoding.axis is not None:
        raise ValueError("an encoding by channel: only constants have one")
    scale, zero = _number(op, encoding.scale[0]), float(encoding.zero_point)
    steps = op.round(op.divide(port, scale), "half_to_even")
    ends = encoding.grid.lowest - zero, encoding.grid.highest - zero
    numbers = op.multiply(op.clamp(steps, *ends), scale)
    return op.select(op.is_nan(port), _number(op, 0.0), numbers)


def without_infinities(op: Any, port: Any, top: float | None) -> Any:
    """``port`` with each Inf replaced by ``top`` of its sign.

    If ``top`` is None, by what a product with an identity matrix gives: NaN in every element
    of the last axis that has an Inf.
    """
    if top is not None:
        return op.select(op.is_inf(port), op.clamp(port, -top, top), port)
    zeros = op.multiply(port, _number(op, 0.0))
    total = op.reduce_sum(zeros, op.constant(np.array([-1])), keep_dims=True)
    return op.add(port, total)


def _high_part(op: Any, port: Any, fmt: Format) -> Any:
    """Each number rounded to as many mantissa bits as ``fmt`` has, to nearest even."""
    dropped = _FP32_BITS - fmt.mantissa_bits
    product = op.multiply(port, _number(op, 2.0**dropped + 1.0))
    return op.subtract(product, op.subtract(product, port))


def _number(op: Any, value: float) -> Any:
    return op.constant(np.float32(value))
