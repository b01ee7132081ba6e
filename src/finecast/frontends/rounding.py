"""Rounding by arithmetic in fp32, for copies of a model that emulate low formats.

A cast to a low type and back means the same, but some engines remove both where they have no
kernels of that type, and some formats are no type of the library. Law: ``rounded`` gives what
a cast to the format and back gives, to nearest even (T. J. Dekker, "A floating-point technique
for extending the available precision", 1971: the high part of a product by 2 ** n + 1).
Numbers below fp32's smallest normal number may be taken for 0, as engines' kernels do.

``op`` makes an op of a library's model, such as ``NativeModel.op``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np

from finecast.numbers.encodings import Dynamic, Scaled
from finecast.numbers.formats import Format
from finecast.numbers.rounding import overflow_limit
from finecast.numbers.roundmodes import Rounder

Op: TypeAlias = Callable[..., Any]

_FP32_BITS: Final = np.finfo(np.float32).nmant
# The product of a number above this by 2 ** n + 1 could overflow: such numbers are first
# multiplied by _DOWN, which is exact.
_LARGE: Final = 2.0**64
_DOWN: Final = 2.0**-32


def rounded(op: Op, x: Any, fmt: Format) -> Any:
    """The numbers of the tensor ``x`` rounded to ``fmt``, in fp32."""
    magnitude = op("abs", x)
    if fmt.exponent_bits == Format.FP32.exponent_bits:
        large = op("greater", magnitude, _LARGE)
        scaled = op("multiply", x, op("select", large, _DOWN, 1.0))
        high = _high_part(op, scaled, fmt)
        back = op("multiply", high, op("select", large, 1 / _DOWN, 1.0))
        # Inf and NaN have no high part.
        return op("select", op("is_finite", x), back, x)
    bounded = op("clamp", x, min_value=-2 * fmt.max, max_value=2 * fmt.max)
    step = fmt.smallest_subnormal
    steps = op("round", op("multiply", bounded, 1 / step), mode="half_to_even")
    small = op("less", magnitude, fmt.smallest_normal)
    near = op("select", small, op("multiply", steps, step), _high_part(op, bounded, fmt))
    # From half a unit in the last place above the largest number on, numbers overflow; that
    # tie itself does so where the largest number's last bit is odd (to even).
    limit = (fmt.max + overflow_limit(fmt)) / 2
    inside = op("less_equal" if fmt.finite_only else "less", magnitude, limit)
    beyond = op("multiply", op("sign", x), math.nan if fmt.finite_only else math.inf)
    found = op("select", inside, near, beyond)
    return op("select", op("is_nan", x), x, found)  # kernels of clamp may not pass NaN on


def converted(op: Op, x: Any, how: Rounder) -> Any:
    """The tensor ``x`` as a device converts it, to nearest even.

    Overflows saturate, and subnormals become 0, where ``how`` says so.
    """
    if isinstance(how.encoding, Dynamic):
        return dynamic(op, x, how.encoding)
    if how.encoding is not None:
        return coded(op, x, how.encoding)
    fmt = how.format
    if how.saturate:
        x = op("clamp", x, min_value=-fmt.max, max_value=fmt.max)
    found = x if fmt is Format.FP32 else rounded(op, x, fmt)
    if not how.flush_subnormals:
        return found
    tiny = op("less", op("abs", found), fmt.smallest_normal)
    return op("select", tiny, op("multiply", found, 0.0), found)


def coded(op: Op, x: Any, encoding: Scaled) -> Any:
    """The tensor ``x`` rounded to the numbers that codes of ``encoding`` stand for.

    ``encoding`` has one scale for the whole tensor. Engines replace the division by a constant
    with a product by its reciprocal, so a number halfway between two codes may become either.
    """
    if encoding.axis is not None:
        raise ValueError("an encoding by channel: only constants have one")
    scale, zero = encoding.scale[0], float(encoding.zero_point)
    steps = op("round", op("divide", x, scale), mode="half_to_even")
    low, high = encoding.grid.lowest - zero, encoding.grid.highest - zero
    numbers = op("multiply", op("clamp", steps, min_value=low, max_value=high), scale)
    return op("select", op("is_nan", x), 0.0, numbers)


def dynamic(op: Op, x: Any, encoding: Dynamic) -> Any:
    """The tensor ``x`` as a kernel rounds it by scales that it finds for groups of numbers."""
    rows = op("reshape", x, [-1, encoding.group], special_zero=False)
    ends = op("reduce_max", op("abs", rows), [1], keep_dims=True)
    scales = op("divide", op("maximum", ends, float(encoding.least)), float(encoding.largest))
    steps = op("round", op("divide", rows, scales), mode="half_to_even")
    return op("reshape", op("multiply", steps, scales), op("shape_of", x), special_zero=False)


def _high_part(op: Op, x: Any, fmt: Format) -> Any:
    """Each number rounded to as many mantissa bits as ``fmt`` has, to nearest even."""
    dropped = _FP32_BITS - fmt.mantissa_bits
    product = op("multiply", x, 2.0**dropped + 1.0)
    return op("subtract", product, op("subtract", product, x))
