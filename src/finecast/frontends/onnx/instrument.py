"""Copies of a model that output its values, or that round them where a switch is on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.frontends.onnx.constants import constant_tensor, constant_value
from finecast.frontends.onnx.names import FreshNames
from finecast.frontends.onnx.placing import place_after
from finecast.frontends.onnx.reader import OnnxBinding, read
from finecast.frontends.onnx.statements import Maker, rounding
from finecast.frontends.onnx.ties import Port
from finecast.graph import Graph
from finecast.numbers.encodings import Encoding
from finecast.planning.points import SWITCH, Switch


def observable(graph: Graph, binding: OnnxBinding) -> dict[str, int]:
    """Ids, by name, of the float values that can be outputs: those outside of bodies."""
    names: dict[str, int] = {}
    for value in graph.values:
        native = binding.values[value.id]
        producer = native.producer()
        if value.format is None or value.constant is not None or producer is None:
            continue
        if producer.graph is binding.model.graph and native.name:
            names[native.name] = value.id
    return names


def with_outputs(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """A copy of ``model`` whose outputs are just the values called ``names``."""
    copy = model.clone()
    by_name = {v.name: v for node in copy.graph for v in node.outputs}
    copy.graph.outputs.clear()
    copy.graph.outputs.extend(by_name[name] for name in names)
    return copy


def with_switches(model: ir.Model, switches: Sequence[Switch]) -> ir.Model:
    """A copy of ``model`` with roundings that an extra input switches on.

    The input ``finecast_switch`` is a bool vector: where element k is true, the operands and
    outputs that ``switches[k]`` lists are rounded, each to its encoding and back to fp32. Law:
    with all elements false it computes what ``model`` computes.
    """
    copy = model.clone()
    graph, binding = read(copy)
    inserter = _Inserter(graph, binding, len(switches))
    for k, switch in enumerate(switches):
        for (node_id, index), encoding in switch.ports.items():
            inserter.round_port(node_id, index, encoding, k)
        for index, encoding in switch.outputs.items():
            inserter.round_output(index, encoding, k)
    inserter.finish()
    return copy


class _Inserter:
    def __init__(self, graph: Graph, binding: OnnxBinding, switches: int) -> None:
        self.graph = graph
        self.binding = binding
        self.main = binding.model.graph
        self.input = ir.Value(
            name=SWITCH, shape=ir.Shape([switches]), type=ir.TensorType(ir.DataType.BOOL)
        )
        fresh = FreshNames(binding.model)
        self.maker = Maker(fresh, self.main.register_initializer)
        self.prologue: list[ir.Node] = []
        self.scalars: dict[int, ir.Value] = {}
        self.at_ports: dict[tuple[int, Encoding, int], ir.Value] = {}

    def scalar(self, k: int) -> ir.Value:
        """Element ``k`` of the switch input."""
        if k not in self.scalars:
            index = constant_value(f"{SWITCH}_index_{k}", np.array(k, np.int64))
            self.main.register_initializer(index)
            out = ir.val(f"{SWITCH}_{k}", ir.DataType.BOOL)
            self.prologue.append(ir.node("Gather", [self.input, index], outputs=[out]))
            self.scalars[k] = out
        return self.scalars[k]

    def round_port(self, node_id: int, index: int, encoding: Encoding, k: int) -> None:
        """Round what the node reads at one input; a constant is rounded here, in advance."""
        value_id = self.graph.nodes[node_id].inputs[index]
        port = self.binding.ports[node_id][index]
        if value_id is not None and port is not None:
            _set_port(port, self._at_port(value_id, encoding, k))

    def round_output(self, index: int, encoding: Encoding, k: int) -> None:
        """Round the model's output, which keeps its name."""
        value = self.binding.values[self.graph.outputs[index].id]
        out = self._rounded(value, encoding, k)
        for number, end in enumerate(self.main.outputs):
            if end is value:
                self.main.outputs[number] = out
        if not value.is_graph_input():
            value.name, out.name = f"{value.name}_exact", value.name

    def _at_port(self, value_id: int, encoding: Encoding, k: int) -> ir.Value:
        key = (value_id, encoding, k)
        if key not in self.at_ports:
            constant = self.graph.values[value_id].constant is not None
            make = self._rounded_constant if constant else self._rounded
            self.at_ports[key] = make(self.binding.values[value_id], encoding, k)
        return self.at_ports[key]

    def _rounded(self, value: ir.Value, encoding: Encoding, k: int) -> ir.Value:
        """``value``, rounded if element ``k`` of the switch is true."""
        nodes = rounding(self.maker, value, encoding)
        out = ir.val(self.maker.fresh(f"{value.name}_rounded"), ir.DataType.FLOAT, value.shape)
        choice = [self.scalar(k), nodes[-1].outputs[0], value]
        nodes.append(ir.node("Where", choice, outputs=[out]))
        place_after(value, nodes, self.main, self.prologue)
        return out

    def _rounded_constant(self, value: ir.Value, encoding: Encoding, k: int) -> ir.Value:
        """The constant ``value``: rounded in advance if element ``k`` is true, else exact."""
        tensor = constant_tensor(value)
        assert tensor is not None
        array = tensor.numpy().astype(np.float32)
        rounded = self._constant(
            encoding.decode(encoding.encode(array)), f"{value.name}_rounded"
        )
        exact = value
        if value.producer() is not None or value.graph is not self.main:
            # Defined in a body or by a Constant node: the prologue can only read a copy.
            exact = self._constant(array, f"{value.name}_exact")
        out = ir.val(self.maker.fresh(f"{value.name}_switched"), ir.DataType.FLOAT)
        self.prologue.append(ir.node("Where", [self.scalar(k), rounded, exact], outputs=[out]))
        return out

    def _constant(self, array: NDArray[np.float32], name: str) -> ir.Value:
        value = constant_value(self.maker.fresh(name), array)
        self.main.register_initializer(value)
        return value

    def finish(self) -> None:
        """Add the switch input and the nodes that come first."""
        self.main.inputs.append(self.input)
        # Elements of the switch first: values rounded at the start of the graph read them.
        order = sorted(self.prologue, key=lambda n: n.op_type != "Gather")
        first = next(iter(self.main), None)
        if first is None:
            self.main.extend(order)
        else:
            first.prepend(order)


def _set_port(port: Port, value: ir.Value) -> None:
    if isinstance(port.owner, ir.Node):
        port.owner.replace_input_with(port.index, value)
    else:
        port.owner.outputs[port.index] = value
