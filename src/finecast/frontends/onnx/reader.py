"""From an ONNX model to the neutral graph, and the bindings that lead back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import onnx_ir as ir

from finecast import ops
from finecast.formats import Format
from finecast.frontends.onnx.constants import (
    DATA_TYPES,
    MARK,
    constant_reader,
    constant_tensor,
)
from finecast.frontends.onnx.definitions import normal_domain
from finecast.frontends.onnx.opset import opset_of
from finecast.frontends.onnx.schema import Signature, signature
from finecast.frontends.onnx.ties import CONTROL, Merge, Port, merges_of, port_value
from finecast.frontends.onnx.types import bodies, every_node
from finecast.graph import Attribute, ConstantStats, Dim, Graph, Node, Value

__all__ = [
    "DATA_TYPES",
    "PHI",
    "Binding",
    "Port",
    "constant_tensor",
    "dtype_label",
    "name_nodes",
    "read",
]

PHI: Final = "phi"

_DTYPE_LABELS: Final = {d: d.name.lower() for d in ir.DataType} | {
    ir.DataType.FLOAT: "fp32",
    ir.DataType.FLOAT16: "fp16",
    ir.DataType.BFLOAT16: "bf16",
    ir.DataType.DOUBLE: "fp64",
    ir.DataType.FLOAT8E4M3FN: "fp8_e4m3",
    ir.DataType.FLOAT8E5M2: "fp8_e5m2",
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


@dataclass(slots=True, kw_only=True)
class Binding:
    """Which ONNX objects the ids of a Graph stand for.

    ``nodes[i]`` is None for a phi, whose If, Loop or Scan is ``owners[i]``; ``ports[i]`` has
    one entry for each of node i's inputs.
    """

    model: ir.Model
    nodes: list[ir.Node | None] = field(default_factory=list[ir.Node | None])
    ports: list[tuple[Port | None, ...]] = field(default_factory=list[tuple[Port | None, ...]])
    values: list[ir.Value] = field(default_factory=list[ir.Value])
    owners: dict[int, ir.Node] = field(default_factory=dict[int, ir.Node])


def dtype_label(kind: ir.TypeProtocol | None) -> str:
    """A value's type as the graph names it: ``fp32``, ``int64``, ``sequence(fp32)``."""
    if kind is None:
        return _UNKNOWN
    if isinstance(kind, ir.TensorType):
        return _DTYPE_LABELS[kind.dtype]
    inner = getattr(kind, "elem_type", None)
    name = type(kind).__name__.removesuffix("Type").lower()
    return (
        f"{name}({dtype_label(inner) if not isinstance(inner, ir.DataType) else inner.name})"
    )


def name_nodes(model: ir.Model) -> None:
    """Give every node a unique, non-empty name, keeping those that already are."""
    nodes = list(every_node(model.graph))
    kept: set[str] = set()
    renamed: list[tuple[int, ir.Node]] = []
    for number, node in enumerate(nodes):
        if node.name and node.name not in kept:
            kept.add(node.name)
        else:
            renamed.append((number, node))
    for number, node in renamed:
        name = base = f"{node.name or node.op_type}_{number}"
        for attempt in itertools.count():
            if name not in kept:
                break
            name = f"{base}_{attempt}"
        kept.add(name)
        node.name = name


def read(
    model: ir.Model, *, digest: str = "", own_casts: bool = False
) -> tuple[Graph, Binding]:
    """Build the neutral graph of ``model``; bodies of If, Loop and Scan are opened.

    Law: every float tensor of the model is a Value, every node that may change type a Node.

    Args:
        model: The model, its nodes named and its types inferred.
        digest: Of the file, for the graph.
        own_casts: Whether casts that an earlier conversion put in may change format, too.
    """
    reader = _Reader(model, own_casts=own_casts)
    reader.graph(model.graph, region=0)
    return reader.finish(digest), reader.binding


