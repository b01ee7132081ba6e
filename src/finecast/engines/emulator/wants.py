"""What emulation rounds: by value and reader, to which format and on which bits.

Law: rounding is asked for once where it commutes with ops that only move numbers: after the
last of a chain of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from finecast.devices.emulation import Emulation, Ports, is_relayout
from finecast.engines.emulator.setting import ALWAYS, READ, RELAYOUT, WRITE, Bit
from finecast.frontends.onnx.reader import Binding
from finecast.frontends.onnx.widen import stored_format
from finecast.graph import Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.ops import by_name


@dataclass(frozen=True, slots=True)
class Into:
    """A format that a value comes into; ``flush``: subnormals of it become zero.

    Into fp32 with ``flush`` rounds nothing else: it is what an engine does to its sums.
    ``own`` is what an engine does to operands that nothing casts; ``instead`` takes its place.
    """

    format: Format
    flush: bool = False
    own: bool = False
    instead: bool = False


Wants = Mapping[Into, frozenset[Bit]]
_NO_FLOAT_RESULT: Final = frozenset({"shape", "size"})


@dataclass(slots=True, kw_only=True)
class RoundWants:
    """Answers for one graph under one emulation.

    ``stored`` holds what storing each value rounds to, filled in the graph's order.
    """

    graph: Graph
    binding: Binding
    emulation: Emulation
    kernel_of: Mapping[int, int]
    leaders: Mapping[int, int]
    ports: dict[int, Ports] = field(init=False)
    stored: dict[int, dict[Into, frozenset[Bit]]] = field(init=False)

    def __post_init__(self) -> None:
        """Go through the graph once."""
        self.ports = {
            n.id: p
            for n in self.graph.float_nodes
            if (p := self.emulation.ports(n)) is not None
        }
        self.stored = {
            value.id: {Into(fmt): frozenset({ALWAYS})}
            for value in self.graph.inputs
            if (fmt := stored_format(self.binding.values[value.id])) is not None
        }
        for node in self.graph.nodes:
            for index in node.outputs:
                if index is not None:
                    self.stored[index] = self.stores(self.graph.values[index], node)

    def bit(self, kind: str, node: Node) -> Bit:
        """The node's bit, or that of the set it is cast together with."""
        return kind, self.leaders.get(node.id, node.id)

    def stores(self, value: Value, producer: Node) -> dict[Into, frozenset[Bit]]:
        """What storing ``value`` rounds to, and when."""
        given = stored_format(self.binding.values[value.id])
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
                {Into(self.ports[producer.id].read): frozenset({self.bit(READ, producer)})},
            )
        if producer.id not in self.ports:
            return {}
        if self.picks_constants(producer):
            return {Into(self.ports[producer.id].read): frozenset({self.bit(READ, producer)})}
        if by_name(producer.op).exact:
            return {}
        wanted = self.ports[producer.id].write
        found = self.sums(producer)
        if wanted is Format.FP32:
            return found
        return joined(found, {Into(wanted): frozenset({self.bit(WRITE, producer)})})

    def sums(self, producer: Node) -> dict[Into, frozenset[Bit]]:
        """What the engine does to the sums of ``producer`` before they leave it."""
        found: dict[Into, frozenset[Bit]] = {}
        if producer.id not in self.ports or not by_name(producer.op).matmul_engine:
            return found
        stated = self.stated(producer)
        bit = frozenset({self.bit(READ, producer) if stated is None else ALWAYS})
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
        if self.binding.nodes[node.id] is None:
            return None
        floats = list(self.graph.following_inputs(node))
        if len(floats) != 1 or floats[0].constant is not None or node.op in _NO_FLOAT_RESULT:
            return None
        return floats[0] if any(True for _ in self.graph.following_outputs(node)) else None

    def picks_constants(self, node: Node) -> bool:
        """Whether ``node`` only picks from constants: cheaper to round what it picked."""
        if not by_name(node.op).exact or self.binding.nodes[node.id] is None:
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
        kept = (self.binding.values[v.id] for v in self.graph.following_outputs(node))
        return next((f for v in kept if (f := stored_format(v)) is not None), None)

    def own(self, node: Node) -> Format:
        """To what operands of ``node`` are rounded though nothing casts it."""
        if node.format is not Format.FP32:
            return Format.FP32
        stated = self.stated(node)
        if stated is None:
            return self.emulation.own_read(node)
        # They are in that format already; what is left to do is to flush.
        return stated if self.emulation.flushes(node, stated) else Format.FP32

    def reads(self, node: Node, value: Value) -> dict[Into, frozenset[Bit]]:
        """What ``node`` rounds ``value`` to at its port, and when."""
        found: dict[Into, frozenset[Bit]] = {}
        if not any(v.id == value.id for v in self.graph.following_inputs(node)):
            return found
        own = self.own(node)
        if own is not Format.FP32:
            into = Into(own, self.emulation.flushes(node, own), own=self.stated(node) is None)
            found[into] = frozenset({ALWAYS})
        if node.id in self.ports and node.op not in _NO_FLOAT_RESULT:
            wanted = self.ports[node.id].read
            if wanted is not Format.FP32 and wanted is not own:
                flush = self.emulation.flushes(node, wanted)
                into = Into(wanted, flush, instead=any(i.own for i in found))
                found = joined(found, {into: frozenset({self.bit(READ, node)})})
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
