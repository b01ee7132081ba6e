"""A copy of an ONNX model that computes as a target would, as its switch input says.

The bits of a node say whether it reads rounded operands and parameters, and whether it stores
its result rounded. Bits that always act together share one element of the switch input, so
the graph needs no logic of its own; large constants are inputs, fed exact or rounded. With a
fixed setting there is no switch and nothing is selected.

Laws: with every bit off the copy computes what the model computes (but for what the device
does to fp32 itself); rounding a value for one reader leaves it exact for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.devices.emulation import Emulation
from finecast.devices.setting import ALWAYS, RELAYOUT, Bit, Setting, kernel_numbers
from finecast.engines.emulator.roundings import GraphRoundings, RoundTo
from finecast.engines.emulator.switch import EMULATION_SWITCH, OFFSET, Emulated, SwitchedWeight
from finecast.engines.emulator.views import RoundedViews
from finecast.frontends.onnx.constants import constant_tensor
from finecast.frontends.onnx.editor import place_after, place_first
from finecast.frontends.onnx.reader import OnnxBinding, read
from finecast.frontends.onnx.roundops import RoundOps
from finecast.frontends.onnx.source_types import stored_format
from finecast.graph import Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import convert

__all__ = ["EMULATION_SWITCH", "OFFSET", "Emulated", "Setting", "emulated"]

# Elements from which on a constant is fed: a choice in the graph would copy it.
_FED_SIZE: Final = 4096


def emulated(
    model: ir.Model,
    emulation: Emulation,
    *,
    kernels: Sequence[frozenset[int]] = (),
    fixed: Setting | None = None,
) -> Emulated:
    """Instrument a copy of ``model``.

    Args:
        model: A model with named nodes and known types.
        emulation: The target and its options. Its scope does not count: the setting says
            what is cast.
        kernels: Ids of nodes that the device runs as one: between them nothing is rounded
            but the operands of products.
        fixed: Build for this setting alone, without a switch.
    """
    copy = model.clone()
    graph, binding = read(copy)
    stored = ((i, stored_format(v)) for i, v in enumerate(binding.values))
    roundings = GraphRoundings(
        graph=graph,
        emulation=emulation,
        kernel_of=kernel_numbers(kernels),
        low={i: fmt for i, fmt in stored if fmt is not None},
    )
    return _Builder(graph, binding, emulation, roundings, fixed).build()


@dataclass(slots=True)
class _Builder:
    graph: Graph
    binding: OnnxBinding
    emulation: Emulation
    roundings: GraphRoundings
    fixed: Setting | None
    conditions: dict[frozenset[Bit], ir.Value] = field(
        default_factory=dict[frozenset[Bit], ir.Value]
    )
    prologue: list[ir.Node] = field(default_factory=list[ir.Node])
    weights: list[SwitchedWeight] = field(default_factory=list[SwitchedWeight])
    fed: list[ir.Value] = field(default_factory=list[ir.Value])
    stream: ir.Value | None = None

    def build(self) -> Emulated:
        ops = RoundOps(register=self.main.register_initializer, offset=self._offset)
        # Values without a producer first: their nodes go to the front of the graph.
        for value in sorted(self.graph.values, key=lambda v: v.producer is not None):
            if value.format is Format.FP32 and value.constant is None:
                self._round_value(value, ops)
        for node in self.graph.float_nodes:
            self._round_constants(node)
            self._spoil_infinities(node, ops)
        self._finish()
        return Emulated(
            model=self.binding.model,
            conditions=tuple(self.conditions),
            needs_offset=self.stream is not None,
            weights=tuple(self.weights),
        )

    @property
    def main(self) -> ir.Graph:
        return self.binding.model.graph

    def _round_value(self, value: Value, ops: RoundOps) -> None:
        roundings = self.roundings.value(value)
        native = self.binding.values[value.id]
        made: list[ir.Node] = []
        views = self._views(value, native, ops, made)
        owners = {
            id(node): n for n in value.uses if (node := self.binding.nodes[n]) is not None
        }
        changed: list[tuple[ir.Node, int, ir.Value]] = []
        for node, index in native.uses():
            port = owners.get(id(node), -1), index
            changed.append(
                (node, index, views.of(roundings.ports.get(port, roundings.stored)))
            )
        ended = value.is_output or native.is_graph_output()
        kept = views.of(roundings.stored) if ended else native
        self._place(native, made)
        for node, index, new in changed:
            if new is not native:
                node.replace_input_with(index, new)
        if kept is not native:
            self._end_in(native, kept)

    def _views(
        self, value: Value, native: ir.Value, ops: RoundOps, made: list[ir.Node]
    ) -> RoundedViews[ir.Value]:
        """``native`` as its readers see it; the nodes for that are added to ``made``."""

        def name() -> str:
            return f"{native.name}_view{len(made)}"

        def rounding(base: ir.Value, into: RoundTo) -> ir.Value:
            how = self.roundings.conversion(value, into)
            nodes, out = ops.round(base, how, f"{name()}_{into.format.label}")
            made.extend(nodes)
            return out

        def choice(bits: frozenset[Bit], out: ir.Value, otherwise: ir.Value) -> ir.Value:
            result = _float(f"{name()}_chosen", native.shape)
            inputs = [self.condition(bits), out, otherwise]
            made.append(ir.node("Where", inputs, outputs=[result]))
            return result

        return RoundedViews(native=native, rounding=rounding, choice=choice, fixed=self.fixed)

    def _end_in(self, native: ir.Value, kept: ir.Value) -> None:
        """Replace the graph output ``native`` by ``kept``, under the same name."""
        for graph in (self.main, *self.main.subgraphs()):
            for index, end in enumerate(graph.outputs):
                if end is native:
                    graph.outputs[index] = kept
                    if graph is self.main and not native.is_graph_input():
                        native.name, kept.name = f"{native.name}_exact", native.name

    def _place(self, native: ir.Value, nodes: list[ir.Node]) -> None:
        """Put ``nodes`` right after the producer of ``native``."""
        if nodes:
            place_after(native, nodes, self.main, self.prologue)

    def _round_constants(self, node: Node) -> None:
        native = self.binding.nodes[node.id]
        if native is None:
            return
        for index, value_id in enumerate(node.inputs):
            tensor = None
            if value_id is not None:
                tensor = constant_tensor(self.binding.values[value_id])
            if value_id is None or tensor is None:
                continue
            value = self.graph.values[value_id]
            roundings = {
                into: bits
                for into, bits in self.roundings.constant(node, index).items()
                if self.fixed is None or self.fixed.on(bits)
            }
            exact = tensor.numpy().astype(np.float32) if roundings else None
            uncast = exact
            for into, bits in roundings.items():
                assert exact is not None
                assert uncast is not None
                name = f"{value.name}_{into.format.label}{'_flushed' * into.flush}"
                if into.encoding is not None:  # readers may have other axes and scales
                    name += f"_{node.id}_{index}"
                rounded = convert(exact, self.roundings.conversion(value, into))
                switched = self.fixed is None and ALWAYS not in bits
                if switched and exact.size >= _FED_SIZE:
                    native.replace_input_with(index, self._fed(uncast, rounded, name, bits))
                    continue
                uncast = rounded
                low = self._constant(rounded, f"{name}_constant")
                if switched:
                    before = native.inputs[index]
                    assert before is not None
                    out = _float(f"{low.name}_{node.id}_{index}", low.shape)
                    choose = ir.node(
                        "Where", [self.condition(bits), low, before], outputs=[out]
                    )
                    native.prepend([choose])
                    low = out
                native.replace_input_with(index, low)

    def _fed(
        self,
        exact: NDArray[np.float32],
        rounded: NDArray[np.float32],
        name: str,
        bits: frozenset[Bit],
    ) -> ir.Value:
        """A new input of the model that is fed one of the two arrays, without a copy."""
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
        """Have a transpose by product turn vectors with Inf to NaN, or clamp the Inf.

        The product with the identity multiplies Inf by the identity's zeros.
        """
        native = self.binding.nodes[node.id]
        if native is None or not self.roundings.spoils_infinities(node):
            return
        source = native.inputs[0]
        if source is None:
            return
        if self.fixed is not None and not self.fixed.relayout:
            return
        # To the largest number of the low format, so that a cast of it stays finite.
        top = self.emulation.format.max if self.emulation.saturate_infinity else None
        made, spoiled = ops.without_infinities(source, top, f"{node.name}_identity")
        if self.fixed is None:
            bits = frozenset({RELAYOUT})
            choose = _float(f"{ops.label}_chosen", source.shape)
            made.append(
                ir.node("Where", [self.condition(bits), spoiled, source], outputs=[choose])
            )
            spoiled = choose
        native.prepend(made)
        native.replace_input_with(0, spoiled)

    def condition(self, bits: frozenset[Bit]) -> ir.Value:
        """The element of the switch that stands for ``bits``."""
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
            switch = ir.Value(
                name=EMULATION_SWITCH,
                shape=ir.Shape([size]),
                type=ir.TensorType(ir.DataType.BOOL),
            )
            self.main.inputs.append(switch)
            for k, out in enumerate(self.conditions.values()):
                name = f"{EMULATION_SWITCH}_index_{k}"
                index = ir.Value(name=name, const_value=ir.tensor(np.int64(k), name=name))
                index.type, index.shape = ir.TensorType(ir.DataType.INT64), ir.Shape(())
                self.main.register_initializer(index)
                start.append(ir.node("Gather", [switch, index], outputs=[out]))
        if self.stream is not None:
            self.main.inputs.append(self.stream)
        self.main.inputs.extend(self.fed)
        place_first([*start, *self.prologue], self.main)


def _float(name: str, shape: ir.Shape | None) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
