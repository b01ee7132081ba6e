"""Ops that sum written out step by step, so that each step can be rounded.

For devices told to accumulate in the low format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.frontends.onnx.definitions import (
    AXES_ARE_INPUTS_SINCE,
    FLATTENING_AXIS,
    SOFTMAX_FLATTENS_BELOW,
    opset_of,
)
from finecast.frontends.onnx.editor import Editor


def expand_accumulations(model: ir.Model) -> ir.Model:
    """A copy in which Softmax and LayerNormalization are written out, step by step.

    Law: in fp32 it computes what the model computes, up to the order of sums. An op over
    dimensions whose number is not known stays as it is.
    """
    editor = Editor(model.clone())
    opset = opset_of(editor.model)
    for node in list(editor.main.all_nodes()):
        build = _EXPANSIONS.get(node.op_type) if not node.domain else None
        if build is None or any(o.uses() for o in node.outputs[1:]):
            continue
        axes = _axes(node, opset)
        if axes is not None:
            steps = _Steps(node, editor)
            build(steps, axes)
            steps.replace()
    return editor.model


def _axes(node: ir.Node, opset: int) -> list[int] | None:
    """The axes that Softmax or LayerNormalization sums over; None if they cannot be told.

    They are those from its ``axis`` to the last, which takes the rank to be known if ``axis``
    counts from the first. Softmax from opset 13 on sums over ``axis`` alone.
    """
    softmax = node.op_type == "Softmax"
    flattens = softmax and opset < SOFTMAX_FLATTENS_BELOW
    axis = node.attributes.get_int("axis", FLATTENING_AXIS if flattens else -1)
    if softmax and not flattens:
        return [axis]
    if axis < 0:
        return list(range(axis, 0))
    x = node.inputs[0]
    return None if x is None or x.shape is None else list(range(axis, len(x.shape)))


class _Steps:
    """Makes the nodes that replace ``node``, in order."""

    def __init__(self, node: ir.Node, editor: Editor) -> None:
        self.node = node
        self.editor = editor
        source = node.inputs[0]
        assert source is not None
        self.x = source

    def op(self, kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        name = f"{self.node.name}/{kind.lower()}_{len(self.editor.made)}"
        return self.editor.op(kind, inputs, attributes, name=f"{name}_out", node=name)

    def reduce(self, kind: str, x: ir.Value, axes: list[int]) -> ir.Value:
        if opset_of(self.editor.model) < AXES_ARE_INPUTS_SINCE[kind]:
            return self.op(kind, x, axes=axes, keepdims=1)
        return self.op(kind, x, self.constant("axes", np.array(axes, np.int64)), keepdims=1)

    def constant(self, what: str, array: NDArray[np.generic]) -> ir.Value:
        return self.editor.constant(f"{self.node.name}/{what}", array)

    def replace(self) -> None:
        """Put the steps in the node's place; the last result replaces its first output."""
        old, steps = self.node.outputs[0], self.editor.take()
        new, graph = steps[-1].outputs[0], self.node.graph
        assert isinstance(graph, ir.Graph)
        new.shape, new.type = old.shape, old.type
        graph.insert_after(self.node, steps)
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        new.name, old.name = old.name, f"{old.name}_whole"
        graph.remove(self.node, safe=True)


def split_norms(model: ir.Model) -> ir.Model:
    """A copy in which the scale and shift of LayerNormalization are nodes of their own.

    By ONNX's definition, and in OpenVINO, a low LayerNormalization rounds the normalized
    numbers to its type before scale and shift. The norm keeps its name; the other two nodes
    have it as prefix.
    """
    editor = Editor(model.clone())
    for node in list(editor.main.all_nodes()):
        scale = node.inputs[1] if len(node.inputs) > 1 else None
        if (node.domain, node.op_type) != ("", "LayerNormalization") or scale is None:
            continue
        if not any(o.uses() for o in node.outputs[1:]) and scale.shape is not None:
            _split(_Steps(node, editor), scale)
    return editor.model


def _split(steps: _Steps, scale: ir.Value) -> None:
    node = steps.node
    shape = [d if isinstance(d, int) else 1 for d in scale.shape or ()]
    ones = steps.constant("ones", np.ones(shape, np.float32))
    attributes = {k: a.value for k, a in node.attributes.items()}
    plain = steps.editor.op(
        "LayerNormalization",
        [steps.x, ones],
        attributes,
        name=f"{node.name}/normalized",
        node=node.name or "",
        shape=node.outputs[0].shape,
    )
    out = steps.op("Mul", plain, scale)
    shift = node.inputs[2] if len(node.inputs) > 2 else None
    if shift is not None:
        steps.op("Add", out, shift)
    steps.replace()


def _softmax(steps: _Steps, axes: list[int]) -> None:
    centred = steps.op("Sub", steps.x, steps.reduce("ReduceMax", steps.x, axes))
    powers = steps.op("Exp", centred)
    steps.op("Div", powers, steps.reduce("ReduceSum", powers, axes))


def _layer_norm(steps: _Steps, axes: list[int]) -> None:
    epsilon = steps.node.attributes.get_float("epsilon", 1e-5)
    centred = steps.op("Sub", steps.x, steps.reduce("ReduceMean", steps.x, axes))
    variance = steps.reduce("ReduceMean", steps.op("Mul", centred, centred), axes)
    least = steps.constant("epsilon", np.array(epsilon, np.float32))
    deviation = steps.op("Sqrt", steps.op("Add", variance, least))
    out = steps.op("Div", centred, deviation)
    for kind, operand in zip(("Mul", "Add"), steps.node.inputs[1:], strict=False):
        if operand is not None:
            out = steps.op(kind, out, operand)


_EXPANSIONS: Final[dict[str, Callable[[_Steps, list[int]], None]]] = {
    "Softmax": _softmax,
    "LayerNormalization": _layer_norm,
}
