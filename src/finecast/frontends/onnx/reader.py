"""Reads an ONNX model as the neutral graph, and keeps which ONNX objects its ids stand for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import onnx_ir as ir

from finecast.errors import ModelError
from finecast.frontends.onnx.constants import constant_reader, constant_tensor
from finecast.frontends.onnx.definitions import (
    FORMATS,
    Definition,
    dtype_label,
    following,
    labels_of,
    opset_of,
    signature,
)
from finecast.frontends.onnx.editor import FREE_INITIALIZERS, MARK, ROUNDING, Port
from finecast.frontends.onnx.folding import OnnxFolding
from finecast.frontends.onnx.types import bodies
from finecast.graph import (
    INNER,
    ROUNDS,
    SCALARS,
    Attribute,
    ConstantStats,
    Dim,
    Graph,
    Node,
    Value,
)
from finecast.graph.builder import GraphBuilder, scope_of, source_line
from finecast.numbers.encodings import Scaled
from finecast.numbers.formats import Format
from finecast.ops import lookup

# Notes of PyTorch's exporter on each node: the lines that made it, and its modules' paths.
_STACK_TRACE: Final = "pkg.torch.onnx.stack_trace"
_SCOPES: Final = "pkg.torch.onnx.name_scopes"
_CONTROL: Final = frozenset({"If", "Loop", "Scan"})
# Scan-8's first input was the lengths of the sequences.
_SCAN_WITHOUT_LENGTHS: Final = 9
_SCALAR_ATTRIBUTES: Final = {
    ir.AttributeType.INT,
    ir.AttributeType.FLOAT,
    ir.AttributeType.STRING,
}
# Attributes that hold operands: numbers that bound the result or fill it.
SCALAR_NAMES: Final = {
    "Clip": ("min", "max"),
    "Pad": ("value",),
    "ConstantOfShape": ("value",),
}
_LIST_ATTRIBUTES: Final = {
    ir.AttributeType.INTS,
    ir.AttributeType.FLOATS,
    ir.AttributeType.STRINGS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A body of the ONNX node ``owner``, which stands in the region ``parent``."""

    owner: ir.Node
    graph: ir.Graph
    parent: int


@dataclass(slots=True, kw_only=True)
class OnnxBinding:
    """Which ONNX objects the ids of a Graph stand for.

    ``nodes[i]`` is None for a phi, whose If, Loop or Scan is ``owners[i]``. ``ports[i]`` says
    for each input of node i where its value enters the ONNX node or body. ``bodies`` are those
    of control flow, by region. ``folded`` are the numbers of values that nodes compute from
    constants alone.
    """

    model: ir.Model
    nodes: list[ir.Node | None] = field(default_factory=list[ir.Node | None])
    ports: list[tuple[Port | None, ...]] = field(default_factory=list[tuple[Port | None, ...]])
    values: list[ir.Value] = field(default_factory=list[ir.Value])
    owners: dict[int, ir.Node] = field(default_factory=dict[int, ir.Node])
    bodies: dict[int, Body] = field(default_factory=dict[int, Body])
    folded: Mapping[ir.Value, ir.TensorProtocol] = field(
        default_factory=dict[ir.Value, ir.TensorProtocol]
    )

    def constant(self, value: ir.Value) -> ir.TensorProtocol | None:
        """The numbers of a constant, or of a value that is computed from constants alone."""
        return self.folded.get(value) or constant_tensor(value)


def read(
    model: ir.Model,
    *,
    digest: str = "",
    came_as: Mapping[str, Scaled] | None = None,
) -> tuple[Graph, OnnxBinding]:
    """Build the neutral graph of ``model``, with the nodes of bodies.

    Law: every tensor of the model is a Value and every op a Node; Constant nodes are Values,
    and so are nodes that compute floats from constants alone.

    Args:
        model: The model, its nodes named and its types inferred.
        digest: The digest of the file, for the graph.
        came_as: How values were encoded before they were converted to fp32, by name.
    """
    reader = _Reader(model)
    reader.came_as = came_as or {}
    reader.graph(model.graph, region=0)
    return reader.finish(digest), reader.binding


