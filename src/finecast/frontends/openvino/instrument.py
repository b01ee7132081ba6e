"""Copies of a model that show its values, or that round them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from finecast.frontends import rounding
from finecast.frontends.openvino.bodies import hand_in
from finecast.frontends.openvino.reader import read
from finecast.frontends.openvino.types import new_constant, take_names
from finecast.graph import INNER, Graph
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounder
from finecast.planning.edits import Use
from finecast.planning.switches import SWITCH

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


@final
class OvRoundable:
    """A ``Roundable`` copy of an ``ov.Model``: all of its roundings are arithmetic in fp32."""

    def __init__(self, model: openvino.Model) -> None:
        self._graph, self._binding = read(model.clone())
        ids = {_key(port): value for value, port in enumerate(self._binding.values)}
        self._results: dict[int, list[openvino.Node]] = {}
        for result in self._binding.model.get_results():
            self._results.setdefault(ids[_key(result.input_value(0))], []).append(result)
        self._regions = dict(zip(ids, self._binding.value_regions, strict=True))
        self._switch: openvino.Node | None = None
        self._switches: dict[int, openvino.Output] = {}
        self._elements: dict[tuple[int, int], openvino.Node] = {}

    @property
    def library(self) -> str:
        """What messages call the kind of the model."""
        return "OpenVINO"

    @property
    def graph(self) -> Graph:
        """The graph of the model as it was copied."""
        return self._graph

    def tensor(self, value: int) -> openvino.Output:
        """The port that gives it."""
        return self._binding.values[value]

    def read_at(self, node: int, index: int) -> openvino.Output:
        """The port that an input is joined to."""
        source: openvino.Output = self._binding.entries[node][index].port.get_source_output()
        return source

    def give(self, value: int, uses: Iterable[Use], tensor: openvino.Output) -> None:
        """Join inputs to ``tensor``; an output of the model takes its names along."""
        for use in uses:
            if use.node is not None:
                self._binding.entries[use.node][use.index].port.replace_source_output(tensor)
                continue
            for result in self._results[value]:
                before = result.input_value(0)
                result.input(0).replace_source_output(tensor)
                if before.get_node().get_type_name() != "Parameter" and before.get_names():
                    take_names(before, tensor)

    def constant(self, array: NDArray[np.float32]) -> openvino.Output:
        """In memory of its own."""
        return new_constant(np.asarray(array, dtype=np.float32), Format.FP32).output(0)

    def rounded(self, tensor: openvino.Output, how: Rounder) -> openvino.Output:
        """By arithmetic in fp32."""
        from openvino import opset13

        return _port(rounding.converted(opset13, tensor, how))

    def without_infinities(
        self, tensor: openvino.Output, top: float | None
    ) -> openvino.Output:
        """Inf as ``top`` of its sign; None for NaN."""
        from openvino import opset13

        return _port(rounding.without_infinities(opset13, tensor, top))

    def switched(self, k: int, on: openvino.Output, off: openvino.Output) -> openvino.Output:
        """A Select by an element of the extra input."""
        from openvino import opset13

        region = self._regions[_key(off)]
        if (k, region) not in self._elements:
            index, axis = (opset13.constant(np.int64(n)) for n in (k, 0))
            self._elements[k, region] = opset13.gather(self._in(region), index, axis)
        return opset13.select(self._elements[k, region], on, off).output(0)

    def _in(self, region: int) -> openvino.Output:
        """The extra input as it is in a region: each body is handed its parent's."""
        if region not in self._switches:
            body = self._binding.regions[region]
            self._switches[region] = (
                self._given().output(0)
                if body is None
                else hand_in(body, self._in(body.parent))
            )
        return self._switches[region]

    def _given(self) -> openvino.Node:
        from openvino import Type, opset13

        if self._switch is None:
            self._switch = opset13.parameter([-1], Type.boolean, name=SWITCH)
            self._switch.output(0).set_names({SWITCH})
        return self._switch

    def finish(self, switches: int = 0) -> openvino.Model:
        """The copy."""
        from openvino import PartialShape

        model = self._binding.model
        if switches:
            given: Any = self._given()
            given.set_partial_shape(PartialShape([switches]))
            model.add_parameters([given])
        model.validate_nodes_and_infer_types()
        return model


def _port(made: Any) -> openvino.Output:
    """What an op gives; a port stays as it is."""
    import openvino

    return made if isinstance(made, openvino.Output) else made.output(0)


def _key(port: Any) -> tuple[str, int]:
    return port.get_node().get_friendly_name(), port.get_index()
