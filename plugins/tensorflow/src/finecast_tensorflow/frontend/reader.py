"""Reads a frozen graph into the neutral graph, with the binding from its ids to TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from finecast import ops
from finecast.frontends import SCALE
from finecast.graph import (
    INNER,
    Attribute,
    ConstantStats,
    Dim,
    Graph,
    GraphBuilder,
    Node,
    Value,
)
from finecast_tensorflow.frontend.functions import bodies
from finecast_tensorflow.frontend.library import FLOATS, Operation, Tensor, dtype_label, tf
from finecast_tensorflow.frontend.model import PLACEHOLDERS, FrozenModel
from finecast_tensorflow.frontend.regions import (
    GraphRegion,
    InputPort,
    Place,
    Slot,
    TypeTie,
    every_operation,
    fixed_types,
    is_handle,
    op_types,
    regions,
    ties,
)

_TRANSPOSES: Final = {"transpose_a": "transA", "transpose_b": "transB", "adj_x": "transA",
                      "adj_y": "transB"}  # fmt: skip
"""The names by which the core knows the attributes of products, by TensorFlow's names."""


@dataclass(slots=True, kw_only=True)
class GraphBinding:
    """What the ids of a Graph stand for.

    Attributes:
        model: The model that was read.
        regions: The model itself, then all bodies, by region number.
        nodes: Names of NodeDefs in their region, by node id; empty for a phi.
        slots: The places where nodes state their types, by node id.
        entries: The inputs of TensorFlow's that nodes' inputs are, by node id.
        values: Names of tensors in their region, ``NODE:INDEX``, by value id.
        value_regions: Numbers of regions, by value id.
    """

    model: FrozenModel
    regions: list[GraphRegion]
    nodes: list[str] = field(default_factory=list[str])
    slots: list[tuple[Slot, ...]] = field(default_factory=list[tuple[Slot, ...]])
    entries: list[tuple[InputPort, ...]] = field(default_factory=list[tuple[InputPort, ...]])
    values: list[str] = field(default_factory=list[str])
    value_regions: list[int] = field(default_factory=list[int])


def read(model: FrozenModel, digest: str = "") -> tuple[Graph, GraphBinding]:
    """Build the neutral graph; TensorFlow infers the shapes.

    Law: every tensor but handles is a Value, every op but constants and inputs a Node, in the
    bodies of control flow, too.
    """
    reader = _Reader(model)
    for region, op in every_operation(reader.binding.regions):
        reader.visit(region, op)
    return reader.finish(digest), reader.binding