class _Reader:
    def __init__(self, model: ir.Model, *, own_casts: bool) -> None:
        self.own_casts = own_casts
        self.binding = Binding(model=model)
        self.opset = opset_of(model)
        self.ids: dict[ir.Value, int] = {}
        self.nodes: list[Node] = []
        self.producers: dict[int, int] = {}
        self.uses: dict[int, list[int]] = {}
        self.regions = 0
        self.names = {n.name for n in every_node(model.graph)}
        self.inputs = _runtime_inputs(model)
        self.outputs = set(model.graph.outputs)

    def value(self, value: ir.Value | None) -> int | None:
        if value is None:
            return None
        if value not in self.ids:
            self.ids[value] = len(self.binding.values)
            self.binding.values.append(value)
        return self.ids[value]

    def graph(self, graph: ir.Graph, region: int, *, fixed: bool = False) -> None:
        for value in (*graph.inputs, *graph.initializers.values()):
            self.value(value)
        for node in graph:
            if node.op_type == "Constant" and not normal_domain(node.domain):
                self.value(node.outputs[0])  # a constant value, not an op
                continue
            self.node(node, region, fixed=fixed)
        for value in graph.outputs:
            self.value(value)

    def node(self, node: ir.Node, region: int, *, fixed: bool) -> None:
        """Add a node; in a ``fixed`` body it keeps the types it has."""
        inner = list(bodies(node))
        # Of bodies of other ops (FlexAttention, SequenceMap) it is not known what ties them.
        opaque = bool(inner) and node.op_type not in CONTROL
        for body in inner:
            self.regions += 1
            self.graph(body, self.regions, fixed=fixed or opaque)
        domain = normal_domain(node.domain)
        found = _described(node.op_type, domain, self.opset)
        merges = list(merges_of(node, inner, self.opset)) if inner and not opaque else []
        merged = {p.index for m in merges for p in m.inputs if p.owner is node}
        inputs = [v if i not in merged else None for i, v in enumerate(node.inputs)]
        outputs = list(node.outputs) if not merges else []
        fixed |= node.metadata_props.get(MARK) == "" and not self.own_casts
        if fixed or inner or found.signature is None:
            flags_in, flags_out = (False,) * len(inputs), (False,) * len(outputs)
            fmt = None
        else:
            labels_in, labels_out = _labels(inputs), _labels(outputs)
            flags_in, flags_out = _flags(labels_in, labels_out, found.signature)
            fmt = _own_format((*labels_out, *labels_in), (*flags_out, *flags_in))
        self._add(
            node,
            tuple(
                None if v is None else Port(owner=node, index=i) for i, v in enumerate(inputs)
            ),
            Node(
                id=len(self.nodes),
                name=node.name or "",
                op=found.op,
                native=found.native,
                inputs=tuple(map(self.value, inputs)),
                outputs=tuple(map(self.value, outputs)),
                follows_in=flags_in,
                follows_out=flags_out,
                format=fmt,
                admits=found.admits if fmt else frozenset(),
                attributes=dict(_attributes(node)),
                scope=_scope(node.name or ""),
                region=region,
            ),
        )
        for merge in merges:
            self.phi(node, merge, region, found.admits, fixed=fixed)

    def phi(
        self,
        node: ir.Node,
        merge: Merge,
        region: int,
        admits: frozenset[Format],
        *,
        fixed: bool,
    ) -> None:
        sources = [port_value(p) for p in merge.inputs]
        labels = {dtype_label(v.type) for v in (*sources, *merge.outputs)}
        shared = labels.pop() if len(labels) == 1 and not fixed else ""
        fmt = _FORMATS[shared] if shared in FOLLOWING_LABELS else None
        self.binding.owners[len(self.nodes)] = node
        name = f"{node.name}/{PHI}_{merge.name}"
        while name in self.names:
            name += "_"
        self.names.add(name)
        self._add(
            None,
            tuple(merge.inputs),
            Node(
                id=len(self.nodes),
                name=name,
                op=PHI,
                native=f"finecast::{PHI}",
                inputs=tuple(self.value(v) for v in sources),
                outputs=tuple(self.value(v) for v in merge.outputs),
                follows_in=(fmt is not None,) * len(sources),
                follows_out=(fmt is not None,) * len(merge.outputs),
                format=fmt,
                admits=admits if fmt else frozenset(),
                attributes={"of": node.op_type, "port": merge.name},
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
        return ConstantStats(size=tensor.size, read=constant_reader(tensor))


FOLLOWING_LABELS: Final = frozenset({"fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Described:
    op: str
    native: str
    signature: Signature | None
    admits: frozenset[Format]


@lru_cache(maxsize=8192)
def _described(op_type: str, domain: str, opset: int) -> _Described:
    native = f"{domain or 'onnx'}::{op_type}"
    found = signature(op_type, domain, opset)
    return _Described(
        op=ops.lookup(native).name,
        native=native,
        signature=found,
        admits=frozenset(f for f, since in found.since if since <= opset)
        if found
        else frozenset(),
    )


_ABSENT: Final = ""
_UNKNOWN: Final = "unknown"


def _labels(values: Sequence[ir.Value | None]) -> list[str]:
    """Types by port; empty where nothing is given or nothing is taken."""
    return [
        _ABSENT if v is None or (v.type is None and not v.name) else dtype_label(v.type)
        for v in values
    ]


def _flags(
    inputs: Sequence[str], outputs: Sequence[str], found: Signature
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Which ports follow; none if one that could has a type that is not known."""
    kept = (False,) * len(inputs), (False,) * len(outputs)
    if not _computes_in_float(inputs, outputs, found):
        return kept
    flags: list[tuple[bool, ...]] = []
    for labels, output in ((inputs, False), (outputs, True)):
        following = [found.follows(i, output=output) for i in range(len(labels))]
        if any(f and label == _UNKNOWN for f, label in zip(following, labels, strict=True)):
            return kept
        flags.append(
            tuple(
                f and label in FOLLOWING_LABELS
                for f, label in zip(following, labels, strict=True)
            )
        )
    return flags[0], flags[1]


def _computes_in_float(
    inputs: Sequence[str], outputs: Sequence[str], found: Signature
) -> bool:
    labels = outputs if found.anchor_is_output else inputs
    if found.anchor is None or found.anchor >= len(labels):
        return found.anchor is not None
    label = labels[found.anchor]
    return label in FOLLOWING_LABELS or label in (_ABSENT, _UNKNOWN)


def _runtime_inputs(model: ir.Model) -> set[ir.Value]:
    """Inputs that a caller gives. Before IR 4 every initializer had to be listed as one."""
    inputs = set(model.graph.inputs)
    if (model.ir_version or 0) < 4:
        inputs -= set(model.graph.initializers.values())
    return inputs


def _own_format(labels: Sequence[str], flags: Sequence[bool]) -> Format | None:
    """The one format of all following ports; None if there is none, or they differ."""
    found = {label for label, follows in zip(labels, flags, strict=True) if follows}
    return _FORMATS[found.pop()] if len(found) == 1 else None


_FORMATS: Final = {f.label: f for f in Format}


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
