"""Copies of a model that output its values, round them at a switch, or show mean errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from finecast.frontends import native_model
from finecast.frontends.onnx.reader import OnnxBinding, read
from finecast.frontends.onnx.source_types import widen
from finecast.frontends.onnx.writer import EditedModel
from finecast.graph import Graph
from finecast.numbers.encodings import Encodings
from finecast.numbers.formats import Format
from finecast.planning.biases import Bias
from finecast.planning.points import Switch


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
    return native_model.with_switches(EditedModel(*read(model.clone())), switches)


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
    coded, exact = (EditedModel(*read(widen(model).clone())) for _ in range(2))
    return native_model.with_mean_errors(coded, exact, formats, encodings, places)
