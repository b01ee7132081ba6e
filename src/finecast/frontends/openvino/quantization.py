"""How an ``ov.Model`` states encodings with scales.

A value goes through a FakeQuantize, which gives the numbers that its codes stand for. A
constant is stored as codes, which ops after it decode. OpenVINO turns these forms, which NNCF
writes too, into kernels on integers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from finecast.frontends.openvino.types import label_of, numbers_of
from finecast.numbers.encodings import Scaled, packed, unpacked

if TYPE_CHECKING:
    import openvino


def fake_quantized(port: openvino.Output, encoding: Scaled) -> openvino.Node:
    """A FakeQuantize: each number of ``port`` becomes the one that its code stands for."""
    from openvino import opset13

    grid = encoding.grid
    low, high = (opset13.constant(np.float32(end.item())) for end in encoding.range)
    levels = grid.highest - grid.lowest + 1
    return opset13.fake_quantize(port, low, high, low, high, levels)


def stored_codes(array: NDArray[np.generic], encoding: Scaled) -> dict[str, openvino.Node]:
    """The ops that store ``array`` as codes and decode them, by suffixes for their names.

    ``_back`` is the last one: a Multiply, or with groups a Reshape behind it. OpenVINO
    recognises this form as compressed weights, which its kernels read as codes. A zero point
    is subtracted from each code; that of 0 is left out.
    """
    from openvino import opset13

    codes = _constant(encoding.encode(array).reshape(encoding.split(array.shape)))
    scales = encoding.spread(array.shape)
    scale = opset13.constant(scales)
    wide = steps = opset13.convert(codes, "f32")
    stored: dict[str, openvino.Node] = {"": codes, "_scale": scale, "_wide": wide}
    if encoding.zero_point:
        zero = _constant(np.full(scales.shape, encoding.zero_point, encoding.dtype))
        zeros = opset13.convert(zero, "f32")
        steps = opset13.subtract(wide, zeros)
        stored |= {"_zero": zero, "_zero_wide": zeros, "_steps": steps}
    decoded = opset13.multiply(steps, scale)
    if encoding.group is None:
        return stored | {"_back": decoded}
    shape = opset13.constant(np.array(array.shape, np.int64))
    whole = opset13.reshape(decoded, shape, special_zero=False)
    return stored | {"_decoded": decoded, "_shape": shape, "_back": whole}


def _constant(codes: NDArray[np.generic]) -> openvino.Node:
    """A constant of codes, which is copied; numpy has no type for 4 bits, ml_dtypes has."""
    import openvino
    from openvino import opset13

    if codes.dtype != ml_dtypes.int4:
        return opset13.constant(codes)
    tensor = openvino.Tensor(openvino.Type.i4, openvino.Shape(codes.shape))
    tensor.data.reshape(-1).view(np.uint8)[...] = packed(codes, 4)
    return openvino.op.Constant(tensor)


def decoded_numbers(op: Any) -> NDArray[np.float32] | None:
    """The numbers that ``op`` decodes if it is the last of ``stored_codes``; else None."""
    if op.get_type_name() == "Reshape":
        shape = tuple(op.get_output_shape(0))
        inner = decoded_numbers(op.input_value(0).get_node())
        return None if inner is None else inner.reshape(shape)
    if op.get_type_name() != "Multiply":
        return None
    steps, scale = (value.get_node() for value in op.input_values())
    if scale.get_type_name() != "Constant":
        return None
    if steps.get_type_name() == "Subtract":
        parts = [_widened(value.get_node()) for value in steps.input_values()]
        numbers = None if parts[0] is None or parts[1] is None else parts[0] - parts[1]
    else:
        numbers = _widened(steps)
    return None if numbers is None else numbers * numbers_of(scale).astype(np.float32)


def _widened(op: Any) -> NDArray[np.float32] | None:
    """The numbers of constant codes that a Convert gives in fp32; None of another op."""
    codes = op.input_value(0).get_node() if op.get_type_name() == "Convert" else None
    if codes is None or codes.get_type_name() != "Constant":
        return None
    return _read(codes).astype(np.float32)


def _read(codes: Any) -> NDArray[np.generic]:
    if label_of(codes.get_element_type()) != "int4":
        return numbers_of(codes)
    shape = tuple(codes.get_output_shape(0))
    return unpacked(codes.data, math.prod(shape)).reshape(shape)
