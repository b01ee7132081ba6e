"""From a frozen graph to the neutral graph, and the binding that leads back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast import ops
from finecast.frontends.tensorflow.library import Operation, Tensor, dtype_label, tf
from finecast.frontends.tensorflow.model import FrozenModel, import_graph
from finecast.frontends.tensorflow.op_types import TypeAttribute, op_types
from finecast.graph import Attribute, ConstantStats, Dim, Graph, Node, Value

_INPUTS: Final = frozenset({"Placeholder", "PlaceholderWithDefault"})
_TRANSPOSES: Final = {"transpose_a": "transA", "transpose_b": "transB", "adj_x": "transA",
                      "adj_y": "transB"}  # fmt: skip
"""Attributes of products, by the names that the counts of operations know them by."""


@dataclass(slots=True, kw_only=True)
class GraphBinding:
    """What of the GraphDef the ids of a Graph stand for.

    Attributes:
        model: The model.
        nodes: Names of NodeDefs, by node id.
        types: Where their type is stated, by node id.
        values: Names of tensors, ``NODE:INDEX``, by value id.
    """

    model: FrozenModel
    nodes: list[str] = field(default_factory=list[str])
    types: list[TypeAttribute] = field(default_factory=list[TypeAttribute])
    values: list[str] = field(default_factory=list[str])


def read(model: FrozenModel, digest: str = "") -> tuple[Graph, GraphBinding]:
    """Build the neutral graph; TensorFlow infers the shapes.

    Law: every tensor is a Value, every op but constants and inputs a Node. Bodies of control
    flow are functions of their own, whose ops keep their types: they are not read.
    """
    imported = tf.Graph()
    with imported.as_default():
        import_graph(model.graph)
    reader = _Reader(model)
    for op in imported.get_operations():
        reader.visit(op)
    return reader.finish(digest), reader.binding


def functions_with_floats(model: FrozenModel) -> tuple[str, ...]:
    """Names of the functions in which an op computes in fp32: bodies of control flow."""
    fp32 = tf.float32.as_datatype_enum
    return tuple(
        function.signature.name
        for function in model.graph.library.function
        if any(attr.type == fp32 for n in function.node_def for attr in n.attr.values())
    )


class _Reader:
    def __init__(self, model: FrozenModel) -> None:
        self.binding = GraphBinding(model=model)
        self.nodes: list[Node] = []
        self.tensors: list[Tensor] = []
        self.ids: dict[str, int] = {}
        self.constants: dict[int, ConstantStats] = {}
        self.uses: dict[int, list[int]] = {}
        self.producers: dict[int, int] = {}
        self.inputs = {port.tensor: port for port in model.inputs}
        self.outputs = {port.tensor: port.name for port in model.outputs}

    def visit(self, op: Operation) -> None:
        if op.type == "Const":
            value = self._value(op.outputs[0])
            self.constants[value] = _stats(op)
        elif op.type in _INPUTS:
            self._value(op.outputs[0])
        elif op.inputs or op.outputs:
            self._op(op)

    def _value(self, tensor: Tensor) -> int:
        number = len(self.tensors)
        self.ids[tensor.name] = number
        self.tensors.append(tensor)
        self.binding.values.append(tensor.name)
        return number

    def _op(self, op: Operation) -> None:
        inputs = tuple(self.ids[t.name] for t in op.inputs)
        outputs = tuple(self._value(t) for t in op.outputs)
        native = f"tf::{op.type}"
        types = op_types(op)
        number = len(self.nodes)
        self.nodes.append(
            Node(
                id=number,
                name=op.name,
                op=ops.lookup(native).name,
                native=native,
                inputs=inputs,
                outputs=outputs,
                follows_in=types.inputs,
                follows_out=types.outputs,
                format=types.format,
                admits=types.admits,
                attributes=dict(_attributes(op)),
                scope=op.name.rpartition("/")[0],
            )
        )
        self.binding.nodes.append(op.name)
        self.binding.types.append(types)
        for index in dict.fromkeys(inputs):
            self.uses.setdefault(index, []).append(number)
        self.producers.update(dict.fromkeys(outputs, number))

    def finish(self, digest: str) -> Graph:
        values = tuple(self._finished(i, t) for i, t in enumerate(self.tensors))
        return Graph(nodes=tuple(self.nodes), values=values, digest=digest)

    def _finished(self, number: int, tensor: Tensor) -> Value:
        plain: str = tensor.name
        given = self.inputs.get(plain)
        own = self.outputs.get(plain) or plain.removesuffix(":0")
        return Value(
            id=number,
            name=given.name if given else own,
            dtype=dtype_label(tensor.dtype),
            shape=given.shape if given else _shape(tensor),
            producer=self.producers.get(number),
            uses=tuple(self.uses.get(number, ())),
            constant=self.constants.get(number),
            is_input=given is not None,
            is_output=plain in self.outputs,
        )


def _shape(tensor: Tensor) -> tuple[Dim, ...] | None:
    if tensor.shape.rank is None:
        return None
    sizes: Sequence[int | None] = tensor.shape.as_list()
    return tuple(sizes)


def _stats(op: Operation) -> ConstantStats:
    proto = op.node_def.attr["value"].tensor
    size = int(np.prod([d.size for d in proto.tensor_shape.dim], dtype=np.int64))
    return ConstantStats(size=size, read=_array(proto))


def _array(proto: Any) -> Callable[[], NDArray[np.generic]]:
    def read_it() -> NDArray[np.generic]:
        array: NDArray[np.generic] = tf.make_ndarray(proto)
        return array

    return read_it


def _attributes(op: Operation) -> Iterator[tuple[str, Attribute]]:
    """Attributes that are numbers, text, or lists of integers."""
    attr: Mapping[str, Any] = op.node_def.attr
    for name, value in attr.items():
        kind = value.WhichOneof("value")
        if name.startswith("_"):
            continue
        if kind == "i" or kind == "b":
            yield _TRANSPOSES.get(name, name), int(value.i or value.b)
        elif kind == "f":
            yield name, float(value.f)
        elif kind == "s":
            yield name, value.s.decode(errors="replace")
        elif kind == "list" and value.list.i:
            yield name, tuple(int(i) for i in value.list.i)
    if op.type == "GatherV2" and op.inputs[2].op.type == "Const":
        yield "axis", int(tf.make_ndarray(op.inputs[2].op.node_def.attr["value"].tensor))
    if op.type in _OUTPUT_AXES:
        yield "output_axes", _OUTPUT_AXES[op.type]
    if op.type.startswith(("MaxPool", "AvgPool")):
        yield "kernel_shape", tuple(int(i) for i in attr["ksize"].list.i)


# The axes of a filter that do not add up: those of the output.
_OUTPUT_AXES: Final = {"Conv2D": (-1,), "Conv3D": (-1,), "DepthwiseConv2dNative": (-2, -1)}
