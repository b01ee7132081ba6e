"""Copies of a model that show its values, or that round them at the turn of a switch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from finecast.frontends.openvino.reader import OvBinding, read
from finecast.frontends.openvino.rounding import rounded
from finecast.frontends.openvino.types import new_constant, numbers_of, take_names
from finecast.graph import Graph
from finecast.numbers.encodings import Encoding
from finecast.numbers.formats import Format
from finecast.planning.edits import (
    ConvertConstant,
    Edit,
    InsertCast,
    RoundTrip,
    SetFormat,
    SetPort,
    Use,
)
from finecast.planning.switches import SWITCH, Switch

if TYPE_CHECKING:
    import openvino


def observable(graph: Graph) -> dict[str, int]:
    """Names and ids of the float values that can be shown: those that an op computes.

    The names are of ops and ports: tensors may have none, or several.
    """
    found: dict[str, int] = {}
    for value in graph.values:
        if value.format is not None and value.constant is None and value.producer is not None:
            maker = graph.nodes[value.producer]
            found[f"{maker.name}:{maker.outputs.index(value.id)}"] = value.id
    return found


def with_outputs(model: openvino.Model, names: Sequence[str]) -> openvino.Model:
    """A copy of ``model`` whose outputs are just the values called ``names``.

    Names are those of ``observable``.
    """
    from openvino import opset13

    copy = model.clone()
    graph, binding = read(copy)
    ids = observable(graph)
    for result in copy.get_results():
        copy.remove_result(result)
    ports = [binding.values[ids[name]] for name in names]
    for port in binding.values:
        if port.get_node().get_type_name() != "Parameter":
            port.set_names(set())  # a name that is given below may be another tensor's
    results: list[Any] = []
    for name, port in zip(names, ports, strict=True):
        port.set_names({name})
        results.append(opset13.result(port, name=name))
    copy.add_results(results)
    copy.validate_nodes_and_infer_types()
    return copy


def with_switches(model: openvino.Model, switches: Sequence[Switch]) -> openvino.Model:
    """A copy of ``model`` that rounds what its extra input switches on.

    The input ``finecast_switch`` is a bool vector: element k rounds what ``switches[k]`` has,
    each to its format and back to fp32. Law: with all of them off it is ``model``.
    """
    from openvino import Type, opset13

    copy = model.clone()
    graph, binding = read(copy)
    given = opset13.parameter([len(switches)], Type.boolean, name=SWITCH)
    given.output(0).set_names({SWITCH})
    inserter = _Inserter(graph, binding, given)
    for k, switch in enumerate(switches):
        for (node_id, index), encoding in switch.ports.items():
            inserter.round_port(node_id, index, encoding, k)
        for index, encoding in switch.outputs.items():
            inserter.round_output(copy.get_results()[index], encoding, k)
    copy.add_parameters([given])
    copy.validate_nodes_and_infer_types()
    return copy


def with_roundings(model: openvino.Model, edits: Iterable[Edit]) -> openvino.Model:
    """A copy in fp32 whose values are those that ``edits`` would give, up to sums' order.

    What an op computes low is rounded where it is stored, and so is what is cast for it.
    """
    copy = model.clone()
    graph, binding = read(copy)
    for edit in edits:
        match edit:
            case SetFormat():
                for value in graph.following_outputs(graph.nodes[edit.node]):
                    _round(binding, value.id, edit.to, None)
            case SetPort() if graph.values[edit.value].is_input:
                _round(binding, edit.value, edit.to, None)
            case InsertCast() | ConvertConstant() | RoundTrip():
                _round(binding, edit.value, edit.to, edit.uses)
            case _:
                pass
    copy.validate_nodes_and_infer_types()
    return copy


def _round(
    binding: OvBinding, value_id: int, to: Encoding, uses: Sequence[Use] | None
) -> None:
    """Round a value for ``uses``, by default for all that read it, the outputs among them."""
    if to is Format.FP32:
        return
    port = binding.values[value_id]
    readers = list(port.get_target_inputs())
    if uses is not None:
        inside = (u for u in uses if u.node is not None)
        readers = [binding.nodes[u.node].input(u.index) for u in inside if u.node is not None]
    out = (
        rounded(port, to)
        if isinstance(to, Format)
        else _rounded_numbers(binding.constants[value_id], to).output(0)
    )
    for reader in readers:
        reader.replace_source_output(out)
    if uses is None and port.get_node().get_type_name() != "Parameter":
        take_names(port, out)
        binding.values[value_id] = out


def _rounded_numbers(constant: openvino.Node, to: Encoding) -> openvino.Node:
    array = numbers_of(constant).astype(np.float32)
    return new_constant(to.decode(to.encode(array)), Format.FP32)


class _Inserter:
    def __init__(self, graph: Graph, binding: OvBinding, given: openvino.Node) -> None:
        self.graph = graph
        self.binding = binding
        self.given = given
        self.scalars: dict[int, openvino.Node] = {}
        self.at_ports: dict[tuple[int, Encoding, int], openvino.Output] = {}

    def scalar(self, k: int) -> openvino.Node:
        """Element ``k`` of the switch input."""
        from openvino import opset13

        if k not in self.scalars:
            index, axis = (opset13.constant(np.int64(n)) for n in (k, 0))
            self.scalars[k] = opset13.gather(self.given, index, axis)
        return self.scalars[k]

    def round_output(self, result: openvino.Node, encoding: Encoding, k: int) -> None:
        """Round one of the model's outputs, which keeps its names."""
        port = result.input_value(0)
        out = self._rounded(port, encoding, k)
        result.input(0).replace_source_output(out)
        if port.get_node().get_type_name() != "Parameter":
            take_names(port, out)

    def round_port(self, node_id: int, index: int, encoding: Encoding, k: int) -> None:
        """Round what the node reads at one input; a constant ahead of time."""
        value_id = self.graph.nodes[node_id].inputs[index]
        if value_id is None:
            return
        key = (value_id, encoding, k)
        if key not in self.at_ports:
            constant = value_id in self.binding.constants
            make = self._rounded_constant if constant else self._rounded_value
            self.at_ports[key] = make(value_id, encoding, k)
        self.binding.nodes[node_id].input(index).replace_source_output(self.at_ports[key])

    def _rounded_value(self, value_id: int, encoding: Encoding, k: int) -> openvino.Output:
        return self._rounded(self.binding.values[value_id], encoding, k)

    def _rounded(self, port: openvino.Output, encoding: Encoding, k: int) -> openvino.Output:
        """What ``port`` gives, rounded where element ``k`` of the switch is on."""
        from openvino import opset13

        choice = opset13.select(self.scalar(k), rounded(port, encoding.format), port)
        return choice.output(0)

    def _rounded_constant(self, value_id: int, encoding: Encoding, k: int) -> openvino.Output:
        from openvino import opset13

        low = _rounded_numbers(self.binding.constants[value_id], encoding)
        choice = opset13.select(self.scalar(k), low, self.binding.values[value_id])
        return choice.output(0)
