"""A model with products on int8 codes, joined with its fp32 original to show mean errors.

Law: the mean error of each channel of a product is subtracted from its result before later ops
read it, so the next product's error is its own and not one passed on.
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
        model: A prepared model; ids are those of its graph.
        formats: Formats of the nodes on codes, by id; all others compute in fp32.
        encodings: Encodings of those nodes' operands, by the same ids.
        places: The products, and where their channels are.
    """
    import openvino

    exact, coded = OvRoundable(model), OvRoundable(model)
    graph = coded.graph
    rounded: openvino.Model = with_roundings(coded, edits(graph, formats, encodings=encodings))
    _join(rounded, exact.finish())
    means: list[openvino.Output] = []
    for number, place in enumerate(places):
        (result,) = graph.following_outputs(graph.nodes[place.product])
        mean = _subtract_mean(coded.tensor(result.id), exact.tensor(result.id), place)
        mean.set_names({f"mean_error_{number}"})
        means.append(mean)
    make: Any = openvino.Model
    return make(means, rounded.get_parameters(), "mean errors")


def _join(model: openvino.Model, exact: openvino.Model) -> None:
    """Let ``exact`` read the inputs of ``model``; drop tensor names, which both would have."""
    for given, own in zip(model.get_parameters(), exact.get_parameters(), strict=True):
        for target in list(own.output(0).get_target_inputs()):
            target.replace_source_output(given.output(0))
    for op in (*model.get_ordered_ops(), *exact.get_ordered_ops()):
        if op.get_type_name() != "Parameter":
            for port in op.outputs():
                port.set_names(set())


def _subtract_mean(
    result: openvino.Output, reference: openvino.Output, place: Bias
) -> openvino.Output:
    """Subtract from ``result`` its mean difference from ``reference``, which is returned.

    The mean is by channel; readers of ``result`` read the corrected one.
    """
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
