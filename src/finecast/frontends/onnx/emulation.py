"""A copy of a model that computes as a target would, at the turn of a switch.

Each float node has two bits: whether it reads rounded, and whether it stores its result
rounded. Bits that always act together share one element of the switch input, so the graph
needs no logic of its own. With a fixed setting there is no switch and nothing is selected.

Laws: with every bit off the copy computes what the model computes (but for what the device
does to fp32 itself); rounding a value for one reader leaves it exact for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.emulation import Emulation, Ports, is_relayout
from finecast.formats import Format
from finecast.frontends.onnx.reader import Binding, constant_tensor, read
from finecast.frontends.onnx.roundops import RoundOps
from finecast.graph import Graph, Node, Value
from finecast.ops import by_name
from finecast.roundmodes import convert

EMULATION_SWITCH: Final = "finecast_emulation"
OFFSET: Final = "finecast_offset"

# A bit: a node's reading or storing (by its id), or all transposes at once.
Bit = tuple[str, int]
_READ: Final = "read"
_WRITE: Final = "write"
RELAYOUT: Final[Bit] = ("relayout", 0)
_ALWAYS: Final[Bit] = ("always", 0)
# Constants from this size on are fed, not chosen in the graph, which would copy them.
_FED_SIZE: Final = 4096
# Ops that move or select and read one float: rounding before them equals rounding after.
_NO_FLOAT_RESULT: Final = frozenset({"shape", "size"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Which nodes are cast (by id), which of them store low results, and the relayout."""

    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    relayout: bool = False

    def on(self, bits: frozenset[Bit]) -> bool:
        """Whether any of ``bits`` is set."""
        sets = {_READ: self.reads, _WRITE: self.writes}
        return any(
            kind == _ALWAYS[0] or (self.relayout if kind == RELAYOUT[0] else i in sets[kind])
            for kind, i in bits
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SwitchedWeight:
    """A constant that is an input of the instrumented model: which array it is fed when."""

    name: str
    exact: NDArray[np.float32]
    rounded: NDArray[np.float32]
    bits: frozenset[Bit]


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """The instrumented model and what the elements of its switch stand for.

    ``needs_offset`` says that it has the input ``finecast_offset`` too, for draws.
    """

    model: ir.Model
    conditions: tuple[frozenset[Bit], ...]
    needs_offset: bool
    weights: tuple[SwitchedWeight, ...] = ()

    def feeds(self, setting: Setting) -> dict[str, NDArray[np.generic]]:
        """What the inputs that are not the model's own are fed for a setting."""
        found: dict[str, NDArray[np.generic]] = {
            w.name: w.rounded if setting.on(w.bits) else w.exact for w in self.weights
        }
        if self.conditions:
            found[EMULATION_SWITCH] = self.switch(setting)
        return found

    def switch(self, setting: Setting) -> NDArray[np.bool_]:
        """The switch input for a setting."""
        return np.array([setting.on(bits) for bits in self.conditions], dtype=bool)


def emulated(
    model: ir.Model,
    emulation: Emulation,
    *,
    kernels: Sequence[frozenset[int]] = (),
    fixed: Setting | None = None,
    together: Sequence[frozenset[int]] = (),
) -> Emulated:
    """Instrument a copy of ``model``.

    Args:
        model: A model with named nodes and known types.
        emulation: The target and its options; the scope is a matter of the setting.
        kernels: Ids of nodes that the device runs as one: between them nothing is rounded
            but the operands of products.
        fixed: Build for this setting alone, without a switch.
        together: Sets of nodes that every setting will cast together: fewer selections.
    """
    copy = model.clone()
    graph, binding = read(copy)
    leaders = {n: min(nodes) for nodes in together for n in nodes}
    return _Builder(graph, binding, emulation, kernels, fixed, leaders).build()


Wants = Mapping[Format, frozenset[Bit]]


@dataclass(slots=True)
class _Builder:
    graph: Graph
    binding: Binding
    emulation: Emulation
    kernels: Sequence[frozenset[int]]
    fixed: Setting | None
    leaders: Mapping[int, int]
    ports: dict[int, Ports] = field(default_factory=dict[int, Ports])
    kernel_of: dict[int, int] = field(default_factory=dict[int, int])
    conditions: dict[frozenset[Bit], ir.Value] = field(
        default_factory=dict[frozenset[Bit], ir.Value]
    )
    prologue: list[ir.Node] = field(default_factory=list[ir.Node])
    stored: dict[int, dict[Format, frozenset[Bit]]] = field(
        default_factory=dict[int, dict[Format, frozenset[Bit]]]
    )
    weights: list[SwitchedWeight] = field(default_factory=list["SwitchedWeight"])
    fed: list[ir.Value] = field(default_factory=list[ir.Value])
    switch: ir.Value | None = None
    stream: ir.Value | None = None

    def build(self) -> Emulated:
        self.kernel_of = {n: k for k, nodes in enumerate(self.kernels) for n in nodes}
        self.ports = {
            n.id: p for n in self.graph.float_nodes if (p := self.emulation.ports(n)) is not None
        }
        ops = RoundOps(register=self.main.register_initializer, offset=self._offset)
        for node in self.graph.nodes:  # topological: what a producer left comes first
            for index in node.outputs:
                if index is not None:
                    self.stored[index] = self._stores(self.graph.values[index], node)
        exact_inputs = [v for v in self.graph.values if v.producer is None]
        order = [*exact_inputs, *(v for v in self.graph.values if v.producer is not None)]
        for value in order:
            if value.format is Format.FP32 and value.constant is None:
                self._round_value(value, ops)
        for node in self.graph.float_nodes:
            self._round_constants(node)
            self._spoil_infinities(node, ops)
        self._finish()
        conditions = tuple(self.conditions)
        return Emulated(
            model=self.binding.model,
            conditions=conditions,
            needs_offset=self.stream is not None,
            weights=tuple(self.weights),
        )

    @property
    def main(self) -> ir.Graph:
        return self.binding.model.graph

    def _bit(self, kind: str, node: Node) -> Bit:
        return kind, self.leaders.get(node.id, node.id)

    def _stores(self, value: Value, producer: Node) -> dict[Format, frozenset[Bit]]:
        """What storing ``value`` rounds to, and when."""
        source = self._moved_from(producer)
        if source is not None:
            before = self.stored.get(source.id, {}) if self._deferred(source) else {}
            if producer.id not in self.ports or not self._deferred(source):
                return dict(before)
            return _joined(before, {self.ports[producer.id].read: frozenset({self._bit(_READ, producer)})})
        if producer.id not in self.ports:
            return {}
        if self._picks_constants(producer):
            return {self.ports[producer.id].read: frozenset({self._bit(_READ, producer)})}
        if by_name(producer.op).exact:
            return {}
        wanted = self.ports[producer.id].write
        return {} if wanted is Format.FP32 else {wanted: frozenset({self._bit(_WRITE, producer)})}

    def _moved_from(self, node: Node) -> Value | None:
        """The one value that ``node`` only moves, where rounding commutes with it."""
        if not by_name(node.op).exact or (is_relayout(node) and self._relayout_acts):
            return None
        if self.binding.nodes[node.id] is None:
            return None
        floats = list(self.graph.following_inputs(node))
        if len(floats) != 1 or floats[0].constant is not None or node.op in _NO_FLOAT_RESULT:
            return None
        return floats[0] if any(True for _ in self.graph.following_outputs(node)) else None

    def _picks_constants(self, node: Node) -> bool:
        """Whether ``node`` only picks from constants: cheaper to round what it picked."""
        if not by_name(node.op).exact or self.binding.nodes[node.id] is None:
            return False
        floats = list(self.graph.following_inputs(node))
        return bool(floats) and all(v.constant is not None for v in floats)

    def _deferred(self, value: Value) -> bool:
        """Whether rounding waits until after the only reader, which just moves the value."""
        if value.is_output or len(value.uses) != 1:
            return False
        reader = self.graph.nodes[value.uses[0]]
        source = self._moved_from(reader)
        return source is not None and source.id == value.id

    def _inside(self, value: Value) -> bool:
        """Whether ``value`` never leaves one kernel."""
        if value.producer is None or value.is_output or not value.uses:
            return False
        kernel = self.kernel_of.get(value.producer)
        return kernel is not None and all(self.kernel_of.get(n) == kernel for n in value.uses)

    @property
    def _relayout_acts(self) -> bool:
        return self.emulation.relayout is not None and (
            self.emulation.relayout is not Format.FP32 or self._infinities_matter
        )

    @property
    def _infinities_matter(self) -> bool:
        # Only where the compiler has a flag against them do they meet the identity's zeros.
        device = self.emulation.target
        flagged = device.saturate_infinity or self.emulation.saturate_infinity
        return flagged and self.emulation.relayout is not None

    def _reads(self, node: Node, value: Value) -> dict[Format, frozenset[Bit]]:
        """What ``node`` rounds ``value`` to at its port, and when."""
        found: dict[Format, frozenset[Bit]] = {}
        if not any(v.id == value.id for v in self.graph.following_inputs(node)):
            return found
        own = self.emulation.own_read(node)
        if own is not Format.FP32 and node.format is Format.FP32:
            found[own] = frozenset({_ALWAYS})
        if node.id in self.ports and node.op not in _NO_FLOAT_RESULT:
            wanted = self.ports[node.id].read
            if wanted is not Format.FP32:
                found = _joined(found, {wanted: frozenset({self._bit(_READ, node)})})
        relayout = self.emulation.relayout
        if is_relayout(node) and relayout is not None and relayout is not Format.FP32:
            found = _joined(found, {relayout: frozenset({RELAYOUT})})
        return found

    def _round_value(self, value: Value, ops: RoundOps) -> None:
        if self._deferred(value):
            return
        inside = self._inside(value)
        native = self.binding.values[value.id]
        stored = {} if inside else self.stored.get(value.id, {})
        readers = {
            n: self._reads(self.graph.nodes[n], value)
            for n in value.uses
            if self.binding.nodes[n] is not None  # a phi only joins names
            and (not inside or by_name(self.graph.nodes[n].op).matmul_engine)
        }
        nodes: list[ir.Node] = []
        rounded: dict[Format, ir.Value] = {}

        def chosen(base: ir.Value, fmt: Format, bits: frozenset[Bit], tag: str) -> ir.Value:
            if self.fixed is not None and not self.fixed.on(bits):
                return base
            if base is not native or fmt not in rounded:
                how = self.emulation.conversion(fmt)
                made, out = ops.round(base, how, f"{native.name}_{tag}_{fmt.label}")
                nodes.extend(made)
                if base is native:
                    rounded[fmt] = out
            else:
                out = rounded[fmt]
            if self.fixed is not None or _ALWAYS in bits:
                return out
            result = _float(f"{native.name}_{tag}_{fmt.label}_chosen", native.shape)
            nodes.append(ir.node("Where", [self._condition(bits), out, base], outputs=[result]))
            return result

        uses = list(native.uses())
        kept = native
        if self._kept_matters(value, native, len(uses), readers, stored):
            for fmt, bits in stored.items():
                kept = chosen(kept, fmt, bits, "stored")
        views: dict[tuple[tuple[Format, frozenset[Bit]], ...], ir.Value] = {}
        by_reader: dict[int, ir.Value] = {}
        for reader, wants in readers.items():
            joined = _joined(stored, wants)
            key = tuple(joined.items())
            if key not in views:
                view = kept if joined == stored else native
                if view is native:
                    for fmt, bits in joined.items():
                        view = chosen(view, fmt, bits, f"read{len(views)}")
                views[key] = view
            by_reader[reader] = views[key]
        self._place(native, nodes)
        self._redirect(value, native, uses, kept, by_reader)

    def _kept_matters(
        self,
        value: Value,
        native: ir.Value,
        uses: int,
        readers: Mapping[int, Wants],
        stored: Wants,
    ) -> bool:
        """Whether anything reads the value as it is stored, without a rounding of its own."""
        if value.is_output or native.is_graph_output() or len(readers) < len(value.uses):
            return True
        direct = 0
        for reader, wants in readers.items():
            if not wants or _joined(stored, wants) == stored:
                return True
            node = self.graph.nodes[reader]
            direct += sum(
                index == value.id and follows
                for index, follows in zip(node.inputs, node.follows_in, strict=True)
            )
        return direct < uses

    def _redirect(
        self,
        value: Value,
        native: ir.Value,
        uses: Iterable[tuple[ir.Node, int]],
        kept: ir.Value,
        by_reader: Mapping[int, ir.Value],
    ) -> None:
        owners = {
            id(node): n
            for n in value.uses
            if (node := self.binding.nodes[n]) is not None
        }
        for node, index in uses:
            reader = owners.get(id(node))
            follows = reader is not None and self.graph.nodes[reader].follows_in[index]
            new = by_reader.get(reader, kept) if follows and reader is not None else kept
            if new is not native:
                node.replace_input_with(index, new)
        if kept is native:
            return
        for graph in (self.main, *self.main.subgraphs()):
            for index, end in enumerate(graph.outputs):
                if end is native:
                    graph.outputs[index] = kept
                    if graph is self.main and not native.is_graph_input():
                        native.name, kept.name = f"{native.name}_exact", native.name

    def _place(self, native: ir.Value, nodes: list[ir.Node]) -> None:
        """Right after the value appears."""
        if not nodes:
            return
        home, producer = native.graph, native.producer()
        if producer is not None:
            producer.append(nodes)
        elif home is self.main or home is None:
            self.prologue += nodes
        else:
            next(iter(home)).prepend(nodes)

    def _round_constants(self, node: Node) -> None:
        native = self.binding.nodes[node.id]
        if native is None or self._picks_constants(node):
            return
        own = self.emulation.own_read(node)
        wants = [(own, _ALWAYS)] if own is not Format.FP32 else []
        if node.id in self.ports:
            wants.append((self.ports[node.id].read, self._bit(_READ, node)))
        for index, (value_id, follows) in enumerate(
            zip(node.inputs, node.follows_in, strict=True)
        ):
            if value_id is None or not follows or node.format is not Format.FP32:
                continue
            tensor = constant_tensor(self.binding.values[value_id])
            for fmt, bit in wants if tensor is not None else []:
                bits = frozenset({bit})
                if fmt is Format.FP32 or (self.fixed is not None and not self.fixed.on(bits)):
                    continue
                exact = native.inputs[index]
                assert tensor is not None
                assert exact is not None
                how = self.emulation.conversion(fmt)
                array = tensor.numpy().astype(np.float32)
                name = f"{self.binding.values[value_id].name}_{fmt.label}"
                rounded = convert(array, how)
                if self.fixed is None and bit is not _ALWAYS and array.size >= _FED_SIZE:
                    native.replace_input_with(index, self._fed(array, rounded, name, bits))
                    continue
                low = self._constant(rounded, f"{name}_constant")
                if self.fixed is None and bit is not _ALWAYS:
                    out = _float(f"{low.name}_{node.id}_{index}", low.shape)
                    choose = ir.node("Where", [self._condition(bits), low, exact], outputs=[out])
                    native.prepend([choose])
                    low = out
                native.replace_input_with(index, low)

    def _fed(
        self, exact: NDArray[np.float32], rounded: NDArray[np.float32], name: str, bits: frozenset[Bit]
    ) -> ir.Value:
        """An input that is fed the one array or the other: choosing costs nothing at run time."""
        key = f"{name}_{len(self.weights)}"
        value = ir.Value(
            name=key, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(exact.shape)
        )
        self.weights.append(SwitchedWeight(name=key, exact=exact, rounded=rounded, bits=bits))
        self.fed.append(value)
        return value

    def _constant(self, array: NDArray[np.float32], name: str) -> ir.Value:
        if name not in self.main.initializers:
            value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
            value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(array.shape)
            self.main.register_initializer(value)
        return self.main.initializers[name]

    def _spoil_infinities(self, node: Node, ops: RoundOps) -> None:
        """Inf times the identity's zeros is NaN along the whole vector, unless clamped."""
        native = self.binding.nodes[node.id]
        if native is None or not is_relayout(node) or not self._infinities_matter:
            return
        source = native.inputs[0]
        if source is None or node.format is not Format.FP32:
            return
        if self.fixed is not None and not self.fixed.relayout:
            return
        ops.made, ops.label, ops.count = [], f"{node.name}_identity", 0
        if self.emulation.saturate_infinity:
            # To the largest of the low format, so that a cast after it stays finite.
            top = self.emulation.format.max
            endless = ops.op("IsInf", source, dtype=ir.DataType.BOOL)
            clamped = ops.op("Clip", source, ops.scalar(-top), ops.scalar(top))
            spoiled = ops.op("Where", endless, clamped, source)
            spoiled.shape = source.shape
        else:
            zeros = ops.op("Mul", source, ops.scalar(0.0))
            axes = ops.constant(np.array([-1], dtype=np.int64))
            total = ops.op("ReduceSum", zeros, axes, keepdims=1)
            total.shape = None
            spoiled = ops.op("Add", source, total)
        if self.fixed is None:
            bits = frozenset({RELAYOUT})
            choose = _float(f"{ops.label}_chosen", source.shape)
            ops.made.append(
                ir.node("Where", [self._condition(bits), spoiled, source], outputs=[choose])
            )
            spoiled = choose
        native.prepend(ops.made)
        native.replace_input_with(0, spoiled)

    def _condition(self, bits: frozenset[Bit]) -> ir.Value:
        if bits not in self.conditions:
            out = ir.Value(
                name=f"{EMULATION_SWITCH}_{len(self.conditions)}",
                type=ir.TensorType(ir.DataType.BOOL),
                shape=ir.Shape(()),
            )
            self.conditions[bits] = out
        return self.conditions[bits]

    def _offset(self) -> ir.Value:
        if self.stream is None:
            self.stream = ir.Value(
                name=OFFSET, shape=ir.Shape(()), type=ir.TensorType(ir.DataType.INT64)
            )
        return self.stream

    def _finish(self) -> None:
        start: list[ir.Node] = []
        if self.conditions:
            size = len(self.conditions)
            self.switch = ir.Value(
                name=EMULATION_SWITCH,
                shape=ir.Shape([size]),
                type=ir.TensorType(ir.DataType.BOOL),
            )
            self.main.inputs.append(self.switch)
            for k, out in enumerate(self.conditions.values()):
                name = f"{EMULATION_SWITCH}_index_{k}"
                index = ir.Value(name=name, const_value=ir.tensor(np.int64(k), name=name))
                index.type, index.shape = ir.TensorType(ir.DataType.INT64), ir.Shape(())
                self.main.register_initializer(index)
                start.append(ir.node("Gather", [self.switch, index], outputs=[out]))
        if self.stream is not None:
            self.main.inputs.append(self.stream)
        self.main.inputs.extend(self.fed)
        nodes = [*start, *self.prologue]
        first = next(iter(self.main), None)
        if first is None:
            self.main.extend(nodes)
        else:
            first.prepend(nodes)


def _joined(a: Wants, b: Wants) -> dict[Format, frozenset[Bit]]:
    merged = dict(a)
    for fmt, bits in b.items():
        merged[fmt] = merged.get(fmt, frozenset()) | bits
    return merged


def _float(name: str, shape: ir.Shape | None) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
