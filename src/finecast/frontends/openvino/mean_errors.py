"""A model beside itself in fp32 that shows by how much its products err in the mean.

Law: each product's mean error is taken off its result, by channel, before later ops read it,
on the very data of the run: so an error is shown once, where it arises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from finecast.frontends.openvino.instrument import OvRoundable
from finecast.frontends.roundable import with_roundings
from finecast.numbers.encodings import Encodings
from finecast.numbers.formats import Format
from finecast.planning.biases import Bias
from finecast.planning.edits import edits

if TYPE_CHECKING:
    import openvino


def with_mean_errors(
    model: openvino.Model,
    formats: Mapping[int, Format],
    encodings: Mapping[int, Encodings],
    places: Sequence[Bias],
) -> openvino.Model:
    """A model whose outputs are the mean errors of the products of ``places``, by channel.

    Args:
        model: A prepared model; its graph is what ids are of.
        formats: By id, of the nodes on codes; all others compute in fp32.
        encodings: Of those nodes' inputs.
        places: Where products have their biases.
    """
    import openvino

    exact, coded = OvRoundable(model), OvRoundable(model)
    graph = coded.graph
    rounded: openvino.Model = with_roundings(coded, edits(graph, formats, encodings=encodings))
    _join(rounded, exact.finish())
    means: list[openvino.Output] = []
    for number, place in enumerate(places):
        (result,) = graph.following_outputs(graph.nodes[place.product])
        mean = _without_mean(coded.tensor(result.id), exact.tensor(result.id), place)
        mean.set_names({f"mean_error_{number}"})
        means.append(mean)
    make: Any = openvino.Model
    return make(means, rounded.get_parameters(), "mean errors")


def _join(model: openvino.Model, exact: openvino.Model) -> None:
    """Let ``exact`` read the inputs of ``model``; names of tensors are of one model alone."""
    for given, own in zip(model.get_parameters(), exact.get_parameters(), strict=True):
        for target in list(own.output(0).get_target_inputs()):
            target.replace_source_output(given.output(0))
    for op in (*model.get_ordered_ops(), *exact.get_ordered_ops()):
        if op.get_type_name() != "Parameter":
            for port in op.outputs():
                port.set_names(set())


def _without_mean(
    result: openvino.Output, reference: openvino.Output, place: Bias
) -> openvino.Output:
    """The mean error of ``result`` beside ``reference``; its readers get it without."""
    from openvino import opset13

    readers: list[Any] = list(result.get_target_inputs())
    error = opset13.subtract(result, reference)
    axes = [a for a in range(place.rank) if a != place.rank + place.axis]
    if not place.rank:
        rows = opset13.constant(np.array([-1, place.channels]))
        error, axes = opset13.reshape(error, rows, special_zero=False), [0]
    mean = opset13.reduce_mean(error, opset13.constant(np.array(axes)), keep_dims=True)
    corrected = opset13.subtract(result, mean).output(0)
    for reader in readers:
        reader.replace_source_output(corrected)
    found: openvino.Output = mean.output(0)
    return found
