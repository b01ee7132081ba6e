"""From an ``ov.Model`` to the neutral graph, and the bindings that lead back."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from finecast import ops
from finecast.frontends.openvino.bodies import Entry, Region, Tie, bodies, every_op, ties_of
from finecast.frontends.openvino.changes import Changes, changes_of
from finecast.frontends.openvino.definitions import OpTypes
from finecast.frontends.openvino.types import FORMATS, label_of, numbers_of
from finecast.frontends.scopes import scope_of
from finecast.graph import (
    INNER,
    PHI,
    ROUNDS,
    SCALARS,
    Attribute,
    ConstantStats,
    Dim,
    Graph,
    Node,
    Value,
)
from finecast.numbers.formats import Format
from finecast.ops import OpKind

if TYPE_CHECKING:
    import openvino

    Port = tuple[str, int]  # the op's name, and which of its results

# Constants that nobody reads as numbers: packed, or text.
_OPAQUE: Final = frozenset(
    {"string", "undefined", "dynamic", "u1", "u2", "u3", "u4", "u6", "i4"}
)
# A name that OpenVINO gave: the kind of an op, which is written in one word, and a number.
_COUNTED: Final = re.compile(r"(?P<kind>[A-Z][A-Za-z0-9]*)_\d+")
_PORTS: Final = frozenset({"Parameter", "Result", "Constant"})
# What control flow hands on: any type, of which OpenVINO computes in these.
_ADMITS: Final = frozenset({Format.FP32, Format.BF16, Format.FP16})
# What the core calls by the names that ONNX gave it.
_RENAMED: Final[Mapping[str, str]] = {
    "transpose_a": "transA",
    "transpose_b": "transB",
    "keep_dims": "keepdims",
    "kernel": "kernel_shape",
}
# Attributes that are operands: numbers that the result is bounded by.
_SCALARS: Final = {"Clamp": ("min", "max")}
# Ops whose axis is an input, with its index.
_AXIS_INPUTS: Final = {"Gather": 2}


@dataclass(slots=True, kw_only=True)
class OvBinding:
    """Which objects of OpenVINO the ids of a Graph stand for.

    ``nodes[i]`` is None for a phi, and ``entries[i]`` has one for each of node i's inputs.
    ``constants`` are those that a value's numbers come from: the op of its port, or the one
    behind a conversion that only widens a compressed constant. ``regions[r]`` is the body that
    region r is; the model itself, region 0, is none. ``value_regions[i]`` is that of value i.
    """

    model: openvino.Model
    nodes: list[openvino.Node | None] = field(default_factory=list["openvino.Node | None"])
    entries: list[tuple[Entry, ...]] = field(default_factory=list[tuple[Entry, ...]])
    regions: list[Region | None] = field(default_factory=lambda: [None])
    value_regions: list[int] = field(default_factory=list[int])
    values: list[openvino.Output] = field(default_factory=list["openvino.Output"])
    constants: dict[int, openvino.Node] = field(default_factory=dict[int, "openvino.Node"])


def name_ops(model: openvino.Model) -> None:
    """Give every op a name of its own, keeping those that already are."""
    kept: set[str] = set()
    again: list[openvino.Node] = []
    for op in every_op(model):
        name = op.get_friendly_name()
        if name in kept:
            again.append(op)
        kept.add(name)
    for op in again:
        base = op.get_friendly_name()
        name = next(n for i in itertools.count(1) if (n := f"{base}_{i}") not in kept)
        kept.add(name)
        op.set_friendly_name(name)


def renumber_ops(model: openvino.Model) -> None:
    """Number ops that a reader of OpenVINO's named by a counter of the process by their order.

    Else a plan would name ops that have other names when the model is read again.
    """
    counts: Counter[str] = Counter()
    taken = {op.get_friendly_name() for op in every_op(model)}
    taken -= {name for name in taken if _COUNTED.fullmatch(name)}
    for op in every_op(model):
        if (found := _COUNTED.fullmatch(op.get_friendly_name())) is None:
            continue
        kind = found["kind"]
        while (name := f"{kind}_{counts[kind]}") in taken:
            counts[kind] += 1
        taken.add(name)
        op.set_friendly_name(name)


def port_name(port: Any) -> str:
    """What users call an input or output of a model: it may carry several names.

    The op's own name where that is one of them, as TensorFlow's ports have it; else the first.
    """
    own: str = port.get_node().get_friendly_name()
    names = sorted(port.get_names())
    return own if own in names or not names else names[0]


def read(model: openvino.Model, *, digest: str = "") -> tuple[Graph, OvBinding]:
    """Build the neutral graph of ``model``, whose ops have names of their own.

    Law: every float tensor of the model is a Value, every op that may change type a Node.
    Bodies of If, Loop and TensorIterator are opened.
    """
    reader = _Reader(model)
    reader.region(model, 0)
    return reader.finish(digest), reader.binding


class _Reader:
    def __init__(self, model: openvino.Model) -> None:
        self.binding = OvBinding(model=model)
        self.types = OpTypes()
        self.ids: dict[Port, int] = {}
        self.nodes: list[Node] = []
        self.producers: dict[int, int] = {}
        self.uses: dict[int, list[int]] = {}
        self.fixed: set[int] = set()  # computed from constants alone
        self.folded: set[int] = set()  # and of stored integers among them
        self.names = {op.get_friendly_name() for op in every_op(model)}
        self.changes = changes_of(model) or Changes()

    def value(self, port: openvino.Output, region: int = 0) -> int:
        key = (port.get_node().get_friendly_name(), port.get_index())
        found = self.ids.get(key)
        if found is None:
            found = self.ids[key] = len(self.binding.values)
            self.binding.values.append(port)
            self.binding.value_regions.append(region)
        return found

    def region(self, model: openvino.Model, number: int) -> None:
        """Add all that stands in the model, or in the body, which region ``number`` is."""
        for op in model.get_ordered_ops():
            self.op(op, number)

    def op(self, op: openvino.Node, region: int) -> None:
        inner: list[tuple[int, openvino.Model]] = []
        for index, body in enumerate(bodies(op)):
            inner.append((len(self.binding.regions), body))
            self.binding.regions.append(
                Region(owner=op, body=index, model=body, parent=region)
            )
            self.region(body, inner[-1][0])
        kind = op.get_type_name()
        if kind == "Result":
            return
        ties = ties_of(op, region, inner) if inner else []
        results = [] if ties else [self.value(port, region) for port in op.outputs()]
        if kind == "Constant":
            self.binding.constants[results[0]] = op
        elif (packed := _compressed(op)) is not None:
            self.binding.constants[results[0]] = packed
        elif kind not in _PORTS:
            tied = {e.index for tie in ties for e in tie.inputs if e.op is op}
            self.node(op, region, results, tied)
        for number, tie in enumerate(ties):
            self.phi(op, number, tie, region)

    def node(self, op: openvino.Node, region: int, results: list[int], tied: set[int]) -> None:
        """Add ``op``; what enters at the inputs ``tied`` enters a phi of it."""
        kind = op.get_type_name()
        info = ops.lookup(f"openvino::{kind}")
        entries = tuple(Entry(op=op, index=i, region=region) for i in range(len(op.inputs())))
        inputs = [None if e.index in tied else self._source(e) for e in entries]
        found = self.types.of(op, kind)
        name = op.get_friendly_name()
        added = self.changes.added.get(name)
        scales = added is not None and added.scales
        if self._decompresses(info, inputs, results) or scales:
            found = self.types.fixed(op)
        attributes = dict(_attributes(op, kind))
        if added is not None and added.rounds:
            attributes[ROUNDS] = added.rounds
        made = Node(
            id=len(self.nodes),
            name=name,
            op=info.name,
            native=f"openvino::{kind}",
            inputs=tuple(inputs),
            outputs=tuple(results),
            follows_in=found.follows_in,
            follows_out=found.follows_out[: len(results)],
            format=found.format,
            admits=found.admits,
            attributes=attributes,
            scope=scope_of(name),
            region=region,
        )
        self._add(op, entries, made)

    def phi(self, op: openvino.Node, number: int, tie: Tie, region: int) -> None:
        """Add what joins the values that ``op`` forces to be of one type."""
        inputs = [self._source(entry) for entry in tie.inputs]
        outputs = [self.value(port, region) for port in (*tie.inner, *tie.outer)]
        values = [self.binding.values[i] for i in (*inputs, *outputs)]
        labels = {label_of(port.get_element_type()) for port in values}
        fmt = FORMATS.get(labels.pop()) if len(labels) == 1 else None
        name = f"{op.get_friendly_name()}/{PHI}_{number}"
        while name in self.names:
            name += "_"
        self.names.add(name)
        made = Node(
            id=len(self.nodes),
            name=name,
            op=PHI,
            native=f"finecast::{PHI}",
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            follows_in=(fmt is not None,) * len(inputs),
            follows_out=(fmt is not None,) * len(outputs),
            format=fmt,
            admits=_ADMITS if fmt else frozenset(),
            attributes={"of": op.get_type_name(), INNER: len(tie.inner)},
            scope=op.get_friendly_name(),
            region=region,
        )
        self._add(None, tie.inputs, made)

    def _source(self, entry: Entry) -> int:
        return self.value(entry.port.get_source_output(), entry.region)

    def _add(
        self, native: openvino.Node | None, entries: tuple[Entry, ...], node: Node
    ) -> None:
        self.binding.nodes.append(native)
        self.binding.entries.append(entries)
        self.nodes.append(node)
        for index in dict.fromkeys(node.inputs):
            if index is not None:
                self.uses.setdefault(index, []).append(node.id)
        for index in node.outputs:
            if index is not None:
                self.producers[index] = node.id

    def _decompresses(
        self, info: ops.OpInfo, inputs: list[int | None], results: list[int]
    ) -> bool:
        """Whether it computes floats from stored integers alone: weights, as they are kept.

        An engine multiplies by such weights as they are stored; a cast among these ops would
        have it compute them first.
        """
        if not inputs or not all(
            i in self.binding.constants or i in self.fixed for i in inputs
        ):
            return False
        self.fixed.update(results)
        packed = info.kind is OpKind.CAST or any(i in self.folded for i in inputs)
        if packed:
            self.folded.update(results)
        return packed

    def finish(self, digest: str) -> Graph:
        model = self.binding.model
        names = {self.value(p): port_name(p) for p in model.inputs}
        given = frozenset(names)
        ends = {self.value(p.get_node().input(0).get_source_output()) for p in model.outputs}
        for port in model.outputs:
            source = self.value(port.get_node().input(0).get_source_output())
            names.setdefault(source, port_name(port))
        values = tuple(
            Value(
                id=i,
                name=names.get(i) or _name(port),
                dtype=label_of(port.get_element_type()),
                shape=shape_of(port),
                producer=self.producers.get(i),
                uses=tuple(self.uses.get(i, ())),
                constant=self._constant(i),
                is_input=i in given,
                is_output=i in ends,
            )
            for i, port in enumerate(self.binding.values)
        )
        return Graph(nodes=tuple(self.nodes), values=values, digest=digest)

    def _constant(self, index: int) -> ConstantStats | None:
        constant = self.binding.constants.get(index)
        if constant is None or constant.get_element_type().get_type_name() in _OPAQUE:
            return None
        size = 1
        for extent in constant.get_output_shape(0):
            size *= extent
        return ConstantStats(size=size, read=partial(numbers_of, constant))


def _compressed(op: openvino.Node) -> openvino.Node | None:
    """The constant that ``op`` widens to fp32 as it was compressed, if it is that."""
    if (
        op.get_type_name() != "Convert"
        or op.get_output_element_type(0).get_type_name() != "f32"
    ):
        return None
    source = op.input_value(0).get_node()
    low = source.get_output_element_type(0).get_type_name() in ("f16", "bf16")
    return source if low and source.get_type_name() == "Constant" else None


def _attributes(op: openvino.Node, kind: str) -> Iterator[tuple[str, Attribute]]:
    found: Mapping[str, Any] = op.get_attributes()
    scalars = [found[name] for name in _SCALARS.get(kind, ()) if name in found]
    if scalars:
        yield SCALARS, tuple(float(number) for number in scalars)
    for name, value in found.items():
        named = _RENAMED.get(name) or name
        if isinstance(value, bool):
            yield named, int(value)
        elif isinstance(value, int | float | str):
            yield named, value
        elif isinstance(value, list | tuple) and all(
            isinstance(v, int | float | str) for v in value
        ):
            yield named, tuple(value)
    axis = _AXIS_INPUTS.get(kind)
    if axis is not None and op.input_value(axis).get_node().get_type_name() == "Constant":
        yield "axis", int(numbers_of(op.input_value(axis).get_node()).reshape(-1)[0])


def _name(port: openvino.Output) -> str:
    node = port.get_node()
    name: str = node.get_friendly_name()
    return name if node.get_output_size() == 1 else f"{name}:{port.get_index()}"


def shape_of(port: openvino.Output) -> tuple[Dim, ...] | None:
    """The declared shape; a free dimension of an input is called ``INPUT.AXIS``."""
    sizes = port.get_partial_shape()
    if sizes.rank.is_dynamic:
        return None
    given = port.get_node().get_type_name() == "Parameter"
    names = (f"{port_name(port)}.{axis}" if given else None for axis in range(len(sizes)))
    return tuple(
        d.get_length() if d.is_static else n for d, n in zip(sizes, names, strict=True)
    )
