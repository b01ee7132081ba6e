"""Products whose weights OpenVINO confuses: models with them are refused.

``x @ w @ w.T`` of a tied autoencoder has two. OpenVINO keeps the packed weights of an fp32
product by their address and sizes, and not by whether they are transposed: of two products by
one square constant, the second gets the weights of the first. OpenVINO's IR has equal
constants once, so that constants count as one if their numbers are equal.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any, Final

import numpy as np

from finecast.devices.faults import is_here

FAULT: Final = "openvino-tied-weights"


def confused_products(ops: Iterable[Any]) -> str:
    """Which products among a model's ops OpenVINO confuses; empty for none, or if mended."""
    if not is_here(FAULT):
        return ""
    weights = [(op, *read) for op in ops if (read := _square_weights(op))]
    for key in (_form, _numbers):  # numbers are read only of weights of the same form
        alike: dict[Hashable, list[tuple[Any, Any, bool]]] = defaultdict(list)
        for product, constant, transposed in weights:
            alike[key(constant)].append((product, constant, transposed))
        both = (group for group in alike.values() if len({t for *_, t in group}) > 1)
        weights = [reading for group in both for reading in group]
    if not weights:
        return ""
    names = [
        next(op.get_friendly_name() for op, _, turned in weights if turned is transposed)
        for transposed in (False, True)
    ]
    return (
        f"{names[0]!r} multiplies by square weights, {names[1]!r} by the same ones transposed,"
        f" and OpenVINO computes one of them with the weights of the other, a known fault"
        f" ({FAULT})"
    )


def _square_weights(product: Any) -> tuple[Any, bool] | None:
    """The square constant that an fp32 product multiplies by, and whether transposed."""
    transposed = _transposes(product)
    if transposed is None or product.get_output_element_type(0).get_type_name() != "f32":
        return None
    op = product.input_value(1).get_node()
    while op.get_type_name() in ("Convert", "Transpose"):
        transposed ^= op.get_type_name() == "Transpose"
        op = op.input_value(0).get_node()
    shape = list(op.get_shape()) if op.get_type_name() == "Constant" else []
    square = len(shape) > 1 and shape[-1] == shape[-2] > 1 and {*shape[:-2]} <= {1}
    return (op, transposed) if square else None


def _transposes(product: Any) -> bool | None:
    """Whether a product itself transposes its weights; None for other ops."""
    if product.get_type_name() == "MatMul":
        return bool(product.get_attributes()["transpose_b"])
    if product.get_type_name() == "Einsum" and product.get_input_size() == 2:
        terms, _, result = product.get_attributes()["equation"].partition("->")
        weights = terms.partition(",")[2].strip()
        columns = [label for label in weights if label in result]
        return weights[0] == columns[0] if len(weights) == 2 and len(columns) == 1 else None
    return None


def _form(constant: Any) -> Hashable:
    return constant.get_element_type().get_type_name(), constant.get_shape()[-1]


def _numbers(constant: Any) -> Hashable:
    return hashlib.blake2b(np.ascontiguousarray(constant.data).data).hexdigest()
