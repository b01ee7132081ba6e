"""Rounding by arithmetic in fp32, for models that show what rounding does.

A conversion to a low type and back says the same, but where the device has no kernels in that
type OpenVINO takes both out. Law: what ``rounded`` gives is what a cast to the format and back
gives, to nearest even (T. J. Dekker, "A floating-point technique for extending the available
precision", 1971: the high part of a product by 2 ** n + 1). Numbers below fp32's smallest
normal one may be taken for 0, as OpenVINO's kernels do.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from finecast.numbers.formats import Format
from finecast.numbers.rounding import overflow_limit
from finecast.numbers.roundmodes import Rounder

if TYPE_CHECKING:
    import openvino

_FP32_BITS: Final = np.finfo(np.float32).nmant
# Above, the product by 2 ** n + 1 could overflow: numbers are scaled down first, exactly.
_LARGE: Final = 2.0**64
_DOWN: Final = 2.0**-32


def rounded(port: openvino.Output, fmt: Format) -> openvino.Output:
    """Numbers of ``fmt``, in fp32, nearest to those of ``port``."""
    from openvino import opset13 as op

    magnitude = op.abs(port)
    if fmt.exponent_bits == Format.FP32.exponent_bits:
        large = op.greater(magnitude, _number(_LARGE))
        scaled = op.multiply(port, op.select(large, _number(_DOWN), _number(1.0)))
        high = _high_part(scaled, fmt)
        back = op.multiply(high, op.select(large, _number(1 / _DOWN), _number(1.0)))
        # Inf and NaN have no high part.
        return op.select(op.is_finite(port), back, port).output(0)
    bounded = op.clamp(port, -2 * fmt.max, 2 * fmt.max)
    step = fmt.smallest_subnormal
    fixed = op.multiply(
        op.round(op.multiply(bounded, _number(1 / step)), "half_to_even"), _number(step)
    )
    small = op.less(magnitude, _number(fmt.smallest_normal))
    near = op.select(small, fixed, _high_part(bounded, fmt))
    # Half a unit in the last place beyond the largest number is a tie: to even.
    limit = _number((fmt.max + overflow_limit(fmt)) / 2)
    compare = op.less_equal if fmt.finite_only else op.less
    inside = compare(magnitude, limit)
    beyond = op.multiply(op.sign(port), _number(math.nan if fmt.finite_only else math.inf))
    found = op.select(inside, near, beyond)
    return op.select(op.is_nan(port), port, found).output(0)  # a clamp takes NaN for a number


def converted(port: openvino.Output, how: Rounder) -> openvino.Output:
    """``port`` as a device converts it, to nearest even: saturated and flushed if so asked."""
    from openvino import opset13 as op

    fmt = how.format
    if how.saturate:
        port = op.clamp(port, -fmt.max, fmt.max).output(0)
    found = port if fmt is Format.FP32 else rounded(port, fmt)
    if not how.flush_subnormals:
        return found
    tiny = op.less(op.abs(found), _number(fmt.smallest_normal))
    return op.select(tiny, op.multiply(found, _number(0.0)), found).output(0)


def without_infinities(port: openvino.Output, top: float | None) -> openvino.Output:
    """Inf as ``top`` of its sign; None for what a product by the identity makes of it: NaN."""
    from openvino import opset13 as op

    if top is not None:
        return op.select(op.is_inf(port), op.clamp(port, -top, top), port).output(0)
    zeros = op.multiply(port, _number(0.0))
    total = op.reduce_sum(zeros, op.constant(np.array([-1])), keep_dims=True)
    return op.add(port, total).output(0)


def _high_part(port: Any, fmt: Format) -> Any:
    """The first bits of each number, as many as ``fmt`` has, to nearest even."""
    from openvino import opset13 as op

    dropped = _FP32_BITS - fmt.mantissa_bits
    product = op.multiply(port, _number(2.0**dropped + 1.0))
    return op.subtract(product, op.subtract(product, port))


def _number(value: float) -> openvino.Node:
    from openvino import opset13 as op

    return op.constant(np.float32(value))
