"""Rewrites ops of an ``ov.Model`` as equivalent ones that OpenVINO recognises, or gets right.

A norm that PyTorch writes with ``rsqrt``, as language models do, becomes x * (1 / sqrt(v)) in
OpenVINO's IR. Stated in bf16 that is not recognised as a norm, and x / sqrt(v) is: one kernel
in place of three. What IR holds otherwise OpenVINO's converter has restated already.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from finecast.devices.faults import is_here
from finecast.frontends.onnx.miscomputed import FAULT, transposed_in, with_second_turned
from finecast.frontends.openvino.bodies import every_op
from finecast.frontends.openvino.types import (
    FORMATS,
    label_of,
    new_constant,
    numbers_of,
    replace_op,
)
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


# ----------------------------------------------------- square weights that products read twice
#
# OpenVINO computes one of two such products with the weights of the other, as is said in
# ``frontends/onnx/miscomputed.py``. Products whose weights are transposed read a constant of
# their own here, too, which holds the transposed numbers. IR has equal constants once, so that
# constants count as one if their numbers are equal.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """A product that reads ``constant``, through ops that convert its type."""

    product: Any
    constant: Any
    transposed: bool
    converts: tuple[Any, ...]


def untie(model: openvino.Model) -> tuple[str, ...]:
    """Let products read transposed constants where others read the same weights as they are.

    Changes ``model`` in place. Returns the names of the products; none if
    the installed OpenVINO computes them rightly.
    """
    if not is_here(FAULT):
        return ()
    names: list[str] = []
    for several in _by_numbers(filter(None, map(_reading, every_op(model)))):
        own: Any = None
        for reading in (r for r in several if r.transposed):
            constant = reading.constant
            if own is None:
                numbers = np.ascontiguousarray(np.swapaxes(numbers_of(constant), -1, -2))
                own = new_constant(numbers, FORMATS[label_of(constant.get_element_type())])
                own.set_friendly_name(f"{constant.get_friendly_name()}_transposed")
            _read(reading, own)
            names.append(reading.product.get_friendly_name())
    if names:
        model.validate_nodes_and_infer_types()
    return tuple(names)


def _by_numbers(readings: Iterator[_Reading]) -> Iterator[list[_Reading]]:
    """The readings of each constant that some products transpose and others do not."""
    alike: dict[object, list[_Reading]] = defaultdict(list)
    for reading in readings:
        constant = reading.constant
        alike[constant.get_element_type().get_type_name(), constant.get_shape()[-1]].append(
            reading
        )
    for some in alike.values():
        if len({r.transposed for r in some}) > 1:  # only then the numbers are read
            same: dict[str, list[_Reading]] = defaultdict(list)
            for reading in some:
                found = hashlib.blake2b(np.ascontiguousarray(reading.constant.data).data)
                same[found.hexdigest()].append(reading)
            yield from (s for s in same.values() if len({r.transposed for r in s}) > 1)


def _reading(product: Any) -> _Reading | None:
    """How a product reads square weights; None for other ops."""
    transposed = _transposes(product)
    if transposed is None:
        return None
    op, converts = product.input_value(1).get_node(), list[Any]()
    while op.get_type_name() in ("Convert", "Transpose"):
        if op.get_type_name() == "Convert":
            converts.insert(0, op)
        else:
            order = op.input_value(1).get_node()
            if order.get_type_name() != "Constant":
                return None
            rank = len(order.data)
            if [*order.data] not in ([], [*range(rank - 2), rank - 1, rank - 2]):
                return None
            transposed ^= True
        op = op.input_value(0).get_node()
    if op.get_type_name() != "Constant" or label_of(op.get_element_type()) not in FORMATS:
        return None
    shape = list(op.get_shape())
    if len(shape) < 2 or shape[-1] != shape[-2] or shape[-1] < 2 or {*shape[:-2]} - {1}:
        return None
    return _Reading(
        product=product, constant=op, transposed=transposed, converts=tuple(converts)
    )


def _transposes(product: Any) -> bool | None:
    """Whether a product itself transposes its weights; None for other ops."""
    if product.get_type_name() == "MatMul":
        return bool(product.get_attributes()["transpose_b"])
    if product.get_type_name() == "Einsum" and product.get_input_size() == 2:
        return transposed_in(product.get_attributes()["equation"])
    return None


def _read(reading: _Reading, constant: Any) -> None:
    """Let a product read ``constant``, and not transpose it."""
    from openvino import opset13

    product, port = reading.product, constant.output(0)
    for convert in reading.converts:
        kind = convert.get_element_type().get_type_name()
        port = opset13.convert(port, kind).output(0)
    product.input(1).replace_source_output(port)
    if product.get_type_name() == "MatMul":
        product.set_attribute("transpose_b", False)
    else:
        equation = with_second_turned(product.get_attributes()["equation"])
        product.set_attribute("equation", equation)
    product.validate_and_infer_types()
