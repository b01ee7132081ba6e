"""What a device rounds: by value and reader, to which format and on which bits.

It is said here once, on the neutral graph, for models of every library: ONNX models are
rewritten by it (``model``), PyTorch programs interpreted by it (``torch_session``).

Laws: rounding is asked for once where it commutes with ops that only move numbers: after the
last of a chain of them. What is added to a product (a bias) is no operand of it: the sum
leaves the engine in fp32, and the addend is cast with the parameters of norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from finecast.devices.emulation import EmulatedPorts, Emulation, is_parameter, is_relayout
from finecast.devices.setting import ALWAYS, PARAMETER, READ, RELAYOUT, WRITE, Bit
from finecast.graph import PHI, Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounder
from finecast.numbers.scaled import Scaled
from finecast.ops import OpKind, by_name
from finecast.rules.quantized import DEQUANTIZES


@dataclass(frozen=True, slots=True)
class Into:
    """A format that a value comes into; ``flush``: subnormals of it become zero.

    Into fp32 with ``flush`` rounds nothing else: it is what an engine does to its sums.
    ``own`` is what an engine does to operands that nothing casts; ``instead`` takes its place.
    ``encoding`` has the parameters of a format with scales.
    """

    format: Format
    flush: bool = False
    own: bool = False
    instead: bool = False
    encoding: Scaled | None = None


Wants = Mapping[Into, frozenset[Bit]]
Port = tuple[int, int]
"""A node's id and the index of one of its inputs."""
_NO_FLOAT_RESULT: Final = frozenset({"shape", "size"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueWants:
    """What one value is rounded to: where it is stored, and at each port that reads it.

    Ports that are not in ``ports`` read it as it is stored.
    """

    stored: Wants
    ports: Mapping[Port, Wants]


@dataclass(slots=True, kw_only=True)
class RoundWants:
    """Answers for one graph under one emulation.

    Attributes:
        graph: The model.
        emulation: The target and its options; what is cast is a matter of the setting.
        kernel_of: The kernel, by number, of each node that runs with others as one.
        low: Formats in which the model itself stores values, by id.
        formats: Formats of nodes for which ``emulation.format`` is not meant.
        stored: What storing each value rounds to, filled in the graph's order.
    """

    graph: Graph
    emulation: Emulation
    kernel_of: Mapping[int, int] = field(default_factory=dict[int, int])
    low: Mapping[int, Format] = field(default_factory=dict[int, Format])
    formats: Mapping[int, Format] = field(default_factory=dict[int, Format])
    ports: dict[int, EmulatedPorts] = field(init=False)
    stored: dict[int, dict[Into, frozenset[Bit]]] = field(init=False)

    def __post_init__(self) -> None:
        """Go through the graph once."""
        self.ports = {
            n.id: p
            for n in self.graph.float_nodes
            if (p := self._emulation_of(n).ports(n)) is not None
        }
        self.stored = {
            value.id: {Into(fmt): frozenset({ALWAYS})}
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

    def value(self, value: Value) -> ValueWants:
        """Where ``value`` is rounded; nowhere if that waits until after its only reader."""
        if self.deferred(value):
            return ValueWants(stored={}, ports={})
        inside = self.inside(value)
        stored = self.stored.get(value.id, {})
        if inside:  # the engine's own sums are what they are
            maker = value.producer
            stored = {} if maker is None else self.sums(self.graph.nodes[maker])
        ports: dict[Port, Wants] = {}
        for node in (self.graph.nodes[n] for n in value.uses):
            if node.op == PHI or (inside and not by_name(node.op).matmul_engine):
                continue
            for index, source in enumerate(node.inputs):
                if source == value.id and node.follows_in[index]:
                    ports[node.id, index] = joined(stored, self.reads(node, index))
        return ValueWants(stored=stored, ports=ports)

    def constant(self, node: Node, index: int) -> Wants:
        """What ``node`` rounds the constant at input ``index`` to."""
        if node.op == PHI or self.picks_constants(node) or node.format is not Format.FP32:
            return {}
        return self.reads(node, index) if node.follows_in[index] else {}

    def conversion(self, value: Value, into: Into) -> Rounder:
        """How ``value`` comes into a format."""
        return self.emulation.conversion(
            into.format, into.encoding, standalone=self.standalone(value), flush=into.flush
        )

    def standalone(self, value: Value) -> bool:
        """Whether converting ``value`` is a kernel of its own."""
        if value.producer is None:
            return value.constant is None
        norm = by_name(self.graph.nodes[value.producer].op).kind is OpKind.NORM
        return norm and self.emulation.rounds_normalized

    def spoils_infinities(self, node: Node) -> bool:
        """Whether ``node`` is a transpose by product, which Inf does not get through."""
        return is_relayout(node) and node.format is Format.FP32 and self.infinities_matter

    def stores(self, value: Value, producer: Node) -> dict[Into, frozenset[Bit]]:
        """What storing ``value`` rounds to, and when."""
        given = self.low.get(value.id)
        if given is not None:
            held = {Into(self.emulation.held(given)): frozenset({ALWAYS})}
            return joined(self.sums(producer), held)
        source = self._moved_from(producer)
        if source is not None:
            before = self.stored.get(source.id, {}) if self.deferred(source) else {}
            if producer.id not in self.ports or not self.deferred(source):
                return dict(before)
            return joined(
                before,
                {Into(self.ports[producer.id].read): frozenset({(READ, producer.id)})},
            )
        if producer.id not in self.ports:
            return {}
        if self.picks_constants(producer):
            return {Into(self.ports[producer.id].read): frozenset({(READ, producer.id)})}
        if by_name(producer.op).exact:
            return {}
        wanted = self.ports[producer.id].write
        found = self.sums(producer)
        if wanted is Format.FP32:
            return found
        return joined(found, {Into(wanted): frozenset({(WRITE, producer.id)})})

    def sums(self, producer: Node) -> dict[Into, frozenset[Bit]]:
        """What the engine does to the sums of ``producer`` before they leave it."""
        found: dict[Into, frozenset[Bit]] = {}
        if producer.id not in self.ports or not by_name(producer.op).matmul_engine:
            return found
        stated = self.stated(producer)
        bit = frozenset({(READ, producer.id) if stated is None else ALWAYS})
        read = stated or self.ports[producer.id].read
        kept = self.emulation.sums_in(producer, read)
        flush = self.emulation.flushes(producer, read)
        if flush or kept is not Format.FP32:
            found[Into(kept, flush)] = bit
        return found

    def _moved_from(self, node: Node) -> Value | None:
        """The one value that ``node`` only moves, where rounding commutes with it."""
        if not by_name(node.op).exact or (is_relayout(node) and self._relayout_acts):
            return None
        if node.op == PHI:
            return None
        floats = list(self.graph.following_inputs(node))
        if len(floats) != 1 or floats[0].constant is not None or node.op in _NO_FLOAT_RESULT:
            return None
        return floats[0] if any(True for _ in self.graph.following_outputs(node)) else None

    def picks_constants(self, node: Node) -> bool:
        """Whether ``node`` only picks from constants: cheaper to round what it picked."""
        if not by_name(node.op).exact or node.op == PHI:
            return False
        floats = list(self.graph.following_inputs(node))
        return bool(floats) and all(v.constant is not None for v in floats)

    def deferred(self, value: Value) -> bool:
        """Whether rounding waits until after the only reader, which just moves the value."""
        if value.is_output or len(value.uses) != 1:
            return False
        reader = self.graph.nodes[value.uses[0]]
        source = self._moved_from(reader)
        return source is not None and source.id == value.id

    def inside(self, value: Value) -> bool:
        """Whether ``value`` never leaves one kernel."""
        if value.producer is None or value.is_output or not value.uses:
            return False
        kernel = self.kernel_of.get(value.producer)
        return kernel is not None and all(self.kernel_of.get(n) == kernel for n in value.uses)

    @property
    def _relayout_acts(self) -> bool:
        return self.emulation.relayout is not None and (
            self.emulation.relayout is not Format.FP32 or self.infinities_matter
        )

    @property
    def infinities_matter(self) -> bool:
        """Whether transposes by product turn Inf into NaN, or clamp it."""
        # Only where the compiler has a flag against them do they meet the identity's zeros.
        device = self.emulation.target
        flagged = device.saturate_infinity or self.emulation.saturate_infinity
        return flagged and self.emulation.relayout is not None

    def stated(self, node: Node) -> Format | None:
        """The low format that the model itself has ``node`` compute in."""
        kept = (self.low.get(v.id) for v in self.graph.following_outputs(node))
        return next((f for f in kept if f is not None), None)

    def own(self, node: Node) -> Format:
        """To what operands of ``node`` are rounded though nothing casts it."""
        if node.format is not Format.FP32:
            return Format.FP32
        stated = self.stated(node)
        if stated is None and self._reads_codes(node):
            return Format.FP32
        if stated is None:
            return self.emulation.own_read(node)
        # They are in that format already; what is left to do is to flush.
        return stated if self.emulation.flushes(node, stated) else Format.FP32

    def _reads_codes(self, node: Node) -> bool:
        """Whether the model has an operand of ``node`` as codes, taken as they are."""
        makers = (v.producer for v in self.graph.following_inputs(node))
        return any(m is not None and self.graph.nodes[m].op in DEQUANTIZES for m in makers)

    def reads(self, node: Node, index: int) -> dict[Into, frozenset[Bit]]:
        """What ``node`` rounds to at input ``index``, which follows its format, and when."""
        coded = self.emulation.encodings.get(node.id)
        encoding = None if coded is None else coded.at(index)
        return self._reads(node, parameter=is_parameter(node, index), encoding=encoding)

    def scalars(self, node: Node) -> dict[Into, frozenset[Bit]]:
        """What ``node`` rounds numbers to that are operands and no values of the graph."""
        return {} if node.format is not Format.FP32 else self._reads(node, parameter=False)

    def _reads(
        self, node: Node, *, parameter: bool, encoding: Scaled | None = None
    ) -> dict[Into, frozenset[Bit]]:
        found: dict[Into, frozenset[Bit]] = {}
        own = Format.FP32 if parameter else self.own(node)
        if own is not Format.FP32:
            into = Into(own, self.emulation.flushes(node, own), own=self.stated(node) is None)
            found[into] = frozenset({ALWAYS})
        if node.id in self.ports and node.op not in _NO_FLOAT_RESULT:
            wanted = self.ports[node.id].read
            if wanted.scaled and encoding is None:
                wanted = Format.FP32  # an operand that stays as it is
            if wanted is not Format.FP32 and wanted is not own:
                flush = self.emulation.flushes(node, wanted) and not parameter
                instead = any(i.own for i in found)
                into = Into(wanted, flush, instead=instead, encoding=encoding)
                bit = (PARAMETER if parameter else READ, node.id)
                found = joined(found, {into: frozenset({bit})})
        relayout = self.emulation.relayout
        if is_relayout(node) and relayout is not None and relayout is not Format.FP32:
            found = joined(found, {Into(relayout): frozenset({RELAYOUT})})
        return found


def joined(a: Wants, b: Wants) -> dict[Into, frozenset[Bit]]:
    """Both, the bits of a format together."""
    merged = dict(a)
    for into, bits in b.items():
        merged[into] = merged.get(into, frozenset()) | bits
    return merged