class _Reader:
    def __init__(self, model: FrozenModel) -> None:
        graph_regions = regions(model)
        self.binding = GraphBinding(model=model, regions=graph_regions)
        self.builder: GraphBuilder[Place] = GraphBuilder()
        self.tensors: list[Tensor] = []
        self.constants: dict[int, ConstantStats] = {}
        self.inputs = {port.tensor: port for port in model.inputs}
        self.outputs = {port.tensor: port.name for port in model.outputs}
        self.ties: dict[Place, list[TypeTie]] = {}
        self.tied_inputs: set[InputPort] = set()
        self.tied_tensors: set[Place] = set()
        for tie in ties(graph_regions):
            self.ties.setdefault(tie.after, []).append(tie)
            self.tied_inputs.update(tie.inputs)
            self.tied_tensors.update((*tie.inner, *tie.outer))

    def visit(self, region: GraphRegion, op: Operation) -> None:
        """Add an operation, and the phis of the ties that may stand after it."""
        if op.type == "Const":
            value = self._value(region.number, op.outputs[0])
            self.constants[value] = _stats(op)
        elif op.type in PLACEHOLDERS:
            if not is_handle(op.outputs[0]):
                self._value(region.number, op.outputs[0])
        elif op.inputs or op.outputs:
            self._op(region, op)
        for index, tie in enumerate(self.ties.get((region.number, op.name), ())):
            self._phi(region, op, index, tie)

    def _value(self, region: int, tensor: Tensor) -> int:
        """The value that a tensor is."""
        value_id = self.builder.value((region, tensor.name))
        if value_id == len(self.tensors):
            self.tensors.append(tensor)
            self.binding.values.append(tensor.name)
            self.binding.value_regions.append(region)
        return value_id

    def _op(self, region: GraphRegion, op: Operation) -> None:
        at = region.number
        ports = [InputPort(region=at, node=op.name, index=i) for i in range(len(op.inputs))]
        inputs = tuple(
            None if p in self.tied_inputs or is_handle(t) else self._value(at, t)
            for p, t in zip(ports, op.inputs, strict=True)
        )
        outputs = tuple(
            None if (at, t.name) in self.tied_tensors or is_handle(t) else self._value(at, t)
            for t in op.outputs
        )
        native = f"tf::{op.type}"
        tied = bool(bodies(op.node_def)) or any(map(is_handle, (*op.inputs, *op.outputs)))
        scales = op.type in ("Mul", "AddV2") and op.name.startswith(SCALE)
        fixed = fixed_types(len(inputs), len(outputs)) if tied or scales else None
        types = fixed or op_types(op)
        slots = (Slot(region=at, node=op.name, attribute=types.attribute),)
        name = self.builder.fresh_name(f"{region.prefix}{op.name}")
        node = Node(
            id=len(self.builder.nodes),
            name=name,
            op=ops.lookup(native).name,
            native=native,
            inputs=inputs,
            outputs=outputs,
            follows_in=types.inputs,
            follows_out=types.outputs,
            format=types.format,
            admits=types.admits,
            attributes=dict(_attributes(op)),
            scope=name.rpartition("/")[0],
            region=at,
        )
        self._bind(op.name, slots if types.attribute else (), tuple(ports))
        self.builder.add(node)

    def _phi(self, region: GraphRegion, op: Operation, index: int, tie: TypeTie) -> None:
        """Add a phi, which joins the values that ``tie`` forces to have one type."""
        inputs = [self._read_at(entry) for entry in tie.inputs]
        outputs = [self._tensor_at(place) for place in (*tie.inner, *tie.outer)]
        types = {self.tensors[i].dtype.as_datatype_enum for i in (*inputs, *outputs)}
        fmt = FLOATS.get(types.pop()) if len(types) == 1 and not tie.fixed else None
        of = f"{self.binding.regions[tie.region].prefix}{tie.of.name}"
        self._bind("", tuple(tie.slots), tuple(tie.inputs))
        self.builder.add_phi(
            of,
            index,
            (inputs, outputs),
            fmt,
            admits=frozenset(FLOATS.values()),
            attributes={"of": tie.of.type, INNER: len(tie.inner)},
            region=tie.region,
        )

    def _read_at(self, entry: InputPort) -> int:
        region = self.binding.regions[entry.region]
        if entry.is_result:
            return self._tensor_at((entry.region, region.model.outputs[entry.index].tensor))
        op = region.graph.get_operation_by_name(entry.node)
        return self._value(entry.region, op.inputs[entry.index])

    def _tensor_at(self, place: Place) -> int:
        number, tensor = place
        graph = self.binding.regions[number].graph
        return self._value(number, graph.get_tensor_by_name(tensor))

    def _bind(
        self, native: str, slots: tuple[Slot, ...], entries: tuple[InputPort, ...]
    ) -> None:
        """Note what the next node stands for."""
        self.binding.nodes.append(native)
        self.binding.slots.append(slots)
        self.binding.entries.append(entries)

    def finish(self, digest: str) -> Graph:
        values = (self._finished(i, t) for i, t in enumerate(self.tensors))
        return self.builder.finish(values, digest)

    def _finished(self, number: int, tensor: Tensor) -> Value:
        plain: str = tensor.name
        region = self.binding.regions[self.binding.value_regions[number]]
        given = None if region.number else self.inputs.get(plain)
        output = None if region.number else self.outputs.get(plain)
        own = output or f"{region.prefix}{plain.removesuffix(':0')}"
        return Value(
            id=number,
            name=given.name if given else own,
            dtype=dtype_label(tensor.dtype),
            shape=given.shape if given else _shape(tensor),
            producer=self.builder.producer(number),
            uses=self.builder.uses(number),
            constant=self.constants.get(number),
            is_input=given is not None,
            is_output=output is not None,
        )


def _shape(tensor: Tensor) -> tuple[Dim, ...] | None:
    if tensor.shape.rank is None:
        return None
    sizes: Sequence[int | None] = tensor.shape.as_list()
    return tuple(sizes)


def _stats(op: Operation) -> ConstantStats:
    proto = op.node_def.attr["value"].tensor
    size = int(np.prod([d.size for d in proto.tensor_shape.dim], dtype=np.int64))
    return ConstantStats(size=size, read=partial(tf.make_ndarray, proto))


def _attributes(op: Operation) -> Iterator[tuple[str, Attribute]]:
    """Attributes that are numbers, text or lists of integers, and some that the core needs."""
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


# The axes of a filter that are not summed over, but are channels of the output.
_OUTPUT_AXES: Final = {"Conv2D": (-1,), "Conv3D": (-1,), "DepthwiseConv2dNative": (-2, -1)}
