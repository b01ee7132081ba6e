"""From an ONNX model to the neutral graph, and the bindings that lead back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import onnx_ir as ir

from finecast import ops
from finecast.formats import Format
from finecast.frontends.onnx.opset import opset_of
from finecast.frontends.onnx.schema import Signature, signature
from finecast.graph import Attribute, ConstantStats, Dim, Graph, Node, Value

PHI: Final = "phi"

_DTYPE_LABELS: Final = {
    ir.DataType.FLOAT: "fp32",
    ir.DataType.FLOAT16: "fp16",
    ir.DataType.BFLOAT16: "bf16",
    ir.DataType.DOUBLE: "fp64",
    ir.DataType.FLOAT8E4M3FN: "fp8_e4m3",
    ir.DataType.FLOAT8E5M2: "fp8_e5m2",
}
DATA_TYPES: Final = {
    Format.FP32: ir.DataType.FLOAT,
    Format.FP16: ir.DataType.FLOAT16,
    Format.BF16: ir.DataType.BFLOAT16,
    Format.FP8_E4M3: ir.DataType.FLOAT8E4M3FN,
    Format.FP8_E5M2: ir.DataType.FLOAT8E5M2,
}
_SCALAR_ATTRIBUTES: Final = {
    ir.AttributeType.INT,
    ir.AttributeType.FLOAT,
    ir.AttributeType.STRING,
}
_LIST_ATTRIBUTES: Final = {
    ir.AttributeType.INTS,
    ir.AttributeType.FLOATS,
    ir.AttributeType.STRINGS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """Where a value enters a node: an input of an ONNX node, or an output of a body."""

    owner: ir.Node | ir.Graph
    index: int


@dataclass(slots=True, kw_only=True)
class Binding:
    """Which ONNX objects the ids of a Graph stand for.

    ``nodes[i]`` is None for a phi; ``ports[i]`` has one entry for each of node i's inputs.
    """

    model: ir.Model
    nodes: list[ir.Node | None] = field(default_factory=list[ir.Node | None])
    ports: list[tuple[Port | None, ...]] = field(default_factory=list[tuple[Port | None, ...]])
    values: list[ir.Value] = field(default_factory=list[ir.Value])


def dtype_label(kind: ir.TypeProtocol | None) -> str:
    """A value's type as the graph names it: ``fp32``, ``int64``, ``sequence(fp32)``."""
    if kind is None:
        return "unknown"
    if isinstance(kind, ir.TensorType):
        return _DTYPE_LABELS.get(kind.dtype, kind.dtype.name.lower())
    inner = getattr(kind, "elem_type", None)
    name = type(kind).__name__.removesuffix("Type").lower()
    return f"{name}({dtype_label(inner) if not isinstance(inner, ir.DataType) else inner.name})"


def name_nodes(model: ir.Model) -> None:
    """Give every node a unique, non-empty name, keeping those that already are."""
    seen: set[str] = set()
    for number, node in enumerate(model.graph.all_nodes()):
        name = node.name or f"{node.op_type}_{number}"
        while name in seen:
            name = f"{name}_{number}"
        seen.add(name)
        node.name = name


def read(model: ir.Model, *, digest: str = "") -> tuple[Graph, Binding]:
    """Build the neutral graph of ``model``; bodies of If, Loop and Scan are opened.

    Law: every float tensor of the model is a Value, every node that may change type a Node.
    """
    reader = _Reader(model)
    reader.graph(model.graph, region=0)
    return reader.finish(digest), reader.binding


