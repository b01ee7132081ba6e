"""Writes bf16 Einsums as MatMuls, and takes that back: ONNX's Einsum has no bf16."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir

from finecast.errors import ModelError
from finecast.frontends.onnx.constants import MARK, constant_tensor
from finecast.frontends.onnx.names import FreshNames
from finecast.frontends.onnx.types import every_node
from finecast.ops.einsum import Move, Moves, Product, as_product

# Metadata of the MatMul: the Einsum's equation and operands, as JSON. Metadata of each node
# that moves its operands or result: the MatMul's name.
_EQUATION: Final = f"{MARK}.equation"
_BESIDE: Final = f"{MARK}.beside"


def write_products(model: ir.Model) -> tuple[str, ...]:
    """Write each bf16 Einsum as the equivalent MatMul; returns the names of these nodes.

    Raises:
        ModelError: If one is no matrix product. The rule ``einsum`` keeps such Einsums fp32.
    """
    found: list[str] = []
    for node in list(every_node(model.graph)):
        low = node.outputs and node.outputs[0].dtype == ir.DataType.BFLOAT16
        if node.op_type == "Einsum" and not node.domain and low:
            _write(model, node)
            found.append(node.name or "")
    return tuple(found)


def _write(model: ir.Model, node: ir.Node) -> None:
    first, other, product = _product(node)
    was = {"equation": node.attributes["equation"].as_string()}
    was |= {"first": first.name or "", "other": other.name or ""}
    node.metadata_props[_EQUATION] = json.dumps(was)
    writer = _Writer(model, node)
    left, right = (other, first) if product.swapped else (first, other)
    operands = [writer.moved(left, product.left), writer.moved(right, product.right)]
    node.prepend(writer.take())
    node.op_type = "MatMul"
    node.attributes.clear()
    for index, value in enumerate(operands):
        node.replace_input_with(index, value)
    if product.after:
        writer.move_result(product.after)


def _product(node: ir.Node) -> tuple[ir.Value, ir.Value, Product]:
    """The two operands of the Einsum, and the matrix product that it is of them."""
    equation = node.attributes["equation"].as_string()
    operands = [v for v in node.inputs if v is not None]
    known = [constant_tensor(v) for v in operands]
    lengths = [t.shape.numpy() for t in known if t is not None]
    try:
        product = as_product(
            equation,
            constant=[t is not None for t in known],
            lengths=lengths[0] if len(lengths) == 1 else None,
        )
    except ValueError as error:
        raise ModelError(
            f"Einsum {equation!r} in bf16 cannot be written: {error}",
            where=f"node {node.name!r}",
            fix="keep it in fp32",
        ) from error
    first, other = operands
    return first, other, product


class _Writer:
    """Makes the nodes that move the operands and the result of the product ``node``."""

    def __init__(self, model: ir.Model, node: ir.Node) -> None:
        self.node = node
        self.fresh = FreshNames(model)
        self.made: list[ir.Node] = []

    def take(self) -> list[ir.Node]:
        """The nodes made since the last call."""
        made, self.made = self.made, []
        return made

    def moved(self, value: ir.Value, moves: Moves) -> ir.Value:
        """``value`` after ``moves``."""
        for move, argument in moves:
            if move is Move.TRANSPOSE:
                value = self._op(move.value, [value], value.dtype, perm=list(argument))
            else:
                array = ir.tensor(np.array(argument, np.int64))
                where = self._op("Constant", [], ir.DataType.INT64, value=array)
                value = self._op(move.value, [value, where], value.dtype)
        return value

    def move_result(self, moves: Moves) -> None:
        """Let readers of the product read its result after ``moves``, under the same name."""
        raw = self.node.outputs[0]
        readers = list(raw.uses())
        result = self.moved(raw, moves)
        result.shape, raw.shape = raw.shape, None
        self.node.append(self.take())
        _replace(raw, result, readers)
        name = raw.name
        raw.name, result.name = self.fresh(f"{name}_product"), name

    def _op(
        self,
        kind: str,
        inputs: Sequence[ir.Value],
        dtype: ir.DataType | None,
        **attributes: list[int] | ir.TensorProtocol,
    ) -> ir.Value:
        assert dtype is not None
        name = self.fresh(f"{self.node.name}_{kind}")
        out = ir.Value(name=self.fresh(f"{name}_output"), type=ir.TensorType(dtype))
        made = ir.node(kind, list(inputs), attributes, outputs=[out], name=name)
        made.metadata_props[_BESIDE] = self.node.name or ""
        self.made.append(made)
        return out


def _replace(old: ir.Value, new: ir.Value, readers: Iterable[tuple[ir.Node, int]]) -> None:
    """Let ``readers`` read ``new``, and its graph give ``new`` where ``old`` is an output."""
    for user, index in readers:
        user.replace_input_with(index, new)
    graph = old.graph
    if isinstance(graph, ir.Graph):
        for index, end in enumerate(graph.outputs):
            if end is old:
                graph.outputs[index] = new


def take_back_products(graph: ir.Graph, defined: Mapping[str | None, ir.Value]) -> None:
    """Turn MatMuls that were Einsums into these again.

    ``defined`` has the values that ``graph`` can read, by name. A MatMul stays if another tool
    removed the Einsum's operands, or reads between the nodes that move its result.
    """
    beside: dict[str, list[ir.Node]] = {}
    for node in graph:
        if (name := node.metadata_props.get(_BESIDE)) is not None:
            beside.setdefault(name, []).append(node)
    for node in list(graph):
        text = node.metadata_props.pop(_EQUATION, None)
        if text is None:
            continue
        was = json.loads(text)
        operands = [defined.get(was["first"]), defined.get(was["other"])]
        moves = beside.get(node.name or "", [])
        raw, end = node.outputs[0], _end(node, moves)
        if None in operands or end is None:
            continue
        node.op_type = "Einsum"
        node.attributes["equation"] = ir.AttrString("equation", was["equation"])
        for index, value in enumerate(operands):
            node.replace_input_with(index, value)
        if end is not raw:
            _replace(end, raw, list(end.uses()))
            raw.name, end.name = end.name, raw.name
            raw.shape = end.shape
        graph.remove(moves, safe=True)


def _end(node: ir.Node, moves: Sequence[ir.Node]) -> ir.Value | None:
    """The product's result after all ``moves``; None if others read one of the steps."""
    end = node.outputs[0]
    while True:
        readers = [u.node for u in end.uses()]
        moving = [n for n in readers if n in moves]
        if not moving:
            return end
        if len(readers) > 1 or end.is_graph_output():
            return None
        end = moving[0].outputs[0]
