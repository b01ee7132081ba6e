"""Rewrites ops of an ``ov.Model`` as equivalent ones that OpenVINO recognises.

A norm that PyTorch writes with ``rsqrt``, as language models do, becomes x * (1 / sqrt(v)) in
OpenVINO's IR. Stated in bf16 that is not recognised as a norm, and x / sqrt(v) is: one kernel
in place of three. What IR holds otherwise OpenVINO's converter has restated already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from finecast.frontends.openvino.bodies import every_op
from finecast.frontends.openvino.types import numbers_of, replace_op
from finecast.frontends.replaying import Restated

if TYPE_CHECKING:
    import openvino


REASON: Final = "a norm is recognised by its quotient, not by the product with an inverse"
_LOW: Final = "bf16"


def restate(model: openvino.Model) -> tuple[Restated, ...]:
    """Rewrite x * (1 / sqrt(v)) as x / sqrt(v), in place.

    Law: in exact arithmetic the outputs are the same; ops that stay keep their names.
    """
    names: list[str] = []
    for op in list(every_op(model)):
        names += [_divide(product, op) for product in _products_with(op)]
    if not names:
        return ()
    model.validate_nodes_and_infer_types()
    return (Restated(nodes=tuple(names), reason=REASON),)


def _products_with(op: Any) -> list[Any]:
    """The bf16 products with ``op``, if it is the inverse of a root that they alone read."""
    if op.get_type_name() != "Divide" or not _is_low(op) or not _is_one(op.input_value(0)):
        return []
    root = op.input_value(1)
    same_shape = op.get_output_partial_shape(0) == root.get_partial_shape()
    if root.get_node().get_type_name() != "Sqrt" or not same_shape:
        return []
    readers = [target.get_node() for target in op.output(0).get_target_inputs()]
    return readers if all(_is_product(reader, op) for reader in readers) else []


def _is_product(reader: Any, inverse: Any) -> bool:
    name = inverse.get_friendly_name()
    sources = [v.get_node().get_friendly_name() for v in reader.input_values()]
    return (
        reader.get_type_name() == "Multiply" and _is_low(reader) and sources.count(name) == 1
    )


def _is_low(op: Any) -> bool:
    return op.get_output_element_type(0).get_type_name() == _LOW


def _is_one(port: Any) -> bool:
    """Whether a port gives a constant of one number, which is 1."""
    constant = port.get_node()
    if constant.get_type_name() != "Constant" or numbers_of(constant).size != 1:
        return False
    return float(numbers_of(constant).astype(np.float32).reshape(-1)[0]) == 1.0


def _divide(product: Any, inverse: Any) -> str:
    """Replace a product with ``inverse`` by a quotient of its name; returns the name."""
    from openvino import opset13

    name: str = product.get_friendly_name()
    operands = [value.get_node().get_friendly_name() for value in product.input_values()]
    x = product.input_value(1 - operands.index(inverse.get_friendly_name()))
    replace_op(product, opset13.divide(x, inverse.input_value(1)))
    return name
