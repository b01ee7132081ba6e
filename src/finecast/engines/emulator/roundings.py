"""Which values a device rounds, for which readers, to which formats, and on which bits.

This is decided once, on the neutral graph, for models of every library, of which copies are
made accordingly (``session``).

Laws: where rounding commutes with ops that only move numbers, it is done once, after the last
of a chain of them. What is added to a product (a bias) is not an operand of the product: the
sum leaves the engine in fp32, and the bias is cast together with the parameters of norms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from finecast.devices.emulation import (
    ALWAYS,
    PARAMETER,
    READ,
    RELAYOUT,
    WRITE,
    Bit,
    EmulatedPorts,
    Emulation,
    Setting,
    is_parameter,
    is_relayout,
)
from finecast.engines.emulator.sums import SummedOp, Summing, is_summed
from finecast.graph import PHI, Graph, Node, Value
from finecast.graph.structure import READS_SHAPE_ONLY
from finecast.numbers.encodings import Dynamic, Stored
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounder
from finecast.ops import OpKind, by_name
from finecast.ops.patterns import stays_inside
from finecast.rules.quantized import DEQUANTIZES


@dataclass(frozen=True, slots=True)
class RoundTo:
    """One rounding: to ``format``; with ``flush`` its subnormals become zero.

    A rounding to fp32 with ``flush`` changes nothing else: engines flush their sums so.
    ``own`` marks what an engine does to operands that are not cast, ``instead`` a cast that
    replaces it. ``encoding`` has the parameters of a scaled format.
    """

    format: Format
    flush: bool = False
    own: bool = False
    instead: bool = False
    encoding: Stored | Dynamic | None = None


Roundings = Mapping[RoundTo, frozenset[Bit]]
"""Roundings in order, each done if any of its bits is set."""
Port = tuple[int, int]
"""A node's id and the index of one of its inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRoundings:
    """Roundings of one value: where it is stored, and at each port that reads it.

    ``ports`` include those of storing. A port that is not in it reads the value as stored.
    """

    stored: Roundings
    ports: Mapping[Port, Roundings]


