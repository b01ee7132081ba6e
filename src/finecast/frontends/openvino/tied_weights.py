"""Square weights that products read both as they are and transposed, in an ``ov.Model``.

OpenVINO computes one of two such products with the weights of the other, as is said in
``frontends/onnx/tied_weights.py``. Products whose weights are transposed read a constant of
their own here, too, which holds the transposed numbers. IR has equal constants once, so that
constants count as one if their numbers are equal.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from finecast.devices.faults import is_here
from finecast.frontends.onnx.tied_weights import FAULT, transposed_in, with_second_turned
from finecast.frontends.openvino.bodies import every_op
from finecast.frontends.openvino.changes import Changes, changes_of, keep
from finecast.frontends.openvino.types import FORMATS, label_of, new_constant, numbers_of

if TYPE_CHECKING:
    import openvino


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """A product that reads ``constant``, through ops that convert its type."""

    product: Any
    constant: Any
    transposed: bool
    converts: tuple[Any, ...]


def untie(model: openvino.Model) -> tuple[str, ...]:
    """Let products read transposed constants where others read the same weights as they are.

    Changes ``model`` in place and notes it there. Returns the names of the products; none if
    the installed OpenVINO computes them rightly.
    """
    if not is_here(FAULT):
        return ()
    names: list[str] = []
    changes = changes_of(model) or Changes()
    for several in _by_numbers(filter(None, map(_reading, every_op(model)))):
        own: Any = None
        for reading in (r for r in several if r.transposed):
            constant = reading.constant
            if own is None:
                numbers = np.ascontiguousarray(np.swapaxes(numbers_of(constant), -1, -2))
                own = new_constant(numbers, FORMATS[label_of(constant.get_element_type())])
                own.set_friendly_name(f"{constant.get_friendly_name()}_transposed")
            name = reading.product.get_friendly_name()
            changes.faults[name] = FAULT
            _read(reading, own, transposing=False)
            names.append(name)
    if names:
        keep(model, changes)
        model.validate_nodes_and_infer_types()
    return tuple(names)


def tie_again(model: openvino.Model, product: Any) -> None:
    """Let a product of ``untie`` read the weights of another one again.

    It stays as it is if none has the same numbers in the other order any more.
    """
    own = _reading(product)
    for other in filter(None, map(_reading, every_op(model))):
        if own is not None and _are_turned(own.constant, other.constant):
            _read(own, other.constant, transposing=True)
            return


def _are_turned(one: Any, other: Any) -> bool:
    kinds = [op.get_element_type().get_type_name() for op in (one, other)]
    same = kinds[0] == kinds[1] and one.get_shape() == other.get_shape()
    numbers = (numbers_of(one), numbers_of(other))
    return same and np.array_equal(np.swapaxes(numbers[0], -1, -2), numbers[1])


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


def _read(reading: _Reading, constant: Any, *, transposing: bool) -> None:
    """Let a product read ``constant``, which it transposes or not."""
    from openvino import opset13

    product, port = reading.product, constant.output(0)
    for convert in reading.converts:
        kind = convert.get_element_type().get_type_name()
        port = opset13.convert(port, kind).output(0)
    product.input(1).replace_source_output(port)
    if product.get_type_name() == "MatMul":
        product.set_attribute("transpose_b", transposing)
    else:
        equation = with_second_turned(product.get_attributes()["equation"])
        product.set_attribute("equation", equation)
    product.validate_and_infer_types()
