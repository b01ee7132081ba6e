"""Constants that an engine folds into one another, folded before they are rounded.

When an engine loads a model, it folds a batch norm's four vectors into one scale and shift,
and these into the weights of the convolution before it. From low constants it would get
products of rounded numbers, and round them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.frontends.onnx.constants import (
    DATA_TYPES,
    ConvertedTensor,
    constant_reader,
    constant_tensor,
    unrounded,
)
from finecast.frontends.onnx.editor import Editor, drop_unread
from finecast.frontends.onnx.redefined import trains
from finecast.numbers.formats import Format

Array = NDArray[Any]
_EPSILON: Final = 1e-5  # ONNX's default for a batch norm
_LOW: Final = {DATA_TYPES[fmt]: fmt for fmt in (Format.BF16, Format.FP16)}
_ROLES: Final = {
    "Conv": ("", "weights", "bias"),
    "BatchNormalization": ("", "scale", "shift", "mean", "variance"),
}


def combine_norm(editor: Editor, node: ir.Node) -> Sequence[ir.Node]:
    """Combine the constants of a low batch norm, and of the convolution before it.

    Nothing changes if the norm trains, so that its mean and variance are not its constants,
    or if the combined numbers do not fit the format.

    Returns:
        The nodes whose constants changed.
    """
    fmt = _LOW.get(node.outputs[0].dtype or ir.DataType.UNDEFINED)
    vectors = [v for v in map(_numbers, node.inputs[1:]) if v is not None]
    if fmt is None or node.domain or trains(node) or len(vectors) != 4:
        return ()
    scale, shift, mean, variance = vectors
    with np.errstate(all="ignore"):
        factor = scale / np.sqrt(variance + node.attributes.get_float("epsilon", _EPSILON))
        offset = shift - mean * factor
    if not _fits(fmt, factor, offset):
        return ()
    changed: list[ir.Node] = []
    product = _product_before(node)
    if product is not None:
        changed.append(product)
        moved = _into_product(editor, product, factor, offset, fmt)
        if moved is not None:
            factor, offset = np.ones_like(factor), moved
    parts = (factor, offset, np.zeros_like(offset), np.ones_like(factor))
    for index, array in enumerate(parts, 1):
        _give(editor, node, index, array, fmt)
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.0)
    return (*changed, node)


def _product_before(node: ir.Node) -> ir.Node | None:
    """The convolution of constant weights, in the norm's type, whose result only it reads."""
    value = node.inputs[0]
    before = value.producer() if value is not None else None
    if before is None or value is None or before.op_type != "Conv":
        return None
    if before.domain or len(value.uses()) != 1 or value.is_graph_output():
        return None
    constant = all(_numbers(v) is not None for v in before.inputs[1:] if v is not None)
    same = before.outputs[0].dtype == node.outputs[0].dtype
    return before if constant and same else None


def _into_product(
    editor: Editor, product: ir.Node, factor: Array, offset: Array, fmt: Format
) -> Array | None:
    """Move the norm's ``factor`` into the weights of ``product``, and its bias to the norm.

    Returns the norm's new offset; None if nothing moves, as the numbers do not fit ``fmt``.
    """
    weights = _numbers(product.inputs[1])
    assert weights is not None
    scaled = weights * factor.reshape(-1, *[1] * (weights.ndim - 1))
    bias = _numbers(product.inputs[2]) if len(product.inputs) > 2 else None
    shift = offset if bias is None else offset + bias * factor
    if not _fits(fmt, scaled, shift):
        return None
    _give(editor, product, 1, scaled, fmt)
    if bias is not None:
        _give(editor, product, 2, np.zeros_like(bias), fmt)
    return shift


def _fits(fmt: Format, *arrays: Array) -> bool:
    """Whether all numbers are finite and within the range of ``fmt``."""
    return all(bool((np.abs(a) <= fmt.max).all()) for a in arrays)


def _numbers(value: ir.Value | None) -> Array | None:
    """A constant's numbers before it was converted, in fp64; None if it is not constant."""
    tensor = constant_tensor(value) if value is not None else None
    if value is None or tensor is None or value.is_graph_input():
        return None
    return constant_reader(unrounded(tensor))().astype(np.float64)


def _give(editor: Editor, node: ir.Node, index: int, array: Array, fmt: Format) -> None:
    """Let ``node`` read ``array`` as its input ``index``, stored in ``fmt``."""
    old = node.inputs[index]
    assert old is not None
    exact = ConvertedTensor(ir.tensor(array.astype(np.float32)), fmt)
    role = _ROLES[node.op_type][index]
    node.replace_input_with(index, editor.constant(f"{node.name}_{role}_{fmt.label}", exact))
    if old.is_initializer():
        drop_unread([old])
