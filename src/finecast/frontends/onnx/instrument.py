"""Copies of a model that show its values, or that round them at the turn of a switch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir

from finecast.frontends.onnx.reader import (
    DATA_TYPES,
    OnnxBinding,
    constant_tensor,
    read,
)
from finecast.frontends.onnx.roundops import RoundOps
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.numbers.rounding import convert_constant
from finecast.numbers.roundmodes import Rounder

SWITCH: Final = "finecast_switch"


def observable(model: ir.Model, graph: Graph) -> dict[str, int]:
    """Names and ids of the float values that can be shown: those outside of bodies."""
    _, binding = read(model)
    main = model.graph
    names: dict[str, int] = {}
    for value in graph.values:
        native = binding.values[value.id]
        producer = native.producer()
        if value.format is None or value.constant is not None or producer is None:
            continue
        if producer.graph is main and native.name:
            names[native.name] = value.id
    return names


def with_outputs(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """A copy of ``model`` whose outputs are just the values called ``names``."""
    copy = model.clone()
    by_name = {v.name: v for node in copy.graph for v in node.outputs}
    copy.graph.outputs.clear()
    copy.graph.outputs.extend(by_name[name] for name in names)
    return copy


def with_switches(
    model: ir.Model,
    values: Sequence[Iterable[int]],
    weights: Sequence[Mapping[int, Sequence[int]]],
    fmt: Format,
) -> ir.Model:
    """A copy of ``model`` that rounds to ``fmt`` what its extra input switches on.

    The input ``finecast_switch`` is a bool vector: element k < len(values) rounds the values
    ``values[k]`` wherever they are read; element len(values) + j rounds the constants that
    the nodes ``weights[j]`` (node id to input indices) read.
    """
    copy = model.clone()
    graph, binding = read(copy)
    inserter = _Inserter(graph, binding, fmt, len(values) + len(weights))
    for k, ids in enumerate(values):
        for value_id in ids:
            inserter.round_value(value_id, k)
    for j, ports in enumerate(weights):
        for node_id, indices in ports.items():
            for index in indices:
                inserter.round_weight(node_id, index, len(values) + j)
    inserter.finish()
    return copy


class _Inserter:
    def __init__(self, graph: Graph, binding: OnnxBinding, fmt: Format, switches: int) -> None:
        self.graph = graph
        self.binding = binding
        self.fmt = fmt
        self.main = binding.model.graph
        self.input = ir.Value(
            name=SWITCH, shape=ir.Shape([switches]), type=ir.TensorType(ir.DataType.BOOL)
        )
        self.ops = RoundOps(register=self.main.register_initializer)
        self.prologue: list[ir.Node] = []
        self.scalars: dict[int, ir.Value] = {}
        self.rounded: dict[tuple[int, int], ir.Value] = {}

    def scalar(self, k: int) -> ir.Value:
        """Element ``k`` of the switch input."""
        if k not in self.scalars:
            index = ir.Value(name=f"{SWITCH}_index_{k}", const_value=None)
            index.const_value = ir.tensor(np.int64(k), name=index.name)
            index.type, index.shape = ir.TensorType(ir.DataType.INT64), ir.Shape(())
            self.main.register_initializer(index)
            out = _value(f"{SWITCH}_{k}", ir.DataType.BOOL)
            self.prologue.append(ir.node("Gather", [self.input, index], outputs=[out]))
            self.scalars[k] = out
        return self.scalars[k]

    def round_value(self, value_id: int, k: int) -> None:
        value = self.binding.values[value_id]
        uses = list(value.uses())
        name = f"{value.name}_rounded"
        out = _value(name, ir.DataType.FLOAT)
        out.shape = value.shape
        nodes, rounded = self._rounding(value, name)
        nodes.append(ir.node("Where", [self.scalar(k), rounded, value], outputs=[out]))
        home, producer = value.graph, value.producer()
        if producer is not None:
            producer.append(nodes)
        elif home is self.main or home is None:
            self.prologue += nodes
        else:
            first = next(iter(home))
            first.prepend(nodes)
        for node, index in uses:
            node.replace_input_with(index, out)
        for graph in (self.main, *self.main.subgraphs()):
            for index, end in enumerate(graph.outputs):
                if end is value:
                    graph.outputs[index] = out
                    if graph is self.main and not value.is_graph_input():
                        value.name, out.name = f"{value.name}_exact", value.name

    def _rounding(self, value: ir.Value, name: str) -> tuple[list[ir.Node], ir.Value]:
        if self.fmt.storage is Format.FP32:  # ONNX has no type to cast to
            return self.ops.round(value, Rounder(format=self.fmt), name)
        low = ir.node("Cast", [value], {"to": int(DATA_TYPES[self.fmt])})
        back = ir.node("Cast", [low.outputs[0]], {"to": int(ir.DataType.FLOAT)})
        for number, node in enumerate((low, back)):
            node.outputs[0].name = f"{name}_{number}"
        return [low, back], back.outputs[0]

    def round_weight(self, node_id: int, index: int, k: int) -> None:
        node = self.binding.nodes[node_id]
        value_id = self.graph.nodes[node_id].inputs[index]
        if node is None or value_id is None:
            return
        key = (value_id, k)
        if key not in self.rounded:
            self.rounded[key] = self._choice(self.binding.values[value_id], k)
        node.replace_input_with(index, self.rounded[key])

    def _choice(self, value: ir.Value, k: int) -> ir.Value:
        tensor = constant_tensor(value)
        assert tensor is not None
        exact, rounded = value, ir.Value(name=f"{value.name}_rounded_{k}")
        array = tensor.numpy().astype(np.float32)
        low = convert_constant(array, self.fmt).astype(np.float32)
        rounded.const_value = ir.tensor(low, name=rounded.name)
        rounded.type, rounded.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(low.shape)
        self.main.register_initializer(rounded)
        if value.producer() is not None or value.graph is not self.main:
            # Defined in a body or by a Constant node: a copy that the prologue can read.
            exact = ir.Value(name=f"{value.name}_exact_{k}")
            exact.const_value = ir.tensor(array, name=exact.name)
            exact.type, exact.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(low.shape)
            self.main.register_initializer(exact)
        out = _value(f"{value.name}_switched_{k}", ir.DataType.FLOAT)
        self.prologue.append(ir.node("Where", [self.scalar(k), rounded, exact], outputs=[out]))
        return out

    def finish(self) -> None:
        self.main.inputs.append(self.input)
        # Elements of the switch first: values rounded at the start of the graph read them.
        order = sorted(self.prologue, key=lambda n: n.op_type != "Gather")
        first = next(iter(self.main), None)
        if first is None:
            self.main.extend(order)
        else:
            first.prepend(order)


def _value(name: str, dtype: ir.DataType) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype))
