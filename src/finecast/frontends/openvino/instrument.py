"""Copies of a model that show its values, or that round them at the turn of a switch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from finecast.frontends.openvino.bodies import hand_in
from finecast.frontends.openvino.reader import OvBinding, read
from finecast.frontends.openvino.rounding import rounded
from finecast.frontends.openvino.types import new_constant, numbers_of, take_names
from finecast.graph import INNER, Graph
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
    """Names and ids of the float values that can be shown: those computed outside of bodies.

    The names are of ops and ports: tensors may have none, or several.
    """
    found: dict[str, int] = {}
    for value in graph.values:
        if value.format is not None and value.constant is None and value.producer is not None:
            maker = graph.nodes[value.producer]
            index = maker.outputs.index(value.id)
            inner = maker.attributes.get(INNER, 0)
            if not maker.region and isinstance(inner, int) and index >= inner:
                found[f"{maker.name}:{index}"] = value.id
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
            inserter.round_output(graph.outputs[index].id, encoding, k)
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
            case SetFormat() if binding.nodes[edit.node] is not None:
                for value in graph.following_outputs(graph.nodes[edit.node]):
                    _round(binding, value.id, edit.to, None)
            case SetPort() if graph.values[edit.value].is_input:
                _round(binding, edit.value, edit.to, None)
            case InsertCast() | ConvertConstant() | RoundTrip():
                _round(binding, edit.value, edit.to.format, edit.uses)
            case _:
                pass
    copy.validate_nodes_and_infer_types()
    return copy


def _round(binding: OvBinding, value_id: int, fmt: Format, uses: Sequence[Use] | None) -> None:
    """Round a value for ``uses``, by default for all that read it, the outputs among them."""
    if fmt is Format.FP32:
        return
    port = binding.values[value_id]
    readers = list(port.get_target_inputs())
    if uses is not None:
        readers = [binding.entries[u.node][u.index].port for u in uses if u.node is not None]
    out = rounded(port, fmt)
    for reader in readers:
        reader.replace_source_output(out)
    if uses is None and port.get_node().get_type_name() != "Parameter":
        take_names(port, out)
        binding.values[value_id] = out


class _Inserter:
    def __init__(self, graph: Graph, binding: OvBinding, given: openvino.Node) -> None:
        self.graph = graph
        self.binding = binding
        self.switches = {0: given.output(0)}
        self.scalars: dict[tuple[int, int], openvino.Node] = {}
        self.at_ports: dict[tuple[int, Encoding, int], openvino.Output] = {}

    def switch(self, region: int) -> openvino.Output:
        """The switch input as it is in a region: each body is handed its parent's."""
        if region not in self.switches:
            body = self.binding.regions[region]
            assert body is not None
            self.switches[region] = hand_in(body, self.switch(body.parent))
        return self.switches[region]

    def scalar(self, k: int, region: int) -> openvino.Node:
        """Element ``k`` of the switch input."""
        from openvino import opset13

        if (k, region) not in self.scalars:
            index, axis = (opset13.constant(np.int64(n)) for n in (k, 0))
            self.scalars[k, region] = opset13.gather(self.switch(region), index, axis)
        return self.scalars[k, region]

    def round_output(self, value_id: int, encoding: Encoding, k: int) -> None:
        """Round one of the model's outputs, which keeps its names."""
        port = self.binding.values[value_id]
        ends = [
            t for t in port.get_target_inputs() if t.get_node().get_type_name() == "Result"
        ]
        out = self._rounded(port, encoding, self.scalar(k, 0))
        for end in ends:
            end.replace_source_output(out)
        if port.get_node().get_type_name() != "Parameter":
            take_names(port, out)

    def round_port(self, node_id: int, index: int, encoding: Encoding, k: int) -> None:
        """Round what the node reads at one input; a constant ahead of time."""
        value_id = self.graph.nodes[node_id].inputs[index]
        if value_id is None:
            return
        entry = self.binding.entries[node_id][index]
        key = (value_id, encoding, k)
        if key not in self.at_ports:
            constant = value_id in self.binding.constants
            make = self._rounded_constant if constant else self._rounded_value
            self.at_ports[key] = make(value_id, encoding, self.scalar(k, entry.region))
        entry.port.replace_source_output(self.at_ports[key])

    def _rounded_value(
        self, value_id: int, encoding: Encoding, on: openvino.Node
    ) -> openvino.Output:
        return self._rounded(self.binding.values[value_id], encoding, on)

    def _rounded(
        self, port: openvino.Output, encoding: Encoding, on: openvino.Node
    ) -> openvino.Output:
        """What ``port`` gives, rounded where ``on`` is true."""
        from openvino import opset13

        return opset13.select(on, rounded(port, encoding.format), port).output(0)

    def _rounded_constant(
        self, value_id: int, encoding: Encoding, on: openvino.Node
    ) -> openvino.Output:
        from openvino import opset13

        array = numbers_of(self.binding.constants[value_id]).astype(np.float32)
        low = new_constant(encoding.decode(encoding.encode(array)), Format.FP32)
        return opset13.select(on, low, self.binding.values[value_id]).output(0)
