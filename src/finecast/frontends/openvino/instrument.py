"""Copies of a model whose outputs are its inner values, or whose values are rounded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
from numpy.typing import NDArray

from finecast.frontends import rounding
from finecast.frontends.openvino.bodies import hand_in
from finecast.frontends.openvino.parameters import state_parameters
from finecast.frontends.openvino.reader import read
from finecast.frontends.openvino.types import new_constant, port_key, take_names
from finecast.graph import INNER, Graph
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounder
from finecast.planning.edits import Use
from finecast.planning.points import SWITCH

if TYPE_CHECKING:
    import openvino


# What it gives nobody reads, and OpenVINO compiles no model that reads it.
_STORES: Final = "openvino::Assign"


def observable(graph: Graph) -> dict[str, int]:
    """Names and ids of the float values that can be shown: those computed outside of bodies.

    A name is ``OP:OUTPUT``, for a tensor may have no name of its own, or several.
    """
    found: dict[str, int] = {}
    for value in graph.values:
        if value.format is not None and value.constant is None and value.producer is not None:
            maker = graph.nodes[value.producer]
            index = maker.outputs.index(value.id)
            inner = maker.attributes.get(INNER, 0)
            stores = maker.native == _STORES
            if not (maker.region or stores) and isinstance(inner, int) and index >= inner:
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
            port.set_names(set())  # so that no name set below is taken
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
        state_parameters(self._binding)
        ids = {port_key(port): value for value, port in enumerate(self._binding.values)}
        self._results: dict[int, list[openvino.Node]] = {}
        for result in self._binding.model.get_results():
            self._results.setdefault(ids[port_key(result.input_value(0))], []).append(result)
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
        """The port that gives the value."""
        return self._binding.values[value]

    def read_at(self, node: int, index: int) -> openvino.Output:
        """The port that input ``index`` of ``node`` reads."""
        source: openvino.Output = self._binding.entries[node][index].port.get_source_output()
        return source

    def give(self, value: int, uses: Iterable[Use], tensor: openvino.Output) -> None:
        """Let ``uses`` of a value read ``tensor``; where an output does, so do its names."""
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
        """The port of a new constant."""
        return new_constant(np.asarray(array, dtype=np.float32), Format.FP32).output(0)

    def rounded(self, tensor: openvino.Output, how: Rounder) -> openvino.Output:
        """``tensor`` rounded by arithmetic in fp32."""
        from openvino import opset13

        return _port(rounding.converted(opset13, tensor, how))

    def without_infinities(
        self, tensor: openvino.Output, top: float | None
    ) -> openvino.Output:
        """``tensor`` with Inf as ``top`` of its sign; as NaN if ``top`` is None."""
        from openvino import opset13

        return _port(rounding.without_infinities(opset13, tensor, top))

    def switched(self, k: int, on: openvino.Output, off: openvino.Output) -> openvino.Output:
        """``on`` or ``off``, selected by element ``k`` of the extra input."""
        from openvino import opset13

        region = self._regions[port_key(off)]
        if (k, region) not in self._elements:
            index, axis = (opset13.constant(np.int64(n)) for n in (k, 0))
            self._elements[k, region] = opset13.gather(self._in(region), index, axis)
        return opset13.select(self._elements[k, region], on, off).output(0)

    def _in(self, region: int) -> openvino.Output:
        """The extra input in a region; a body gets that of its parent."""
        if region not in self._switches:
            body = self._binding.regions[region]
            self._switches[region] = (
                self._switch_input().output(0)
                if body is None
                else hand_in(body, self._in(body.parent))
            )
        return self._switches[region]

    def _switch_input(self) -> openvino.Node:
        """The Parameter of the extra input, made when it is first asked for."""
        from openvino import Type, opset13

        if self._switch is None:
            self._switch = opset13.parameter([-1], Type.boolean, name=SWITCH)
            self._switch.output(0).set_names({SWITCH})
        return self._switch

    def finish(self, switches: int = 0) -> openvino.Model:
        """The copy; its extra input has one element for each switch."""
        from openvino import PartialShape

        model = self._binding.model
        if switches:
            given: Any = self._switch_input()
            given.set_partial_shape(PartialShape([switches]))
            model.add_parameters([given])
        model.validate_nodes_and_infer_types()
        return model


def _port(made: Any) -> openvino.Output:
    """The port itself, or the first one of an op."""
    import openvino

    return made if isinstance(made, openvino.Output) else made.output(0)