@dataclass(slots=True, kw_only=True)
class GraphRoundings:
    """The roundings of one graph under one emulation.

    Attributes:
        graph: The model.
        emulation: The target and its options. Its scope does not count: the bits of a
            setting say what is cast.
        kernel_of: Number of the kernel of each node that runs together with others.
        low: Low formats in which the model itself stores values, by value id.
        formats: Formats, by node id, of nodes that are cast to another one than
            ``emulation.format``.
        ports: Formats of the inputs and results of each node that can be cast, by its id.
        stored: Roundings of each value where it is stored, by its id.
    """

    graph: Graph
    emulation: Emulation
    kernel_of: Mapping[int, int] = field(default_factory=dict[int, int])
    low: Mapping[int, Format] = field(default_factory=dict[int, Format])
    formats: Mapping[int, Format] = field(default_factory=dict[int, Format])
    ports: dict[int, EmulatedPorts] = field(init=False)
    stored: dict[int, dict[RoundTo, frozenset[Bit]]] = field(init=False)

    def __post_init__(self) -> None:
        """Go through the graph once."""
        self.ports = {
            n.id: p
            for n in self.graph.float_nodes
            if (p := self._emulation_of(n).ports(n)) is not None
        }
        self.stored = {
            value.id: {RoundTo(fmt): frozenset({ALWAYS})}
            for value in self.graph.inputs
            if (fmt := self.low.get(value.id)) is not None
        }
        for node in self.graph.nodes:
            for index in node.outputs:
                if index is not None:
                    self.stored[index] = self.stores(self.graph.values[index], node)

    def _emulation_of(self, node: Node) -> Emulation:
        fmt = self.formats.get(node.id)
        return self.emulation if fmt is None else replace(self.emulation, format=fmt)

    def value(self, value: Value) -> ValueRoundings:
        """Roundings of ``value``; none if they are deferred until after its only reader."""
        if self.deferred(value):
            return ValueRoundings(stored={}, ports={})
        inside = stays_inside(value, self.kernel_of)
        stored = self.stored.get(value.id, {})
        if inside:  # not stored, but the engine may still round or flush its sums
            maker = value.producer
            stored = {} if maker is None else self.sums(self.graph.nodes[maker])
        ports: dict[Port, Roundings] = {}
        for node in (self.graph.nodes[n] for n in value.uses):
            if node.op == PHI or (inside and not by_name(node.op).matmul_engine):
                continue
            for index, source in enumerate(node.inputs):
                if source == value.id and node.follows_in[index]:
                    ports[node.id, index] = joined(stored, self.reads(node, index))
        return ValueRoundings(stored=stored, ports=ports)

    def constant(self, node: Node, index: int) -> Roundings:
        """Roundings of the constant that ``node`` reads at input ``index``."""
        if node.op == PHI or self.picks_constants(node) or node.format is not Format.FP32:
            return {}
        return self.reads(node, index) if node.follows_in[index] else {}

    def conversion(self, value: Value, into: RoundTo) -> Rounder:
        """How ``value`` is converted by the rounding ``into``."""
        return self.emulation.conversion(
            into.format, into.encoding, standalone=self.standalone(value), flush=into.flush
        )

    def standalone(self, value: Value) -> bool:
        """Whether converting ``value`` takes a kernel of its own."""
        if value.producer is None:
            return value.constant is None
        norm = by_name(self.graph.nodes[value.producer].op).kind is OpKind.NORM
        return norm and self.emulation.rounds_normalized

    def spoils_infinities(self, node: Node) -> bool:
        """Whether ``node`` is a transpose by product, which does not keep Inf."""
        return is_relayout(node) and node.format is Format.FP32 and self.infinities_matter

    def stores(self, value: Value, producer: Node) -> dict[RoundTo, frozenset[Bit]]:
        """Roundings of ``value`` where ``producer`` stores it."""
        low_format = self.low.get(value.id)
        if low_format is not None:
            held = {RoundTo(self.emulation.held(low_format)): frozenset({ALWAYS})}
            return joined(self.sums(producer), held)
        source = self._moved_from(producer)
        if source is not None:
            before = self.stored.get(source.id, {}) if self.deferred(source) else {}
            if producer.id not in self.ports or not self.deferred(source):
                return dict(before)
            return joined(
                before,
                {RoundTo(self.ports[producer.id].read): frozenset({(READ, producer.id)})},
            )
        if producer.id not in self.ports:
            return {}
        if self.picks_constants(producer):
            return {RoundTo(self.ports[producer.id].read): frozenset({(READ, producer.id)})}
        if by_name(producer.op).exact:
            return {}
        wanted = self.ports[producer.id].write
        roundings = self.sums(producer)
        if wanted is Format.FP32:
            return roundings
        return joined(roundings, {RoundTo(wanted): frozenset({(WRITE, producer.id)})})

    def sums(self, producer: Node) -> dict[RoundTo, frozenset[Bit]]:
        """Roundings that the engine does to the sums of ``producer`` before they leave it."""
        roundings: dict[RoundTo, frozenset[Bit]] = {}
        if producer.id not in self.ports or not by_name(producer.op).matmul_engine:
            return roundings
        stated = self.stated(producer)
        bit = frozenset({(READ, producer.id) if stated is None else ALWAYS})
        read = stated or self.ports[producer.id].read
        kept = self.emulation.sums_in(producer, read)
        flush = self.emulation.flushes(producer, read)
        if flush or kept is not Format.FP32:
            roundings[RoundTo(kept, flush)] = bit
        return roundings

    def summed_op(self, node: Node, setting: Setting, summing: Summing) -> SummedOp | None:
        """``node`` as a function that adds up in an order; None if it keeps the engine's.

        Integer codes are summed exactly, so that no order matters.
        """
        if not is_summed(node):
            return None
        ports, stated = self.ports.get(node.id), self.stated(node)
        cast = ports is not None and setting.on(frozenset({(READ, node.id)}))
        read = ports.read if ports is not None and cast else self.emulation.own_read(node)
        read = stated or read
        if read.runs_on_codes:
            return None
        return SummedOp(
            summing=summing,
            op=node.op,
            attributes=node.attributes,
            format=self.emulation.sums_in(node, read),
            block=self.emulation.block_of(node, read),
        )

    def _moved_from(self, node: Node) -> Value | None:
        """The one value that ``node`` only moves, if rounding commutes with it; else None."""
        if not by_name(node.op).exact or (is_relayout(node) and self._relayout_acts):
            return None
        if node.op == PHI:
            return None
        floats = list(self.graph.following_inputs(node))
        if len(floats) != 1 or floats[0].constant is not None or node.op in READS_SHAPE_ONLY:
            return None
        return floats[0] if any(True for _ in self.graph.following_outputs(node)) else None

    def picks_constants(self, node: Node) -> bool:
        """Whether ``node`` only selects from constants: rounding its result is cheaper."""
        if not by_name(node.op).exact or node.op == PHI:
            return False
        floats = list(self.graph.following_inputs(node))
        return bool(floats) and all(v.constant is not None for v in floats)

    def deferred(self, value: Value) -> bool:
        """Whether rounding waits until after the only reader, which only moves ``value``."""
        if value.is_output or len(value.uses) != 1:
            return False
        reader = self.graph.nodes[value.uses[0]]
        source = self._moved_from(reader)
        return source is not None and source.id == value.id

    @property
    def _relayout_acts(self) -> bool:
        return self.emulation.relayout is not None and (
            self.emulation.relayout is not Format.FP32 or self.infinities_matter
        )

    @property
    def infinities_matter(self) -> bool:
        """Whether transposes by product turn Inf into NaN, or clamp it."""
        # Inf is multiplied by the identity's zeros only where the compiler has a flag for it.
        device = self.emulation.target
        flagged = device.saturate_infinity or self.emulation.saturate_infinity
        return flagged and self.emulation.relayout is not None

    def stated(self, node: Node) -> Format | None:
        """The low format that the model itself has ``node`` compute in."""
        kept = (self.low.get(v.id) for v in self.graph.following_outputs(node))
        return next((f for f in kept if f is not None), None)

    def own(self, node: Node) -> Format:
        """The format to which operands of ``node`` are rounded though it is not cast."""
        if node.format is not Format.FP32:
            return Format.FP32
        stated = self.stated(node)
        if stated is None and self._reads_codes(node):
            return Format.FP32
        if stated is None:
            return self.emulation.own_read(node)
        # The operands are in that format already; only flushing changes them.
        return stated if self.emulation.flushes(node, stated) else Format.FP32

    def _reads_codes(self, node: Node) -> bool:
        """Whether the model itself stores an operand of ``node`` as codes."""
        makers = (v.producer for v in self.graph.following_inputs(node))
        return any(m is not None and self.graph.nodes[m].op in DEQUANTIZES for m in makers)

    def reads(self, node: Node, index: int) -> dict[RoundTo, frozenset[Bit]]:
        """Roundings at input ``index`` of ``node``, a port that follows the node's format."""
        coded = self.emulation.encodings.get(node.id)
        encoding = None if coded is None else coded.at(index)
        return self._reads(node, parameter=is_parameter(node, index), encoding=encoding)

    def scalars(self, node: Node) -> dict[RoundTo, frozenset[Bit]]:
        """Roundings of operands of ``node`` that are numbers and not values of the graph."""
        return {} if node.format is not Format.FP32 else self._reads(node, parameter=False)

    def _reads(
        self, node: Node, *, parameter: bool, encoding: Stored | Dynamic | None = None
    ) -> dict[RoundTo, frozenset[Bit]]:
        roundings: dict[RoundTo, frozenset[Bit]] = {}
        own = Format.FP32 if parameter else self.own(node)
        if own is not Format.FP32:
            into = RoundTo(
                own, self.emulation.flushes(node, own), own=self.stated(node) is None
            )
            roundings[into] = frozenset({ALWAYS})
        if node.id in self.ports and node.op not in READS_SHAPE_ONLY:
            wanted = self.ports[node.id].read
            if wanted.has_scales and encoding is None:
                wanted = wanted.result  # an operand without codes
            if wanted is not Format.FP32 and wanted is not own:
                flush = self.emulation.flushes(node, wanted) and not parameter
                instead = any(i.own for i in roundings)
                into = RoundTo(wanted, flush, instead=instead, encoding=encoding)
                bit = (PARAMETER if parameter else READ, node.id)
                roundings = joined(roundings, {into: frozenset({bit})})
        relayout = self.emulation.relayout
        if is_relayout(node) and relayout is not None and relayout is not Format.FP32:
            roundings = joined(roundings, {RoundTo(relayout): frozenset({RELAYOUT})})
        return roundings


