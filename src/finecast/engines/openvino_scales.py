"""Convolutions on integers whose scale OpenVINO applies to their result more than once.

OpenVINO 2026.4 multiplies the sum of a convolution's codes by the scales for each op that
reads the result. Where the shape is open and the convolution has no bias it then fuses all of
these multiplications into the convolution, one after the other: with two readers the result is
multiplied by the scale's square. With a bias, or fixed shapes, it does not.
"""

from __future__ import annotations

from collections.abc import Mapping

from finecast.graph import Graph, Node
from finecast.numbers.formats import Format
from finecast.planning.scalable import CONVOLUTIONS

_SCALES = frozenset({"mul", "div"})
_SHIFTS = frozenset({"add", "sub"})


def scaled_twice(graph: Graph, low: Format) -> Mapping[int, str]:
    """Convolutions that would be scaled twice, with the reason."""
    text = (
        f"openvino scales a convolution in {low.label} twice where its shape is open, it has"
        " no bias, and several ops read it"
    )
    return {
        node.id: text
        for node in graph.nodes
        if node.op in CONVOLUTIONS
        and not _has_bias(graph, node)
        and _is_read_twice(graph, node)
    }


def _is_read_twice(graph: Graph, node: Node) -> bool:
    """Whether several inputs of ops read the result, or what a constant makes of it."""
    (result,) = node.outputs[:1]
    while result is not None:
        value = graph.values[result]
        if value.fixed_shape is not None:
            return False
        ports = [n for n in value.uses for i in graph.nodes[n].inputs if i == result]
        if len(ports) != 1:
            return len(ports) > 1
        reader = graph.nodes[ports[0]]
        if not _is_merged(graph, reader):
            return False
        result = reader.outputs[0]
    return False


def _is_merged(graph: Graph, reader: Node) -> bool:
    """Whether the op becomes part of the scale: by a constant, or by none at all."""
    constant = next(iter(graph.constants(reader)), None)
    if constant is None:
        return False
    return reader.op in _SCALES or (reader.op in _SHIFTS and not constant.largest)


def _has_bias(graph: Graph, node: Node) -> bool:
    """Whether it adds other numbers than zeros, in its own op."""
    index = node.inputs[2] if len(node.inputs) > 2 else None
    if index is None:
        return False
    constant = graph.values[index].constant
    return constant is None or constant.largest > 0
