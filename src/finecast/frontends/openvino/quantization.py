"""How an ``ov.Model`` states that numbers are codes of an encoding with parameters.

A value is rounded to the numbers that its codes stand for, by a FakeQuantize; a constant rests
as codes. These are the forms that OpenVINO makes kernels on integers of, and that NNCF writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from finecast.numbers.scaled import Scaled

if TYPE_CHECKING:
    import openvino


def rounded(port: openvino.Output, encoding: Scaled) -> openvino.Node:
    """A FakeQuantize: ``port``, each number the one that its code stands for."""
    from openvino import opset13

    grid = encoding.grid
    low, high = (opset13.constant(np.float32(end.item())) for end in encoding.range)
    levels = grid.highest - grid.lowest + 1
    return opset13.fake_quantize(port, low, high, low, high, levels)


def decoded(array: NDArray[np.generic], encoding: Scaled) -> tuple[openvino.Node, ...]:
    """Codes, scales, and the ops that give the numbers they stand for, in order.

    The zero point is 0. It is the form in which OpenVINO knows compressed weights: kernels
    that read them as they are widen them on the way.
    """
    from openvino import opset13

    if encoding.zero_point:
        raise ValueError("codes of constants are symmetric around 0")
    codes = opset13.constant(encoding.encode(array))
    scale = opset13.constant(encoding.spread(array.shape))
    wide = opset13.convert(codes, "f32")
    return codes, scale, wide, opset13.multiply(wide, scale)
