"""Declared sizes that are negative, as exports of PaddlePaddle write free dimensions."""

from __future__ import annotations

from itertools import chain

import onnx


def free_negative_sizes(proto: onnx.ModelProto) -> None:
    """Leave out sizes below 0 of the model's values, in place: engines take such for free."""
    graph = proto.graph
    for value in chain(graph.input, graph.output, graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value < 0:
                dim.ClearField("dim_value")