def joined(a: Roundings, b: Roundings) -> dict[RoundTo, frozenset[Bit]]:
    """The roundings of both; the bits of equal ones are united."""
    merged = dict(a)
    for into, bits in b.items():
        merged[into] = merged.get(into, frozenset()) | bits
    return merged


@dataclass(slots=True, kw_only=True)
class RoundedViews:
    """A value as its readers see it: a tensor, as the library has it.

    Attributes:
        native: The value itself.
        rounding: Gives a rounded copy of a value.
        choice: Gives its second argument where a bit is set, else its third.
        fixed: The one setting to build for; None if bits are evaluated in the model.
    """

    native: Any
    rounding: Callable[[Any, RoundTo], Any]
    choice: Callable[[frozenset[Bit], Any, Any], Any]
    fixed: Setting | None
    _rounded: dict[RoundTo, Any] = field(default_factory=dict[RoundTo, Any])
    _views: dict[object, Any] = field(default_factory=dict[object, Any])

    def of(self, roundings: Roundings) -> Any:
        """The value after ``roundings``, one after the other.

        A rounding that comes ``instead`` of the engine's ``own`` is made of the value before
        that one, so that the value is not rounded twice.
        """
        key = tuple(roundings.items())
        if key not in self._views:
            base = view = self.native
            for into, bits in key:
                below = base if into.instead else view
                base = view if into.own else base
                if self.fixed is None or self.fixed.on(bits):
                    low = self._once(below, into)
                    certain = self.fixed is not None or ALWAYS in bits
                    view = low if certain else self.choice(bits, low, view)
            self._views[key] = view
        return self._views[key]

    def _once(self, base: Any, into: RoundTo) -> Any:
        """A rounded copy of ``base``; of the value itself there is one of each kind."""
        if base is not self.native:
            return self.rounding(base, into)
        if into not in self._rounded:
            self._rounded[into] = self.rounding(base, into)
        return self._rounded[into]
