"""Constants that an engine folds into one another, folded before they are rounded.

When an engine loads a model, it folds a batch norm's four vectors into one scale and shift,
and these into the weights of the convolution before it. From low constants it would get
products of rounded numbers, and round them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.frontends.onnx.constants import (
    DATA_TYPES,
    ConvertedTensor,
    constant_reader,
    constant_tensor,
)
from finecast.frontends.onnx.redefined import trains
from finecast.frontends.onnx.types import every_node
from finecast.numbers.formats import Format

Array = NDArray[Any]
_EPSILON: Final = 1e-5  # ONNX's default for a batch norm
_LOW: Final = {DATA_TYPES[fmt]: fmt for fmt in (Format.BF16, Format.FP16)}


def combine_norms(model: ir.Model) -> tuple[str, ...]:
    """Combine the constants of low batch norms, and of convolutions before them.

    Returns:
        The names of the nodes whose constants changed.
    """
    found: list[str] = []
    for node in list(every_node(model.graph)):
        norm = _norm(node)
        if norm is None:
            continue
        product = _product_before(node)
        if product is not None:
            _into_product(model, norm, product)
            found.append(product.name or "")
        norm.write(model)
        found.append(node.name or "")
    return tuple(found)


@dataclass(slots=True, kw_only=True)
class _Norm:
    """A low batch norm: x * ``scale`` + ``shift``, in fp64."""

    node: ir.Node
    fmt: Format
    scale: Array
    shift: Array

    def write(self, model: ir.Model) -> None:
        """Give the norm its ``scale`` and ``shift``, with a mean of 0 and a variance of 1."""
        parts = (self.scale, self.shift, np.zeros_like(self.shift), np.ones_like(self.scale))
        for index, array in enumerate(parts, 1):
            _give(model, self.node, index, array, self.fmt)
        self.node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.0)


def _norm(node: ir.Node) -> _Norm | None:
    """The node as a low batch norm of constants; None if it is none.

    Also None if it trains, so that its mean and variance are not those constants, or if the
    combined numbers do not fit the format.
    """
    if node.op_type != "BatchNormalization" or node.domain or trains(node):
        return None
    fmt = _LOW.get(node.outputs[0].dtype or ir.DataType.UNDEFINED)
    vectors = [_numbers(v) for v in node.inputs[1:]]
    if fmt is None:
        return None
    known = [v for v in vectors if v is not None]
    if len(known) != 4:
        return None
    scale, shift, mean, variance = known
    stated = node.attributes.get("epsilon")
    deviation = np.sqrt(variance + (_EPSILON if stated is None else stated.as_float()))
    with np.errstate(all="ignore"):
        factor = scale / deviation
        offset = shift - mean * factor
    if not _fits(fmt, factor, offset):
        return None
    return _Norm(node=node, fmt=fmt, scale=factor, shift=offset)


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


def _into_product(model: ir.Model, norm: _Norm, product: ir.Node) -> None:
    """Move the norm's scale into the weights of ``product``, and its bias into the shift."""
    weights = _numbers(product.inputs[1])
    assert weights is not None
    scaled = weights * norm.scale.reshape(-1, *[1] * (weights.ndim - 1))
    bias = _numbers(product.inputs[2]) if len(product.inputs) > 2 else None
    shift = norm.shift if bias is None else norm.shift + bias * norm.scale
    if not _fits(norm.fmt, scaled, shift):
        return
    _give(model, product, 1, scaled, norm.fmt)
    if bias is not None:
        _give(model, product, 2, np.zeros_like(bias), norm.fmt)
    norm.shift, norm.scale = shift, np.ones_like(norm.scale)


def _fits(fmt: Format, *arrays: Array) -> bool:
    """Whether all numbers are finite and within the range of ``fmt``."""
    return all(bool((np.abs(a) <= fmt.max).all()) for a in arrays)


def _numbers(value: ir.Value | None) -> Array | None:
    """A constant's numbers before it was converted, in fp64; None if it is not constant."""
    tensor = constant_tensor(value) if value is not None else None
    if value is None or tensor is None or value.is_graph_input():
        return None
    source = tensor.source if isinstance(tensor, ConvertedTensor) else tensor
    return constant_reader(source)().astype(np.float64)


def _give(model: ir.Model, node: ir.Node, index: int, array: Array, fmt: Format) -> None:
    """Let ``node`` read ``array`` as its input ``index``, stored in ``fmt``.

    The constant that it read is removed if nothing else reads it.
    """
    old = node.inputs[index]
    assert old is not None
    name = f"{node.name}_{_ROLES[node.op_type][index]}_{fmt.label}"
    while name in model.graph.initializers:
        name += "_"
    exact = ir.tensor(array.astype(np.float32), name=name)
    new = ir.val(name, const_value=ConvertedTensor(exact, fmt, name))
    model.graph.register_initializer(new)
    node.replace_input_with(index, new)
    home = old.graph
    if old.is_initializer() and not old.uses() and home is not None:
        home.initializers.pop(old.name or "")


_ROLES: Final = {
    "Conv": ("", "weights", "bias"),
    "BatchNormalization": ("", "scale", "shift", "mean", "variance"),
}