class _Reader:
    def __init__(self, model: ir.Model) -> None:
        self.binding = Binding(model=model)
        self.opset = opset_of(model)
        self.ids: dict[ir.Value, int] = {}
        self.nodes: list[Node] = []
        self.producers: dict[int, int] = {}
        self.uses: dict[int, list[int]] = {}
        self.regions = 0
        self.inputs = _runtime_inputs(model)
        self.outputs = set(model.graph.outputs)

    def value(self, value: ir.Value | None) -> int | None:
        if value is None:
            return None
        if value not in self.ids:
            self.ids[value] = len(self.binding.values)
            self.binding.values.append(value)
        return self.ids[value]

    def graph(self, graph: ir.Graph, region: int) -> None:
        for value in (*graph.inputs, *graph.initializers.values()):
            self.value(value)
        for node in graph:
            if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
                self.value(node.outputs[0])  # a constant value, not an op
                continue
            self.node(node, region)
        for value in graph.outputs:
            self.value(value)

    def node(self, node: ir.Node, region: int) -> None:
        bodies = list(_bodies(node))
        for body in bodies:
            self.regions += 1
            self.graph(body, self.regions)
        merges = list(_merges(node, bodies)) if bodies else []
        merged = {p.index for m in merges for p in m.inputs if p.owner is node}
        found = signature(node.op_type, node.domain, self.opset)
        inputs = [v if i not in merged else None for i, v in enumerate(node.inputs)]
        outputs = list(node.outputs) if not merges else []
        flags_in = self._flags(inputs, found, output=False)
        flags_out = self._flags(outputs, found, output=True)
        fmt = _own_format(inputs, outputs, flags_in, flags_out)
        info = ops.lookup(f"{node.domain or 'onnx'}::{node.op_type}")
        self._add(
            node,
            tuple(Port(owner=node, index=i) if v else None for i, v in enumerate(inputs)),
            Node(
                id=len(self.nodes),
                name=node.name or "",
                op=info.name,
                native=f"{node.domain or 'onnx'}::{node.op_type}",
                inputs=tuple(self.value(v) for v in inputs),
                outputs=tuple(self.value(v) for v in outputs),
                follows_in=flags_in,
                follows_out=flags_out,
                format=fmt,
                admits=_admitted(found, self.opset) if fmt else frozenset(),
                attributes=dict(_attributes(node)),
                scope=_scope(node.name or ""),
                region=region,
            ),
        )
        for merge in merges:
            self.phi(node, merge, region)

    def phi(self, node: ir.Node, merge: _Merge, region: int) -> None:
        sources = [_port_value(p) for p in merge.inputs]
        labels = {dtype_label(v.type) for v in (*sources, *merge.outputs)}
        fmt = Format.FP32 if labels == {"fp32"} else None
        self._add(
            None,
            tuple(merge.inputs),
            Node(
                id=len(self.nodes),
                name=f"{node.name}/{PHI}_{merge.name}",
                op=PHI,
                native=f"finecast::{PHI}",
                inputs=tuple(self.value(v) for v in sources),
                outputs=tuple(self.value(v) for v in merge.outputs),
                follows_in=(fmt is not None,) * len(sources),
                follows_out=(fmt is not None,) * len(merge.outputs),
                format=fmt,
                admits=frozenset(DATA_TYPES) if fmt else frozenset(),
                scope=node.name or "",
                region=region,
            ),
        )

    def _add(self, native: ir.Node | None, ports: tuple[Port | None, ...], node: Node) -> None:
        self.binding.nodes.append(native)
        self.binding.ports.append(ports)
        self.nodes.append(node)
        for index in dict.fromkeys(node.inputs):
            if index is not None:
                self.uses.setdefault(index, []).append(node.id)
        for index in node.outputs:
            if index is not None:
                self.producers[index] = node.id

    def _flags(
        self, values: Sequence[ir.Value | None], found: Signature | None, *, output: bool
    ) -> tuple[bool, ...]:
        return tuple(
            v is not None
            and found is not None
            and found.follows(i, output=output)
            and dtype_label(v.type) in FOLLOWING_LABELS
            for i, v in enumerate(values)
        )

    def finish(self, digest: str) -> Graph:
        values = tuple(
            Value(
                id=i,
                name=v.name or f"value_{i}",
                dtype=dtype_label(v.type),
                shape=_shape(v),
                producer=self.producers.get(i),
                uses=tuple(self.uses.get(i, ())),
                constant=self._constant(v),
                is_input=v in self.inputs,
                is_output=v in self.outputs,
            )
            for i, v in enumerate(self.binding.values)
        )
        return Graph(nodes=tuple(self.nodes), values=values, digest=digest)

    def _constant(self, value: ir.Value) -> ConstantStats | None:
        tensor = constant_tensor(value)
        if tensor is None or value in self.inputs:
            return None
        return ConstantStats(size=tensor.size, read=tensor.numpy)


FOLLOWING_LABELS: Final = frozenset({"fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"})


