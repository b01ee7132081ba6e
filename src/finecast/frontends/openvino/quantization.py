"""How an ``ov.Model`` states encodings with scales.

A value goes through a FakeQuantize, which gives the numbers that its codes stand for. A
constant is stored as codes, which ops after it decode. OpenVINO turns these forms, which NNCF
writes too, into kernels on integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finecast.frontends.openvino.types import numbers_of
from finecast.numbers.scaled import Scaled

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

    ``_back`` is the last one. OpenVINO recognises this form as compressed weights, which
    its kernels read as codes. The zero point must be 0.
    """
    from openvino import opset13

    if encoding.zero_point:
        raise ValueError("codes of constants are symmetric around 0")
    codes = opset13.constant(encoding.encode(array))
    scale = opset13.constant(encoding.spread(array.shape))
    wide = opset13.convert(codes, "f32")
    return {"": codes, "_scale": scale, "_wide": wide, "_back": opset13.multiply(wide, scale)}


def decoded_numbers(op: Any) -> NDArray[np.float32] | None:
    """The numbers that ``op`` decodes if it is the last of ``stored_codes``; else None."""
    if op.get_type_name() != "Multiply":
        return None
    wide, scale = (value.get_node() for value in op.input_values())
    codes = wide.input_value(0).get_node() if wide.get_type_name() == "Convert" else None
    if codes is None or {codes.get_type_name(), scale.get_type_name()} != {"Constant"}:
        return None
    return numbers_of(codes).astype(np.float32) * numbers_of(scale).astype(np.float32)
