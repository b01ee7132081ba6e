"""Square weights that products read both as they are and transposed, which OpenVINO confuses.

``x @ w @ w.T`` of a tied autoencoder is one. OpenVINO keeps the packed weights of a product by
their address and sizes, and not by whether they are transposed: the product that comes second
gets the weights of the first one. Products whose weights are transposed therefore read a
constant of their own, which holds the transposed numbers. A copy of the same numbers would do
in ONNX, but not in OpenVINO's IR, in which equal constants are one.

Law: the model computes the same numbers; ops that stay keep their names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir

from finecast.devices.faults import is_here, is_mended
from finecast.frontends.onnx.constants import constant_tensor
from finecast.frontends.onnx.editor import FAULT_NOTE, Editor, drop_unread

FAULT: Final = "openvino-tied-weights"
_LOOKED_THROUGH: Final = frozenset({"Cast", "Identity", "Transpose"})
_WEIGHTS: Final = 1
"""The operand of products that is their weights."""


def confused_weights(names: Sequence[str]) -> str:
    """What the user is told of the products ``names``; empty if there are none."""
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"OpenVINO computes {names[0]!r}{more} with the weights of another product, which"
        " reads the same ones untransposed: the model is taken with transposed weights of its"
        " own"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """A product ``node`` that reads constant ``weights`` through casts to types ``to``."""

    node: ir.Node
    weights: ir.Value
    transposed: bool
    to: tuple[int, ...]


def untied(model: ir.Model) -> tuple[ir.Model, tuple[str, ...]]:
    """A model whose products read transposed constants where others read them as they are.

    Returns the model itself, or a copy, and the names of the products that were changed: none
    if the installed OpenVINO computes them rightly.
    """
    if not is_here(FAULT) or not _confused(model):
        return model, ()
    copy = model.clone()
    editor = Editor(copy)
    names: list[str] = []
    for weights, turned in _confused(copy).items():
        tensor = constant_tensor(weights)
        assert tensor is not None
        numbers = np.ascontiguousarray(np.swapaxes(tensor.numpy(), -1, -2))
        own = editor.constant(f"{weights.name}_transposed", numbers)
        own.shape, own.type = ir.Shape(numbers.shape), weights.type
        for reading in turned:
            reading.node.metadata_props[FAULT_NOTE] = FAULT
            _read(editor, reading, own, transposing=False)
            names.append(reading.node.name or reading.node.op_type)
    return copy, tuple(names)


def _confused(model: ir.Model) -> dict[ir.Value, list[_Reading]]:
    """The weights that are read in both ways, with those products that transpose them."""
    readings: dict[ir.Value, list[_Reading]] = defaultdict(list)
    for node in model.graph.all_nodes():
        if (found := _reading(node)) is not None:
            readings[found.weights].append(found)
    turned = {w: [r for r in several if r.transposed] for w, several in readings.items()}
    return {w: found for w, found in turned.items() if 0 < len(found) < len(readings[w])}


def tie_again(model: ir.Model) -> None:
    """Take back what ``untied`` did in an earlier conversion, if OpenVINO is right by now.

    A product reads the weights of another one again if they have the same numbers still.
    """
    noted = [n for n in model.graph.all_nodes() if n.metadata_props.get(FAULT_NOTE) == FAULT]
    if not noted or not is_mended(FAULT):
        return
    editor = Editor(model)
    readings = [r for n in model.graph.all_nodes() if (r := _reading(n)) is not None]
    for node in noted:
        del node.metadata_props[FAULT_NOTE]
        own = next((r for r in readings if r.node is node), None)
        other = (
            None if own is None else next((r for r in readings if _are_turned(own, r)), None)
        )
        if own is not None and other is not None:
            _read(editor, own, other.weights, transposing=True)


def _are_turned(own: _Reading, other: _Reading) -> bool:
    """Whether the weights of ``other`` are those of ``own`` in the other order."""
    one, two = constant_tensor(own.weights), constant_tensor(other.weights)
    if one is None or two is None or own.weights is other.weights or one.dtype != two.dtype:
        return False
    same = one.shape == two.shape and own.to == other.to
    return same and np.array_equal(np.swapaxes(two.numpy(), -1, -2), one.numpy())


def _reading(node: ir.Node) -> _Reading | None:
    """How a product reads square weights; None for other nodes."""
    value = node.inputs[_WEIGHTS] if len(node.inputs) > _WEIGHTS else None
    transposed = None if value is None or node.domain else _transposes(node)
    if value is None or transposed is None:
        return None
    orders, to = list[list[int]](), list[int]()
    for step in _steps(value):
        if step.op_type == "Transpose":
            orders.append(list(step.attributes.get_ints("perm", ())) or [1, 0])
        elif step.op_type == "Cast":
            to.insert(0, step.attributes.get_int("to", ir.DataType.FLOAT))
        assert step.inputs[0] is not None
        value = step.inputs[0]
    tensor = constant_tensor(value)
    shape = () if tensor is None else tensor.shape.numpy()
    square = len(shape) > 1 and shape[-1] == shape[-2] > 1 and set(shape[:-2]) <= {1}
    if not square or tensor is None or not tensor.dtype.is_floating_point():
        return None
    if any(order != _last_two_swapped(len(shape)) for order in orders):
        return None
    turned = transposed ^ (len(orders) % 2 == 1)
    return _Reading(node=node, weights=value, transposed=turned, to=tuple(to))


def _last_two_swapped(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


def _transposes(node: ir.Node) -> bool | None:
    """Whether a product itself transposes its weights; None for other nodes."""
    if node.op_type == "MatMul":
        return False
    if node.op_type == "Gemm":
        return bool(node.attributes.get_int("transB", 0))
    if node.op_type == "Einsum" and len(node.inputs) == 2:
        return transposed_in(node.attributes.get_string("equation", ""))
    return None


def transposed_in(equation: str) -> bool | None:
    """Whether an Einsum of two operands is a product by the second one, transposed.

    None if the second one is no matrix of which one axis is summed over.
    """
    terms, _, result = equation.replace(" ", "").partition("->")
    weights = terms.partition(",")[2]
    columns = [label for label in weights if label in result]
    return weights[0] == columns[0] if len(weights) == 2 and len(columns) == 1 else None


def with_second_turned(equation: str) -> str:
    """The equation of an Einsum of two operands whose second one is given transposed."""
    first, comma, rest = equation.replace(" ", "").partition(",")
    labels, arrow, result = rest.partition("->")
    return f"{first}{comma}{labels[::-1]}{arrow}{result}"


def _steps(value: ir.Value) -> Iterator[ir.Node]:
    """The nodes that ``value`` comes through from a constant, the last one first."""
    node = value.producer()
    while node is not None and node.op_type in _LOOKED_THROUGH and not node.domain:
        yield node
        source = node.inputs[0]
        node = None if source is None else source.producer()


def _read(editor: Editor, reading: _Reading, weights: ir.Value, *, transposing: bool) -> None:
    """Let a product read ``weights``, which it transposes or not, by an op if need be."""
    node, read, last = reading.node, weights, reading.node.inputs[_WEIGHTS]
    assert last is not None
    before = [last, *(v for step in _steps(last) if (v := step.inputs[0]) is not None)]
    for to in reading.to:
        name = editor.fresh(f"{read.name}_cast")
        read = editor.op("Cast", [read], {"to": to}, name=name, dtype=ir.DataType(to))
    if node.op_type == "MatMul" and transposing:
        order = {"perm": _last_two_swapped(len(weights.shape or ()))}
        name = editor.fresh(f"{read.name}_transposed")
        read = editor.op("Transpose", [read], order, name=name, dtype=read.dtype)
    node.prepend(editor.take())
    node.replace_input_with(_WEIGHTS, read)
    if node.op_type == "Gemm":
        node.attributes["transB"] = ir.AttrInt64("transB", int(transposing))
    elif node.op_type == "Einsum":
        turned = with_second_turned(node.attributes.get_string("equation", ""))
        node.attributes["equation"] = ir.AttrString("equation", turned)
    drop_unread(before)