def constant_tensor(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor of an initializer or of a ``Constant`` node's output; None otherwise."""
    if value.const_value is not None and value.is_initializer():
        return value.const_value
    node = value.producer()
    if node is None or node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    return ir.convenience.get_const_tensor(value)


def _runtime_inputs(model: ir.Model) -> set[ir.Value]:
    """Inputs that a caller gives. Before IR 4 every initializer had to be listed as one."""
    inputs = set(model.graph.inputs)
    if (model.ir_version or 0) < 4:
        inputs -= set(model.graph.initializers.values())
    return inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Merge:
    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[ir.Value, ...]


def _bodies(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type is ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type is ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def _merges(node: ir.Node, bodies: list[ir.Graph]) -> Iterator[_Merge]:
    """Values that ``node`` forces to share one type, by the ONNX definitions of the ops.

    Bodies of other ops stay as they are: nothing is known of their ties.
    """
    if node.op_type == "If":
        for i, out in enumerate(node.outputs):
            ends = tuple(Port(owner=b, index=i) for b in bodies)
            yield _Merge(name=f"out{i}", inputs=ends, outputs=(out,))
    elif node.op_type == "Loop":
        body, state = bodies[0], len(node.inputs) - 2
        yield from _carried(node, body, range(state), input_offset=2, body_in=2, body_out=1)
        for i in range(state, len(node.outputs)):
            end = Port(owner=body, index=i + 1)
            yield _Merge(name=f"scan{i}", inputs=(end,), outputs=(node.outputs[i],))
    elif node.op_type == "Scan":
        body = bodies[0]
        scanned = int(node.attributes["num_scan_inputs"].as_int())
        state = len(node.inputs) - scanned
        yield from _carried(node, body, range(state), input_offset=0, body_in=0, body_out=0)
        for i in range(state, len(node.inputs)):
            start = Port(owner=node, index=i)
            yield _Merge(name=f"in{i}", inputs=(start,), outputs=(body.inputs[i],))
        for i in range(state, len(node.outputs)):
            end = Port(owner=body, index=i)
            yield _Merge(name=f"scan{i}", inputs=(end,), outputs=(node.outputs[i],))


def _carried(
    node: ir.Node,
    body: ir.Graph,
    indices: range,
    *,
    input_offset: int,
    body_in: int,
    body_out: int,
) -> Iterator[_Merge]:
    for i in indices:
        start = Port(owner=node, index=i + input_offset)
        end = Port(owner=body, index=i + body_out)
        given = (start,) if node.inputs[start.index] is not None else ()
        yield _Merge(
            name=f"state{i}",
            inputs=(*given, end),
            outputs=(body.inputs[i + body_in], node.outputs[i]),
        )


def _port_value(port: Port) -> ir.Value:
    if isinstance(port.owner, ir.Node):
        value = port.owner.inputs[port.index]
        assert value is not None
        return value
    return port.owner.outputs[port.index]


def _own_format(
    inputs: Sequence[ir.Value | None],
    outputs: Sequence[ir.Value | None],
    flags_in: tuple[bool, ...],
    flags_out: tuple[bool, ...],
) -> Format | None:
    """The one format of all following ports; None if there is none, or they differ."""
    labels = {
        dtype_label(v.type)
        for v, follows in zip((*outputs, *inputs), (*flags_out, *flags_in), strict=True)
        if follows and v is not None
    }
    return Format.parse(labels.pop()) if len(labels) == 1 else None


def _admitted(found: Signature | None, opset: int) -> frozenset[Format]:
    return frozenset(f for f, since in found.since if since <= opset) if found else frozenset()


def _attributes(node: ir.Node) -> Iterator[tuple[str, Attribute]]:
    for name, attribute in node.attributes.items():
        if attribute.is_ref():
            continue
        if attribute.type in _SCALAR_ATTRIBUTES:
            yield name, attribute.value
        elif attribute.type in _LIST_ATTRIBUTES:
            yield name, tuple(attribute.value)


def _scope(name: str) -> str:
    return name.rsplit("/", 1)[0].rsplit(".", 1)[0] if "/" in name or "." in name else ""


def _shape(value: ir.Value) -> tuple[Dim, ...] | None:
    if value.shape is None:
        return None
    return tuple(d if isinstance(d, int) else (d.value or None) for d in value.shape)