class _Reader:
    def __init__(self, model: ir.Model) -> None:
        self.binding = OnnxBinding(model=model)
        self.opset = opset_of(model)
        names = (n.name or "" for n in model.graph.all_nodes())
        self.builder: GraphBuilder[ir.Value] = GraphBuilder(names)
        self.binding.values = self.builder.keys
        self.regions = 0
        self.inputs = runtime_inputs(model)
        self.outputs = set(model.graph.outputs)
        self.came_as: Mapping[str, Scaled] = {}
        self.folding = OnnxFolding(self.opset)
        self.binding.folded = self.folding.tensors

    def value(self, value: ir.Value | None) -> int | None:
        return None if value is None else self.builder.value(value)

    def graph(self, graph: ir.Graph, region: int, *, fixed: bool = False) -> None:
        for value in (*graph.inputs, *graph.initializers.values()):
            self.value(value)
            if value not in self.inputs:
                self.folding.add(value)
        for node in graph:
            if node.op_type == "Constant" and not node.domain:
                self.value(node.outputs[0])  # a constant value, not an op
                self.folding.add(node.outputs[0])
                continue
            if self.folding.fold(node):
                continue
            self.node(node, region, fixed=fixed)
        for value in graph.outputs:
            self.value(value)

    def node(self, node: ir.Node, region: int, *, fixed: bool) -> None:
        """Add a node, after those of its bodies; in a ``fixed`` body it keeps its types."""
        inner = list(bodies(node))
        # Which values the bodies of other ops (FlexAttention, SequenceMap) tie is not known.
        opaque = bool(inner) and node.op_type not in _CONTROL
        for body in inner:
            self.regions += 1
            self.binding.bodies[self.regions] = Body(owner=node, graph=body, parent=region)
            self.graph(body, self.regions, fixed=fixed or opaque)
        native = f"{node.domain or 'onnx'}::{node.op_type}"
        op_signature = signature(node.op_type, node.domain, self.opset)
        admits = op_signature.admits if op_signature else frozenset[Format]()
        if op_signature is not None:
            _check_ports(node, op_signature.definition)
        merges = list(_merges_of(node, inner, self.opset)) if inner and not opaque else []
        merged = {p.index for m in merges for p in m.inputs if p.owner is node}
        inputs = [v if i not in merged else None for i, v in enumerate(node.inputs)]
        outputs = list(node.outputs) if not merges else []
        fixed |= node.metadata_props.get(MARK) == ""
        if fixed or inner or op_signature is None:
            flags_in, flags_out = (False,) * len(inputs), (False,) * len(outputs)
            fmt = None
        else:
            flags_in, flags_out, fmt = following(
                node.op_type, node.domain, self.opset, labels_of(inputs), labels_of(outputs)
            )
        self.binding.nodes.append(node)
        self.binding.ports.append(
            tuple(
                None if v is None else Port(owner=node, index=i) for i, v in enumerate(inputs)
            )
        )
        self.builder.add(
            Node(
                id=len(self.builder.nodes),
                name=node.name or "",
                op=lookup(native).name,
                native=native,
                inputs=tuple(map(self.value, inputs)),
                outputs=tuple(map(self.value, outputs)),
                follows_in=flags_in,
                follows_out=flags_out,
                format=fmt,
                admits=admits if fmt else frozenset(),
                attributes=dict(_attributes(node)),
                scope=_scope(node),
                region=region,
                source=source_line(node.metadata_props.get(_STACK_TRACE, "")),
            )
        )
        for merge in merges:
            self.phi(node, merge, region, admits, fixed=fixed)

    def phi(
        self,
        node: ir.Node,
        merge: _Merge,
        region: int,
        admits: frozenset[Format],
        *,
        fixed: bool,
    ) -> None:
        """Add the node that ties the values which ``node`` makes share a type."""
        sources = [p.value() for p in merge.inputs]
        labels = {dtype_label(v.type) for v in (*sources, *merge.outputs)}
        inner = sum(v.producer() is not node for v in merge.outputs)
        shared = labels.pop() if len(labels) == 1 and not fixed else ""
        self.binding.owners[len(self.builder.nodes)] = node
        self.binding.nodes.append(None)
        self.binding.ports.append(tuple(merge.inputs))
        self.builder.add_phi(
            node.name or "",
            merge.name,
            (
                [self.builder.value(v) for v in sources],
                [self.builder.value(v) for v in merge.outputs],
            ),
            FORMATS.get(shared),
            admits=admits,
            attributes={"of": node.op_type, "port": merge.name, INNER: inner},
            region=region,
        )

    def finish(self, digest: str) -> Graph:
        values = (
            Value(
                id=i,
                name=v.name or f"value_{i}",
                dtype=dtype_label(v.type),
                shape=self._shape(v),
                producer=self.builder.producer(i),
                uses=self.builder.uses(i),
                constant=self._constant(v),
                is_input=v in self.inputs,
                is_output=v in self.outputs,
                came_as=self.came_as.get(v.name or ""),
            )
            for i, v in enumerate(self.binding.values)
        )
        graph = self.binding.model.graph
        inputs = [v.name or "" for v in graph.inputs if v in self.inputs]
        return self.builder.finish(
            values, digest, inputs, [v.name or "" for v in graph.outputs]
        )

    def _shape(self, value: ir.Value) -> tuple[Dim, ...] | None:
        """What the model states; of what constants alone give, what that has."""
        folded = self.folding.tensors.get(value)
        return _shape(value) if folded is None else tuple(folded.shape.numpy())

    def _constant(self, value: ir.Value) -> ConstantStats | None:
        tensor = self.binding.constant(value)
        if tensor is None or value in self.inputs:
            return None
        return ConstantStats(size=tensor.size, read=constant_reader(tensor))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Merge:
    """Values of one type by control flow: what ``inputs`` read comes out as ``outputs``."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[ir.Value, ...]


def _merges_of(node: ir.Node, inner: list[ir.Graph], opset: int) -> Iterator[_Merge]:
    """Values that ``node`` forces to share one type, by ONNX's definition of the op.

    Args:
        node: An If, Loop or Scan.
        inner: Its bodies.
        opset: The model's opset.
    """
    if node.op_type == "If":
        for i, out in enumerate(node.outputs):
            ends = tuple(Port(owner=b, index=i) for b in inner)
            yield _Merge(name=f"out{i}", inputs=ends, outputs=(out,))
        return
    # The first inputs and outputs of the node and of its body that hold the state; those
    # before are the trip count and conditions. Then come the inputs and outputs of each step.
    body, scanned = inner[0], 0
    first, body_in, body_out = 2, 2, 1
    if node.op_type == "Scan":
        first, body_in, body_out = int(opset < _SCAN_WITHOUT_LENGTHS), 0, 0
        scanned = int(node.attributes["num_scan_inputs"].as_int())
    state = len(node.inputs) - first - scanned
    for i in range(state):
        start, end = Port(owner=node, index=i + first), Port(owner=body, index=i + body_out)
        starts = (start,) if node.inputs[start.index] is not None else ()
        outputs = body.inputs[i + body_in], node.outputs[i]
        yield _Merge(name=f"state{i}", inputs=(*starts, end), outputs=outputs)
    for i in range(state, state + scanned):
        start = Port(owner=node, index=i + first)
        yield _Merge(name=f"in{i}", inputs=(start,), outputs=(body.inputs[i],))
    for i in range(state, len(node.outputs)):
        end = Port(owner=body, index=i + body_out)
        yield _Merge(name=f"scan{i}", inputs=(end,), outputs=(node.outputs[i],))


def _check_ports(node: ir.Node, defined: Definition) -> None:
    """Raise ModelError if ``node`` has fewer ports than its op is defined with."""
    inputs, outputs = len(node.inputs), len(node.outputs)
    if inputs < defined.inputs.least or outputs < defined.outputs.least:
        raise ModelError(
            f"{node.op_type} has {inputs} inputs and {outputs} outputs, and is defined with "
            f"{defined.inputs.least} and {defined.outputs.least} or more",
            where=f"node {node.name!r}",
            fix="run onnx.checker on the model, and export it again",
        )


def runtime_inputs(model: ir.Model) -> set[ir.Value]:
    """Inputs that a caller gives: not initializers, which old IR versions list as inputs."""
    inputs = set(model.graph.inputs)
    if (model.ir_version or 0) < FREE_INITIALIZERS:
        inputs -= set(model.graph.initializers.values())
    return inputs


def _attributes(node: ir.Node) -> Iterator[tuple[str, Attribute]]:
    rounding = node.metadata_props.get(ROUNDING)
    if rounding is not None:
        yield ROUNDS, rounding.partition(" ")[0]
    operands = [n for n in SCALAR_NAMES.get(node.op_type, ()) if n in node.attributes]
    if operands and not node.domain:
        yield SCALARS, tuple(n for name in operands for n in _numbers(node.attributes[name]))
    for name, attribute in node.attributes.items():
        if attribute.is_ref():
            continue
        if attribute.type in _SCALAR_ATTRIBUTES:
            yield name, attribute.value
        elif attribute.type in _LIST_ATTRIBUTES:
            yield name, tuple(attribute.value)


def _scope(node: ir.Node) -> str:
    """The module that a node was exported from, where PyTorch noted it; else by its name."""
    stated = node.metadata_props.get(_SCOPES)
    scopes: list[str] = re.findall(r"'([^']*)'", stated) if stated else []
    # The last one is the node's own name, in front of it is the innermost module's path.
    return scopes[-2] if len(scopes) > 1 else scope_of(node.name or "")


def _numbers(attribute: ir.Attr) -> list[float]:
    """The number of a float attribute, or of a tensor of one element; else none."""
    if attribute.is_ref():
        return []
    if attribute.type is ir.AttributeType.FLOAT:
        return [attribute.as_float()]
    if attribute.type is ir.AttributeType.TENSOR and attribute.as_tensor().size == 1:
        return [float(attribute.as_tensor().numpy().reshape(-1)[0])]
    return []


def _shape(value: ir.Value) -> tuple[Dim, ...] | None:
    if value.shape is None:
        return None
    return tuple(d if isinstance(d, int) else (d.value or None) for d in value.shape)
