"""A model with its products on codes, joined with itself in fp32, that outputs mean errors.

Law: each product's mean error over the data of the run is taken off its result, by channel,
before later ops read it: so an error is counted once, at the product where it arises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir

from finecast.frontends.onnx.constants import constant_value
from finecast.frontends.onnx.definitions import AXES_ARE_INPUTS_SINCE
from finecast.frontends.onnx.names import FreshNames
from finecast.frontends.onnx.opset import opset_of
from finecast.frontends.onnx.reader import read
from finecast.frontends.onnx.types import every_node
from finecast.frontends.onnx.widen import every_value, widen
from finecast.frontends.onnx.writer import apply_edits
from finecast.graph import Graph
from finecast.numbers.encodings import Encodings
from finecast.numbers.formats import Format
from finecast.planning.biases import Bias
from finecast.planning.edits import edits

_EXACT: Final = "finecast_exact/"
"""Prefix of the names that the fp32 model's nodes and values get."""


def with_mean_errors(
    model: ir.Model,
    formats: Mapping[int, Format],
    encodings: Mapping[int, Encodings],
    places: Sequence[Bias],
) -> ir.Model:
    """A model whose outputs are the mean errors of the products of ``places``, by channel.

    Args:
        model: A prepared model. Ids below are those of its graph.
        formats: The formats of the nodes on codes, by id; all other nodes compute in fp32.
        encodings: How those nodes' operands are encoded, by id.
        places: The products whose errors are wanted, with the biases that could correct them.
    """
    exact, rounded = widen(model).clone(), widen(model).clone()
    graph, binding = read(rounded)
    apply_edits(graph, binding, edits(graph, formats, encodings=encodings))
    named = {v.name: v for node in exact.graph for v in node.outputs}
    pairs = [
        (binding.values[result], named[binding.values[result].name])
        for result in (_result(graph, place) for place in places)
    ]
    _join(rounded, exact)
    maker = _Maker(rounded)
    rounded.graph.outputs.clear()
    for (value, reference), place in zip(pairs, places, strict=True):
        rounded.graph.outputs.append(maker.without_mean(value, reference, place))
    rounded.graph.sort()
    return rounded


def _result(graph: Graph, place: Bias) -> int:
    return next(graph.following_outputs(graph.nodes[place.product])).id


def _join(model: ir.Model, exact: ir.Model) -> None:
    """Put the nodes and constants of ``exact`` into ``model``; both read the same inputs."""
    inputs = {v.name: v for v in model.graph.inputs}
    for value in list(exact.graph.inputs):
        if value.name in inputs and not value.is_initializer():
            value.replace_all_uses_with(inputs[value.name], replace_graph_outputs=True)
    for value in every_value(exact):
        value.name = f"{_EXACT}{value.name}"
    for node in every_node(exact.graph):
        node.name = f"{_EXACT}{node.name}"
    constants = [*exact.graph.initializers.values()]
    nodes = [*exact.graph]
    exact.graph.outputs.clear()
    exact.graph.inputs.clear()
    exact.graph.initializers.clear()
    exact.graph.remove(nodes)
    for value in constants:
        model.graph.register_initializer(value)
    model.graph.extend(nodes)


class _Maker:
    def __init__(self, model: ir.Model) -> None:
        self.main = model.graph
        self.opset = opset_of(model)
        self.fresh = FreshNames(model)

    def without_mean(self, value: ir.Value, reference: ir.Value, place: Bias) -> ir.Value:
        """The mean of ``value - reference``, by channel; its readers get it without."""
        readers = [*value.uses()]
        error = self._op("Sub", [value, reference])
        if place.axis == -1:
            error = self._op("Reshape", [error, self._integers([-1, place.channels])])
            mean = self._mean(error, [0])
        else:
            mean = self._mean(error, [a for a in range(-place.rank, 0) if a != place.axis])
        corrected = self._op("Sub", [value, mean])
        for use in readers:
            use.node.replace_input_with(use.idx, corrected)
        return mean

    def _mean(self, value: ir.Value, axes: list[int]) -> ir.Value:
        if self.opset >= AXES_ARE_INPUTS_SINCE["ReduceMean"]:
            return self._op("ReduceMean", [value, self._integers(axes)], {"keepdims": 1})
        return self._op("ReduceMean", [value], {"axes": axes, "keepdims": 1})

    def _integers(self, numbers: list[int]) -> ir.Value:
        value = constant_value(self.fresh("finecast_numbers"), np.array(numbers, np.int64))
        self.main.register_initializer(value)
        return value

    def _op(
        self,
        kind: str,
        inputs: list[ir.Value],
        attributes: dict[str, int | list[int]] | None = None,
    ) -> ir.Value:
        name = self.fresh(f"finecast_{kind.lower()}")
        out = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT))
        self.main.append(ir.node(kind, inputs, attributes or {}, outputs=[out], name=name))
        return out
