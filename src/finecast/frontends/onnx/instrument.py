"""Copies of a model that output its values, round them at a switch, or show mean errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from finecast.frontends import roundable
from finecast.frontends.onnx.definitions import AXES_ARE_INPUTS_SINCE, opset_of
from finecast.frontends.onnx.editor import Editor, every_value
from finecast.frontends.onnx.reader import OnnxBinding, read
from finecast.frontends.onnx.source_types import widen
from finecast.frontends.onnx.writer import OnnxModel, apply_edits
from finecast.graph import Graph
from finecast.numbers.encodings import Encodings
from finecast.numbers.formats import Format
from finecast.planning.biases import Bias
from finecast.planning.edits import edits
from finecast.planning.switches import Switch

_EXACT: Final = "finecast_exact/"
"""Prefix of the names that the fp32 model's nodes and values get beside a rounded one."""


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
    return roundable.with_switches(OnnxModel(*read(model.clone())), switches)


# Mean errors of products on codes.


def with_mean_errors(
    model: ir.Model,
    formats: Mapping[int, Format],
    encodings: Mapping[int, Encodings],
    places: Sequence[Bias],
) -> ir.Model:
    """A model whose outputs are the mean errors of the products of ``places``, by channel.

    It is the model with its products on codes, joined with itself in fp32. Law: each product's
    mean error over the data of the run is taken off its result, by channel, before later ops
    read it: so an error is counted once, at the product where it arises.

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
    editor = Editor(rounded)
    rounded.graph.outputs.clear()
    for (value, reference), place in zip(pairs, places, strict=True):
        rounded.graph.outputs.append(_without_mean(editor, value, reference, place))
    rounded.graph.extend(editor.take())
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
    for node in exact.graph.all_nodes():
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


def _without_mean(
    editor: Editor, value: ir.Value, reference: ir.Value, place: Bias
) -> ir.Value:
    """The mean of ``value - reference``, by channel; its readers get ``value`` without it."""

    def op(kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        name = editor.fresh(f"finecast_{kind.lower()}")
        return editor.op(kind, inputs, attributes, name=name)

    def integers(numbers: list[int]) -> ir.Value:
        return editor.constant("finecast_numbers", np.array(numbers, np.int64))

    readers = [*value.uses()]
    error = op("Sub", value, reference)
    axes = [a for a in range(-place.rank, 0) if a != place.axis]
    if place.axis == -1:
        error, axes = op("Reshape", error, integers([-1, place.channels])), [0]
    if opset_of(editor.model) >= AXES_ARE_INPUTS_SINCE["ReduceMean"]:
        mean = op("ReduceMean", error, integers(axes), keepdims=1)
    else:
        mean = op("ReduceMean", error, axes=axes, keepdims=1)
    corrected = op("Sub", value, mean)
    for use in readers:
        use.node.replace_input_with(use.idx, corrected)
    return mean
