"""Accumulating ops written out in steps, for devices told not to keep fp32 inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import onnx_ir as ir

from finecast.frontends.onnx.opset import opset_of

# Before this opset ReduceMax and ReduceMean have their axes as an attribute, then as input.
_AXES_AS_INPUT: Final = 18
_SUM_AXES_AS_INPUT: Final = 13


def expand_accumulations(model: ir.Model) -> ir.Model:
    """A copy in which Softmax and LayerNormalization are written out, step by step.

    Law: in fp32 it computes what the model computes, up to the order of sums.
    """
    copy = model.clone()
    opset = opset_of(copy)
    for graph in (copy.graph, *copy.graph.subgraphs()):
        for node in list(graph):
            build = _EXPANSIONS.get((node.domain, node.op_type))
            if build is None or any(o.uses() for o in node.outputs[1:]):
                continue
            steps = _Steps(node, copy.graph, opset)
            build(steps)
            steps.replace(graph)
    return copy


class _Steps:
    """Collects the nodes that replace one."""

    def __init__(self, node: ir.Node, main: ir.Graph, opset: int) -> None:
        self.node = node
        self.main = main
        self.opset = opset
        self.made: list[ir.Node] = []

    @property
    def x(self) -> ir.Value:
        value = self.node.inputs[0]
        assert value is not None
        return value

    def axis(self) -> int:
        attribute = self.node.attributes.get("axis")
        return -1 if attribute is None else attribute.as_int()

    def op(self, kind: str, *inputs: ir.Value, **attributes: int | list[int]) -> ir.Value:
        name = f"{self.node.name}/{kind.lower()}_{len(self.made)}"
        out = ir.Value(name=f"{name}_out", type=ir.TensorType(ir.DataType.FLOAT))
        self.made.append(ir.node(kind, list(inputs), attributes, outputs=[out], name=name))
        return out

    def reduce(self, kind: str, x: ir.Value, axes: list[int]) -> ir.Value:
        since = _SUM_AXES_AS_INPUT if kind == "ReduceSum" else _AXES_AS_INPUT
        if self.opset < since:
            return self.op(kind, x, axes=axes, keepdims=1)
        name = f"{self.node.name}/axes_{len(self.made)}"
        value = ir.Value(name=name, const_value=ir.tensor(np.array(axes, np.int64), name=name))
        value.type, value.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([len(axes)])
        self.main.register_initializer(value)
        return self.op(kind, x, value, keepdims=1)

    def scalar(self, x: float) -> ir.Value:
        name = f"{self.node.name}/constant_{len(self.made)}"
        value = ir.Value(name=name, const_value=ir.tensor(np.array(x, np.float32), name=name))
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(())
        self.main.register_initializer(value)
        return value

    def replace(self, graph: ir.Graph) -> None:
        """Put the steps where the node stood; the last one takes over its first output."""
        old, new = self.node.outputs[0], self.made[-1].outputs[0]
        new.shape, new.type = old.shape, old.type
        self.node.append(self.made)
        for user, index in list(old.uses()):
            user.replace_input_with(index, new)
        for index, end in enumerate(graph.outputs):
            if end is old:
                graph.outputs[index] = new
        name, old.name = old.name, f"{old.name}_whole"
        new.name = name
        graph.remove(self.node, safe=True)


def split_norms(model: ir.Model) -> ir.Model:
    """A copy in which the scale and shift of LayerNormalization are nodes of their own.

    ONNX defines that a norm of a low type is cast to that type before scale and shift;
    OpenVINO does so. The norm keeps its name; the other two have it as prefix.
    """
    copy = model.clone()
    for graph in (copy.graph, *copy.graph.subgraphs()):
        for node in list(graph):
            scale = node.inputs[1] if len(node.inputs) > 1 else None
            if (node.domain, node.op_type) != ("", "LayerNormalization") or scale is None:
                continue
            if any(o.uses() for o in node.outputs[1:]) or scale.shape is None:
                continue
            _split(node, scale, copy, graph)
    return copy


def _split(node: ir.Node, scale: ir.Value, model: ir.Model, graph: ir.Graph) -> None:
    steps = _Steps(node, model.graph, opset_of(model))
    name = f"{node.name}/ones"
    shape = [d if isinstance(d, int) else 1 for d in scale.shape or ()]
    ones = ir.Value(name=name, const_value=ir.tensor(np.ones(shape, np.float32), name=name))
    ones.type, ones.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
    model.graph.register_initializer(ones)
    plain = _float(f"{node.name}/normalized", node.outputs[0].shape)
    attributes = list(node.attributes.values())
    first = ir.Node(
        "", "LayerNormalization", [steps.x, ones], attributes, outputs=[plain], name=node.name
    )
    steps.made.append(first)
    out = steps.op("Mul", plain, scale)
    shift = node.inputs[2] if len(node.inputs) > 2 else None
    if shift is not None:
        steps.op("Add", out, shift)
    steps.replace(graph)


def _float(name: str, shape: ir.Shape | None) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=shape)


def _softmax(steps: _Steps) -> None:
    axes = [steps.axis()]
    centred = steps.op("Sub", steps.x, steps.reduce("ReduceMax", steps.x, axes))
    powers = steps.op("Exp", centred)
    steps.op("Div", powers, steps.reduce("ReduceSum", powers, axes))


def _layer_norm(steps: _Steps) -> None:
    rank = len(steps.x.shape or ())
    first = steps.axis()
    axes = list(range(first, 0)) if first < 0 else list(range(first, max(rank, first + 1)))
    attribute = steps.node.attributes.get("epsilon")
    epsilon = 1e-5 if attribute is None else attribute.as_float()
    centred = steps.op("Sub", steps.x, steps.reduce("ReduceMean", steps.x, axes))
    variance = steps.reduce("ReduceMean", steps.op("Mul", centred, centred), axes)
    deviation = steps.op("Sqrt", steps.op("Add", variance, steps.scalar(epsilon)))
    out = steps.op("Div", centred, deviation)
    for kind, operand in zip(("Mul", "Add"), steps.node.inputs[1:], strict=False):
        if operand is not None:
            out = steps.op(kind, out, operand)


_EXPANSIONS: Final[dict[tuple[str, str], Callable[[_Steps], None]]] = {
    ("", "Softmax"): _softmax,
    ("", "LayerNormalization"): _layer_norm,
}
