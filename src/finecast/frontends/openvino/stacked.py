"""Int8 products by a stack of matrices whose scales OpenVINO reads past: they are refused.

OpenVINO moves the scales of a product's channels into its kernel. Of a stack of matrices that
share them, the kernel seems to read as many scales as there are matrices and channels: its
numbers are arbitrary, and at times the process ends. Finecast's own plans give a stack one
scale (``rules/scaled_operands.py``); other tools write one for each channel.

The scales stay outside of the kernel, and all is right, where a zero point other than 0 is
subtracted on either side, and where each matrix has scales of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast.devices.faults import is_here

FAULT: Final = "openvino-stacked-scales"

_CODES: Final = frozenset({"i8", "u8"})
_SCALES: Final = frozenset({"Multiply", "Divide"})
_SHAPES: Final = ("Reshape", "Squeeze", "Unsqueeze")
_MOVES: Final = frozenset(
    {
        *_SHAPES,
        *("Transpose", "Concat", "Split", "VariadicSplit"),
        *("Slice", "StridedSlice", "Gather", "Pad", "Broadcast", "DepthToSpace"),
        *("SpaceToDepth", "BatchToSpace", "SpaceToBatch", "ShuffleChannels", "Interpolate"),
        *("MaxPool", "ReduceMax", "ReduceMin", "Relu", "Negative", "Convert", "Identity"),
    }
)
"""Ops behind which OpenVINO computes on codes that were quantized in front of them."""


def stacked_scales(ops: Iterable[Any]) -> str:
    """Which int8 product among a model's ops reads past its scales; empty for none.

    Where the fault is mended, none is named.
    """
    if not is_here(FAULT):
        return ""
    for op in ops:
        if op.get_type_name() == "MatMul" and _shares_scales(op) and _has_codes(op):
            return (
                f"the int8 product {op.get_friendly_name()!r} has a scale for each channel of"
                " a stack of matrices, and OpenVINO reads past these scales: numbers are"
                f" arbitrary, and the process may end, a known fault ({FAULT})"
            )
    return ""


def _shares_scales(product: Any) -> bool:
    """Whether the weights are a stack of matrices that share a scale for each channel."""
    weights = product.input_value(1)
    shape = weights.get_partial_shape()
    if shape.is_dynamic or math.prod([*shape.to_shape()][:-2]) <= 1:
        return False
    which = _scales(weights)
    if which is None:
        return False
    if product.get_attributes()["transpose_b"]:
        which = which.swapaxes(-1, -2)
    stack = which.reshape(-1, *which.shape[-2:])
    row = stack[0, 0]
    return row[0] != row[-1] and bool(np.array_equal(stack, np.broadcast_to(row, stack.shape)))


def _scales(port: Any) -> NDArray[np.int32] | None:
    """Which of its scales each of the weights is multiplied by, by number.

    None if the weights are no codes, or have a zero point, or are not scaled in front.
    """
    op = port.get_node()
    kind = op.get_type_name()
    if kind == "FakeQuantize":
        constant = _constant(op.input_value(0)) is not None
        return _numbered(op.input_value(4), port) if constant and _is_symmetric(op) else None
    if kind in _SCALES:
        return next(
            (
                _numbered(op.input_value(1 - index), port)
                for index in (0, 1)
                if _are_codes(op.input_value(index))
            ),
            None,
        )
    passed = kind in ("Convert", "Transpose", *_SHAPES)
    which = _scales(op.input_value(0)) if passed else None
    if which is None or kind == "Convert":
        return which
    order = _constant(op.input_value(1)) if kind == "Transpose" else None
    if kind in _SHAPES:
        return which.reshape(tuple(port.get_shape()))
    return None if order is None else which.transpose(*(order.tolist() or [None]))


def _numbered(scales: Any, of: Any) -> NDArray[np.int32]:
    """The number of the scale at each place of what is scaled."""
    shape = tuple(scales.get_shape())
    numbers = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    return np.broadcast_to(numbers, tuple(of.get_shape()))


def _are_codes(port: Any) -> bool:
    """Whether a port gives constant codes as floats, whose zero point is 0."""
    op = port.get_node()
    if op.get_type_name() == "Subtract" and _is_zero(op.input_value(1)):
        op = op.input_value(0).get_node()
    while op.get_type_name() in ("Convert", "Transpose", *_SHAPES):
        op = op.input_value(0).get_node()
    return (
        op.get_type_name() == "Constant"
        and op.get_output_element_type(0).get_type_name() in _CODES
    )


def _has_codes(product: Any) -> bool:
    """Whether the other operand comes as codes whose zero point is 0."""
    waiting, seen = [product.input_value(0).get_node()], set[str]()
    while waiting:
        op = waiting.pop()
        kind = op.get_type_name()
        if op.get_friendly_name() in seen or kind == "Constant":
            continue
        seen.add(op.get_friendly_name())
        if kind == "FakeQuantize":
            if _is_symmetric(op):
                return True
        elif (
            kind == "Convert" and op.get_input_element_type(0).get_type_name() in _CODES
        ):  # QuantizeLinear and DequantizeLinear
            return True
        elif kind in _MOVES:
            waiting += [source.get_node() for source in op.input_values()]
        elif kind in _SCALES or (kind == "Subtract" and _is_zero(op.input_value(1))):
            waiting.append(op.input_value(0).get_node())
    return False


def _is_symmetric(quantize: Any) -> bool:
    """Whether the zero point of a FakeQuantize is 0: its range starts there, or is even."""
    low, high = (_constant(quantize.input_value(index)) for index in (3, 4))
    if low is None or high is None:
        return True
    step = (high - low) / max(quantize.get_attributes()["levels"] - 1, 1)
    return bool(np.all((low == 0) | (np.abs(low + high) < 1.5 * np.abs(step))))


def _is_zero(port: Any) -> bool:
    """Whether a port gives constant zeros."""
    numbers = _constant(port)
    return numbers is not None and not np.any(numbers)


def _constant(port: Any) -> NDArray[Any] | None:
    """The numbers of a constant, whatever its shape becomes; None for other values."""
    op = port.get_node()
    while op.get_type_name() == "Convert" or op.get_type_name() in _SHAPES:
        op = op.input_value(0).get_node()
    return op.data if op.get_type_name() == "Constant" else None
